"""Compressors against the command-line tools' own format and known extremes."""

import gzip
import lzma

import numpy as np
import pytest

from lra.evaluation.reference import compressed


def test_bits_per_byte(rng: np.random.Generator) -> None:
    noise = rng.bytes(100_003)
    scores = compressed(noise)
    assert list(scores) == ["gzip -9", "bzip2 -9", "xz -9"]
    for bits in scores.values():
        assert 8 < bits < 8.07
    for bits in compressed(b"a" * 100_003).values():
        assert bits < 0.02


def test_sizes_are_those_of_the_streams() -> None:
    text = b"".join(b"%d bottles of beer\n" % n for n in range(997))
    scores = compressed(text)
    assert scores["gzip -9"] == 8 * len(gzip.compress(text, compresslevel=9, mtime=0)) / len(text)
    assert scores["xz -9"] == 8 * len(lzma.compress(text, format=lzma.FORMAT_XZ, preset=9)) / len(text)
    assert scores["xz -9"] < scores["gzip -9"] < 8


def test_no_bytes() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        compressed(b"")
