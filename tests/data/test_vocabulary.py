import numpy as np
import pytest

from lra.data import Bytes
from lra.data.vocabulary import num_characters
from lra.errors import UserError


def test_bytes_are_lossless() -> None:
    text = bytes(range(256)) + b"\r\n\x00\xff"
    ids = Bytes().encode(text)
    assert ids.dtype == np.uint8 == Bytes().dtype
    assert Bytes().decode(ids) == text
    assert Bytes().num_bytes(ids[3:17]) == 14


@pytest.mark.parametrize("text", ["", "a\n", "\u00e4\u20ac\U0001f600 a\u0301", "\u0416" * 31])
def test_characters_are_those_of_unicode(text: str) -> None:
    """Python's own count; in parts cut anywhere too, of which each has the characters that begin in it."""
    ids = Bytes().encode(text)
    assert Bytes().num_characters(ids) == num_characters(text.encode()) == len(text)
    for cut in range(ids.size + 1):
        parts = Bytes().num_characters(ids[:cut]), Bytes().num_characters(ids[cut:])
        assert sum(parts) == len(text)
        assert parts[0] == len(ids[:cut].tobytes().decode("utf-8", "replace"))


def test_strings_are_utf8() -> None:
    assert Bytes().encode("\u00e4\n").tolist() == [0xC3, 0xA4, 10]
    assert Bytes().encode("\n")[0] == Bytes.start


def test_decode_takes_any_integers() -> None:
    assert Bytes().decode(np.asarray([97, 255], np.int32)) == b"a\xff"
    assert Bytes().decode([]) == b""


@pytest.mark.parametrize("ids", [[0, 256], [-1, 3], [[1], [300]]])
def test_ids_out_of_range_raise(ids: list[int]) -> None:
    with pytest.raises(UserError, match="ids 0 to 255"):
        Bytes().check(ids)
    with pytest.raises(UserError):
        Bytes().decode(ids)


def test_ids_that_are_no_integers_raise() -> None:
    with pytest.raises(UserError, match="float64"):
        Bytes().check(np.asarray([1.0]))


@pytest.mark.parametrize("ids", [[], [0, 255], np.zeros((2, 3), np.uint8)])
def test_ids_in_range_pass(ids: list[int]) -> None:
    Bytes().check(ids)
