"""The score by frequency in train: borders of the buckets, what never occurs, sums; and how it is shown."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib import image
from rich.console import Console

from lra.data import Batch
from lra.evaluation import BREAKDOWNS, ByFrequency, by_frequency
from lra.evaluation.by_frequency import token_counts

COUNTS = (0, 1, 99, 100, 999, 1_000, 10_000, 10_001)
"""How often ids 0 to 7 occur in train."""


@pytest.fixture
def known(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> ByFrequency:
    """Id n is scored n + 1 times, each for n nats and a half; what does not count is NaN."""
    monkeypatch.setattr(by_frequency, "PART_TOKENS", 997)
    train = rng.permutation(np.repeat(np.arange(8), COUNTS)).astype(np.uint8)
    corpus: Any = SimpleNamespace(tokens={"train": train}.__getitem__, vocabulary=SimpleNamespace(size=8))
    breakdown = ByFrequency()
    breakdown.begin(None, corpus, None, 0)
    targets = rng.permutation(np.repeat(np.arange(8), np.arange(1, 9))).reshape(2, 18)
    weights = np.ones((2, 18), np.float32)
    weights[1, 5:] = 0
    for part in (weights, 1 - weights):
        nats = np.where(part > 0, targets + np.float32(0.5), np.nan).astype(np.float32)
        breakdown.add(Batch(targets, targets, part, np.asarray([True] * 2)), nats, {})
    return breakdown


def test_buckets(known: ByFrequency) -> None:
    shown = json.loads(json.dumps(known.as_dict(), allow_nan=False))
    members = {">10K": [7], "1K-10K": [5, 6], "100-1K": [3, 4], "<100": [0, 1, 2]}
    for bucket, (name, ids) in zip(shown["buckets"], members.items(), strict=True):
        tokens, nats = sum(n + 1 for n in ids), sum((n + 1) * (n + 0.5) for n in ids)
        assert (bucket["occurrences"], bucket["tokens"], bucket["nats_total"]) == (name, tokens, nats)
        assert bucket["nats_per_token"] == pytest.approx(nats / tokens)
        assert bucket["perplexity"] == pytest.approx(np.exp(nats / tokens))
        assert bucket["share_of_nats"] == pytest.approx(nats / sum((n + 1) * (n + 0.5) for n in range(8)))
        assert bucket["share_of_tokens"] == pytest.approx(tokens / 36)
    unseen = shown["unseen"]
    assert (unseen["part_of"], unseen["tokens"], unseen["nats_total"]) == ("<100", 1, 0.5)
    assert BREAKDOWNS["frequency"] is ByFrequency


def test_as_table_and_png(known: ByFrequency, tmp_path: Path) -> None:
    known._tokens[0], known._nats[0] = 0, 0
    known._nats[1] = 13 * 1e4
    console = Console(width=100)
    with console.capture() as capture:
        console.print(known.table())
    lines = [line.split("│")[1:-1] for line in capture.get().splitlines() if line.startswith("│")]
    first, second, *_, last = [[cell.strip() for cell in line] for line in lines]
    assert first == [">10K", "0", "-", "-", "0.00%", "0.00%"]
    assert second[:4] == ["1K-10K", "13", "10000.0000", "-"]  # no float holds this perplexity
    assert last[:3] == ["unseen", "1", "0.5000"]
    known.png(tmp_path / "by.png", "runs/toy at step 3")
    assert image.imread(tmp_path / "by.png").shape[1] > 400
    assert b"By frequency, runs/toy at step 3" in (tmp_path / "by.png").read_bytes()


def test_counts_of_a_file(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_frequency, "PART_TOKENS", 100)
    tokens = rng.integers(0, 300, 1009).astype(np.uint32)
    np.save(tmp_path / "tokens.npy", tokens)
    counted = token_counts(np.load(tmp_path / "tokens.npy", mmap_mode="r"), 307)
    assert counted.tolist() == [int((tokens == n).sum()) for n in range(307)]
