from pathlib import Path

import numpy as np
import pytest

from lra.data import words
from lra.data.vocabulary import PART_TOKENS
from lra.errors import UserError

TEXT = " b a b \n \n c <unk> b \n"


def test_ids_by_frequency_then_order() -> None:
    vocabulary = words.by_frequency("words", [TEXT.encode()], line_ends=True)
    assert vocabulary.state() == b"<eos>\nb\na\nc\n<unk>"
    assert vocabulary.encode(TEXT).tolist() == [1, 2, 1, 0, 0, 3, 4, 1, 0]
    assert (vocabulary.start, vocabulary.complete, vocabulary.lossless) == (0, True, False)
    without = words.by_frequency("words_no_eos", [TEXT.encode()], line_ends=False)
    assert without.encode(TEXT).tolist() == [0, 1, 0, 2, 3, 0]
    assert (without.start, without.complete) == (3, False)


def test_unknown_words_follow_the_rule() -> None:
    vocabulary = words.by_frequency("words", [TEXT.encode()], line_ends=True)
    assert vocabulary.encode("a new b\n").tolist() == [2, 4, 1, 0]
    with pytest.raises(UserError, match="vocabulary 'words' has neither the word 'new' nor <unk>"):
        words.Words("words", ["<eos>", "a"]).encode("a new")
    with pytest.raises(UserError, match="byte 2 of a text is not UTF-8"):
        vocabulary.encode(b"a \xff")
    with pytest.raises(UserError, match="ids 0 to 4"):
        vocabulary.decode([5])


def test_white_space_is_that_of_unicode() -> None:
    vocabulary = words.by_frequency("words", ["a\u3000b\u00a0c\td".encode()], line_ends=False)
    assert vocabulary.size == 4


def test_bytes_and_text() -> None:
    text = " é b \n \n a <unk> \n"
    vocabulary = words.by_frequency("words", [text.encode()], line_ends=True)
    tokens = vocabulary.encode(text)
    assert vocabulary.decode(tokens) == text.encode()[1:] + b" "
    assert vocabulary.num_bytes(tokens) == len(text.encode())
    assert vocabulary.num_characters(tokens) == len(text)
    assert b"".join(vocabulary.decode([token]) for token in tokens) == vocabulary.decode(tokens)
    many = np.tile(tokens, PART_TOKENS // tokens.size + 2)
    assert vocabulary.num_bytes(many) == len(text.encode()) * (many.size // tokens.size)


def test_kept_and_loaded() -> None:
    vocabulary = words.by_frequency("words", [TEXT.encode()], line_ends=True)
    again = words.load("words", vocabulary.state())
    assert again.digest == vocabulary.digest
    assert again.encode(TEXT).tolist() == vocabulary.encode(TEXT).tolist()
    assert words.load("other", vocabulary.state()).digest != vocabulary.digest


def test_the_words_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("b\n<unk>\n<eos>\na\n", encoding="utf-8")
    assert words.words_of(str(path)).state() == b"b\n<unk>\n<eos>\na"
    assert words.words_of(str(path)).encode("a new b\n").tolist() == [3, 1, 0, 2]
    path.write_text("é\nmadeupword0000", encoding="utf-8")
    listed = words.words_of(str(path))
    assert listed.state() == "<eos>\n<unk>\né\nmadeupword0000".encode()
    counted = tmp_path / "dict.txt"
    counted.write_text("é 7\nmadeupword0000 5\nmadeupword0001 0\nmadeupword0002 0\n", encoding="utf-8")
    assert words.words_of(str(counted)).state() == listed.state()
    assert words.words_of(str(counted)).digest == listed.digest
    counted.write_text("é 7\nè 5\n", encoding="utf-8")
    assert words.words_of(str(counted)).digest != listed.digest
    assert words.words_of(str(counted)).name != listed.name  # which names the file of tokens


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ":1 has '': give one with a word, or"),
        (b"a 3\nb\n", ":2 has 'b'"),
        (b"a\nb 3\n", ":2 has 'b 3'"),
        (b"a\n\nb\n", ":2 has ''"),
        (b"a 3\nb 2\na 1\n", ":3 has the word a again: .* each word once"),
        (b"a\xff\n", "byte 1 of the words .* is not UTF-8"),
    ],
)
def test_a_file_that_is_no_list_of_words(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        words.words_of(str(path))


def test_a_file_of_words_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.txt cannot be read \(No such file or directory\): give one"):
        words.words_of(str(tmp_path / "none.txt"))
