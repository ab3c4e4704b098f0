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
