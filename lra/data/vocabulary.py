"""Vocabularies: the map between text and token ids."""

import abc
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from lra.errors import UserError

PART_TOKENS = 1 << 22
"""Tokens whose lengths are in memory at once: a corpus has more of them than fit."""


def num_characters(text: bytes) -> int:
    r"""Returns the Unicode characters of a text in UTF-8: the bytes that continue none.

    A part that begins or ends within a character has those characters that begin in it, so that parts add up.

    Example:
        >>> from lra.data.vocabulary import num_characters
        >>> num_characters("a\u00e4\n".encode())
        3
    """
    return int(np.count_nonzero(_begins(np.frombuffer(text, np.uint8))))


def _begins(data: np.ndarray) -> np.ndarray:
    """Which bytes (uint8) begin a character: those that continue one are 10xxxxxx."""
    return (data & 0xC0) != 0x80


class Vocabulary(abc.ABC):
    """The contract of every vocabulary.

    Ids run from 0 to `size - 1`. Scores per byte and per character rest on `num_bytes` and `num_characters`, which
    count the original text even where `decode` cannot give it back.

    Attributes:
        name: what reports call the tokenisation; names files too.
        size: the number of ids.
        start: the id that stands before the first token of a corpus.
        lossless: whether `decode(encode(text))` equals the text for every text that `encode` takes.
        complete: whether the tokens stand for the whole text; some vocabularies leave out newlines.
    """

    name: str
    size: int
    start: int
    lossless: bool
    complete: bool = True

    @property
    def description(self) -> str:
        """The name and the number of ids, for reports."""
        return f"{self.name} ({self.size} ids)"

    @property
    def digest(self) -> str:
        """16 characters (hex) that tell vocabularies apart which give a text other ids."""
        return hashlib.sha256(self.name.encode() + b"\0" + self.state()).hexdigest()[:16]

    def state(self) -> bytes:
        """What a vocabulary that was made from text needs to be made again; empty for the others."""
        return b""

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every id."""
        return np.min_scalar_type(self.size - 1)

    @abc.abstractmethod
    def encode(self, text: bytes | str) -> np.ndarray:
        """Turns text (a string stands for its UTF-8 bytes) into ids, 1-D, of type `dtype`."""

    def encode_all(self, texts: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Encodes a split, given in pieces that may end anywhere the corpus lets its documents end."""
        yield from map(self.encode, texts)

    @abc.abstractmethod
    def decode(self, ids: npt.ArrayLike) -> bytes:
        """Turns ids, 1-D, into text; raises what `check` raises."""

    @abc.abstractmethod
    def num_bytes(self, tokens: np.ndarray) -> int:
        """Returns how many bytes of the original text a slice of a corpus' tokens stands for."""

    @abc.abstractmethod
    def num_characters(self, tokens: np.ndarray) -> int:
        """Returns how many Unicode characters begin in the original text that a slice of tokens stands for."""

    def check(self, tokens: npt.ArrayLike) -> None:
        """Checks ids of any shape on the host, since an id out of range gives NaN or clamps silently on a device.

        Raises:
            UserError: an id is not an integer or not in [0, size).
        """
        ids = np.asarray(tokens)
        if ids.size == 0:
            return
        if not np.issubdtype(ids.dtype, np.integer):
            raise UserError(
                f"token ids have type {ids.dtype}, but vocabulary {self.name!r} needs integers: encode the text first"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.size:
            raise UserError(
                f"token ids span {low} to {high}, but vocabulary {self.name!r} has ids 0 to {self.size - 1}: "
                "encode the text with this vocabulary"
            )


class Bytes(Vocabulary):
    """The 256 byte values as ids; lossless. A corpus is preceded by a newline."""

    name = "bytes"
    size = 256
    start = 10
    lossless = True

    def encode(self, text: bytes | str) -> np.ndarray:
        """Returns the bytes of the text, uint8 (read-only where the text was bytes)."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)

    def decode(self, ids: npt.ArrayLike) -> bytes:
        """Returns the ids as bytes; raises `UserError` on an id outside [0, 256)."""
        self.check(ids)
        return np.asarray(ids).astype(np.uint8).tobytes()

    def num_bytes(self, tokens: np.ndarray) -> int:
        """Returns the number of tokens: one token is one byte."""
        return int(np.asarray(tokens).size)

    def num_characters(self, tokens: np.ndarray) -> int:
        return summed(tokens, _begins(np.arange(self.size, dtype=np.uint8)))


class Pieces(Vocabulary):
    """A vocabulary whose ids stand for pieces of text, which `decode` puts one after the other."""

    @functools.cached_property
    @abc.abstractmethod
    def pieces(self) -> list[bytes]:
        """The text that each id stands for."""

    @functools.cached_property
    def _bytes(self) -> np.ndarray:
        return np.asarray([len(piece) for piece in self.pieces], np.int64)

    @functools.cached_property
    def _characters(self) -> np.ndarray:
        return np.asarray([num_characters(piece) for piece in self.pieces], np.int64)

    def decode(self, ids: npt.ArrayLike) -> bytes:
        self.check(ids)
        return b"".join(map(self.pieces.__getitem__, np.asarray(ids).tolist()))

    def num_bytes(self, tokens: np.ndarray) -> int:
        """Returns the bytes of the pieces."""
        return summed(tokens, self._bytes)

    def num_characters(self, tokens: np.ndarray) -> int:
        """Returns the characters that begin in the pieces."""
        return summed(tokens, self._characters)


def summed(tokens: np.ndarray, values: np.ndarray) -> int:
    """Returns the sum over tokens of a value that each id has, [V] integers or booleans."""
    ids = np.asarray(tokens)
    parts = (ids[begin : begin + PART_TOKENS] for begin in range(0, ids.size, PART_TOKENS))
    return sum(int(values[part].sum()) for part in parts)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a vocabulary is made of a corpus' text.

    Attributes:
        make: makes it, given a function that gives the texts of a split.
        load: makes it again from the `state` that was kept.
    """

    make: Callable[[Callable[[str], Iterator[bytes]]], Vocabulary]
    load: Callable[[bytes], Vocabulary]
