"""Speed on one core, and memory for a corpus of WikiText-103's size."""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import lra
from lra.data import Bytes, Vocabulary, symbols, words

PREPARE = """
import json, sys
from pathlib import Path
from lra.data.corpora import WikiText103Head
corpus = WikiText103Head()
corpus.prepare_from(Path(sys.argv[1]))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # ru_maxrss counts the parent's
tokens = sum(corpus.tokens(split).size for split in ("train", "valid", "test"))
print(json.dumps({"kB": int(peak.split()[1]), "ids": corpus.vocabulary.size, "tokens": tokens}))
"""


def zipf(tokens: int, seed: int, types: int = 267_735) -> str:
    """Lines of 20 words as frequent as those of a natural text."""
    ranks = np.random.default_rng(seed).zipf(1.2, tokens) % types
    lines = ranks.reshape(-1, 20).tolist()
    return "".join(f" {' '.join(f'w{rank:04d}' for rank in line)} \n" for line in lines)


@pytest.mark.slow  # figures of a machine that is idle
@pytest.mark.parametrize(
    ("make", "least"),
    [
        (lambda text: Bytes(), 20),
        (lambda text: symbols.transformer_xl([text]), 20),
        (lambda text: symbols.adaptive_span([text]), 20),
        (lambda text: symbols.tensor2tensor(), 20),
        (lambda text: words.by_frequency("words", [text], line_ends=True), 2),
    ],
    ids=["bytes", "txl", "adaptive_span", "t2t", "words"],
)
def test_encoding_speed(make: Callable[[bytes], Vocabulary], least: float) -> None:
    """In MB/s of processor time, in pieces of a MB as corpora are read."""
    text = zipf(3_000_000, seed=0).encode()
    vocabulary = make(text)
    ends = [text.index(b"\n", place) + 1 for place in range(1 << 20, len(text), 1 << 20)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise([0, *ends])]
    began = time.process_time()
    for _ in vocabulary.encode_all(pieces):
        pass
    speed = sum(map(len, pieces)) / (time.process_time() - began) / 1e6
    print(f"{vocabulary.name}: {speed:.0f} MB/s")
    assert speed > least


@pytest.mark.slow
def test_a_corpus_of_540_mb_prepares_in_less_than_a_gigabyte(tmp_path: Path) -> None:
    path, size, seed = tmp_path / "train", 0, 0
    with path.open("wb") as file:
        file.write(b" \n = Valkyria Chronicles III = \n")
        while size < 540_000_000:
            size += file.write(zipf(4_000_000, seed).encode())
            seed += 1
    environment = {
        **os.environ, "PYTHONPATH": str(Path(lra.__file__).parents[1]), "LRA_DATA_DIR": str(tmp_path / "prepared"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, str(path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert found["tokens"] > 80_000_000
    assert found["kB"] < 1_000_000
