"""Vocabularies of bytes, against the papers' own steps written out line by line."""

import collections

import numpy as np
import pytest

from lra.data import Vocabulary, symbols
from lra.errors import UserError

SPLITS = (b"one\ntwo  three\n\n\tfour\n" * 3, b"\nfive", b"six\n")


def decimal(split: bytes) -> list[list[str]]:
    """The file that both papers prepare: byte values in decimals, newlines as newlines; its lines, split at spaces."""
    prepared = " ".join(str(byte) if byte != 10 else "\n" for byte in split)
    lines = prepared.split("\n")
    return [line.split() for line in (lines[:-1] if prepared.endswith("\n") else lines)]


def test_transformer_xl() -> None:
    counter = collections.Counter[str]()
    for split in SPLITS:
        for line in decimal(split):
            counter.update(line)
    ids = {symbol: number for number, (symbol, _) in enumerate(counter.most_common())}
    vocabulary = symbols.transformer_xl(iter(SPLITS))
    assert vocabulary.size == len(ids)
    for split in SPLITS:
        expected = [ids[symbol] for line in decimal(split) for symbol in line]
        assert np.concatenate(list(vocabulary.encode_all([split[:7], split[7:]]))).tolist() == expected
        assert vocabulary.decode(expected) == split.replace(b"\n", b"")
        assert vocabulary.num_bytes(np.asarray(expected)) == len(expected)
        assert vocabulary.num_characters(np.asarray(expected)) == len(
            split.replace(b"\n", b"").decode("utf-8", "ignore")
        )
    assert not vocabulary.lossless
    assert not vocabulary.complete


def test_adaptive_span() -> None:
    ids: dict[str, int] = {}
    tokens = []
    for split in SPLITS:
        tokens.append([ids.setdefault(word, len(ids)) for line in decimal(split) for word in [*line, "<eos>"]])
    vocabulary = symbols.adaptive_span(iter(SPLITS))
    assert vocabulary.size == len(ids)
    assert vocabulary.start == ids["<eos>"]
    for split, expected in zip(SPLITS, tokens, strict=True):
        assert np.concatenate(list(vocabulary.encode_all([split[:5], split[5:]]))).tolist() == expected


def test_t2t_shifts_bytes() -> None:
    text = bytes(range(256))
    vocabulary = symbols.tensor2tensor()
    ids = vocabulary.encode(text)
    assert (vocabulary.size, vocabulary.start, ids.dtype) == (258, 1, np.uint16)
    assert ids.tolist() == [byte + 2 for byte in text]
    assert vocabulary.decode([0, 1, *ids]) == text
    assert vocabulary.num_characters(np.asarray([0, 1, *vocabulary.encode("a\u00e4\u20ac")])) == 3
    assert vocabulary.lossless


def test_characters() -> None:
    vocabulary = symbols.characters()
    assert vocabulary.size == 27
    assert vocabulary.decode(vocabulary.encode(" the quick brown fox")) == b" the quick brown fox"
    with pytest.raises(UserError, match=r"byte b'T' is none of the 27 symbols of vocabulary 'chars'"):
        vocabulary.encode("The")


def test_what_the_text_has_not() -> None:
    with pytest.raises(UserError, match="byte b'Z' is none of the"):
        symbols.transformer_xl(iter(SPLITS)).encode(b"Z")
    with pytest.raises(UserError, match="ids 0 to 26"):
        symbols.characters().decode([27])
    assert symbols.adaptive_span([b"no line end"]).encode("\n").size == 1


@pytest.mark.parametrize(
    ("vocabulary", "load"),
    [
        (symbols.transformer_xl(SPLITS), symbols.load_transformer_xl),
        (symbols.adaptive_span(SPLITS), symbols.load_adaptive_span),
    ],
)
def test_kept_and_loaded(vocabulary: Vocabulary, load) -> None:
    again = load(vocabulary.state())
    assert again.digest == vocabulary.digest
    assert (again.encode(SPLITS[0]) == vocabulary.encode(SPLITS[0])).all()
    assert (again.start, again.size, again.complete) == (vocabulary.start, vocabulary.size, vocabulary.complete)
