import numpy as np
import pytest

from lra.data import Bytes
from lra.errors import UserError


def test_bytes_are_lossless() -> None:
    text = bytes(range(256)) + b"\r\n\x00\xff"
    ids = Bytes().encode(text)
    assert ids.dtype == np.uint8 == Bytes().dtype
    assert Bytes().decode(ids) == text
    assert Bytes().num_bytes(ids[3:17]) == 14


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
