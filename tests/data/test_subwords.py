"""SentencePiece: the same text gives the same model, and text comes back."""

from pathlib import Path

import numpy as np
import pytest

from lra.data import subwords
from lra.data.vocabulary import Recipe
from lra.errors import UserError

BOOK = ("It is a truth universally acknowledged,\n\n  that a text \t is long é enough. " * 40).encode()


def texts() -> list[bytes]:
    return [BOOK, BOOK[::2].decode("utf-8", "ignore").encode(), b"", b"one line"]


@pytest.fixture(scope="module")
def vocabulary() -> subwords.SentencePiece:
    return subwords.train("sentencepiece_300", texts, 300)


def test_training_is_deterministic(vocabulary: subwords.SentencePiece) -> None:
    again = subwords.train("sentencepiece_300", texts, 300)
    assert again.state() == vocabulary.state()
    assert again.digest == vocabulary.digest
    assert 256 < vocabulary.size <= 300


def test_text_comes_back(vocabulary: subwords.SentencePiece) -> None:
    for text in (BOOK.decode(), "", "\n", "  two  spaces \r\n\t漢字 \0 \N{GRINNING FACE}<unk>\n\n"):
        ids = vocabulary.encode(text)
        assert ids.dtype == vocabulary.dtype
        assert vocabulary.decode(ids) == text.encode()
        assert vocabulary.num_bytes(ids) == len(text.encode())
        assert vocabulary.num_characters(ids) == len(text)
        assert b"".join(vocabulary.decode([token]) for token in ids) == text.encode()
    assert vocabulary.encode(BOOK).size < 0.8 * len(BOOK)
    assert vocabulary.decode([vocabulary.start]) == b"\n"


def test_a_given_model(vocabulary: subwords.SentencePiece, tmp_path: Path) -> None:
    path = tmp_path / "my.model"
    path.write_bytes(vocabulary.state())
    given = subwords.sentencepiece_of(str(path))
    assert isinstance(given, subwords.SentencePiece)
    assert given.name.startswith("sentencepiece_")
    assert (given.encode(BOOK) == vocabulary.encode(BOOK)).all()
    recipe = subwords.sentencepiece_of("300")
    assert isinstance(recipe, Recipe)
    assert recipe.load(vocabulary.state()).digest == vocabulary.digest


def test_the_sample_is_the_middle_of_each_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subwords, "TRAIN_BYTES", 20)
    found = list(subwords._lines(lambda: [b"0123456789" * 3, b"short", b"ab\n" * 9, b""]))
    assert found == ["23456", "short", "ab", "a"]
    assert np.mean([len(line) for line in found]) <= 5


def test_mistakes(vocabulary: subwords.SentencePiece, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="byte 1 of a text is not UTF-8, which SentencePiece needs"):
        vocabulary.encode(b"a\xff")
    with pytest.raises(UserError, match=r"gone\.model cannot be read"):
        subwords.sentencepiece_of(str(tmp_path / "gone.model"))
    (tmp_path / "text.model").write_bytes(b"no model")
    with pytest.raises(UserError, match="should be a SentencePiece model is none"):
        subwords.sentencepiece_of(str(tmp_path / "text.model"))
    with pytest.raises(UserError, match="no SentencePiece model of 20 pieces can be trained"):
        subwords.train("small", texts, 20)
