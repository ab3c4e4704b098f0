"""Vocabularies of single bytes: those of papers, in which a symbol is dropped, added or numbered in another way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from lra.data.vocabulary import Vocabulary, num_characters, summed
from lra.errors import UserError

NEWLINE = b"\n"


class Symbols(Vocabulary):
    """One id a byte, for the bytes that are named.

    Args:
        name: of the vocabulary.
        symbols: byte i has the id `first` + i.
        first: how many ids come before that no text has.
        start: the id before a corpus; that of the first symbol by default.
        dropped: bytes that are left out.
        closed: whether a split that does not end with a newline gets one more.

    Example:
        >>> from lra.data.symbols import characters
        >>> characters().encode("a cab").tolist()
        [1, 0, 3, 1, 2]
    """

    def __init__(
        self,
        name: str,
        symbols: bytes,
        *,
        first: int = 0,
        start: int | None = None,
        dropped: bytes = b"",
        closed: bool = False,
    ) -> None:
        self.name, self.size = name, first + len(symbols)
        self.start = first if start is None else start
        self._symbols, self._first, self._dropped, self._closed = symbols, first, dropped, closed
        self.complete = not dropped
        self.lossless = self.complete and not closed
        self._ids = np.zeros(256, self.dtype)
        self._ids[list(symbols)] = np.arange(first, self.size, dtype=self.dtype)
        self._known = np.zeros(256, bool)
        self._known[list(symbols)] = True
        self._characters = np.asarray([0] * first + [num_characters(symbols[i : i + 1]) for i in range(len(symbols))])
        self._unknown = bytes(sorted(set(range(256)) - set(symbols) - set(dropped)))

    def state(self) -> bytes:
        """The symbols in the order of their ids, as JSON."""
        return json.dumps(list(self._symbols)).encode()

    def encode(self, text: bytes | str) -> np.ndarray:
        """Returns the ids of the bytes; raises `UserError` for a byte that the vocabulary has not."""
        data = text.encode() if isinstance(text, str) else text
        if self._dropped:
            data = data.translate(None, self._dropped)
        raw = np.frombuffer(data, np.uint8)
        if self._unknown and not (known := self._known[raw]).all():
            place = int(np.argmin(known))
            raise UserError(
                f"byte {data[place : place + 1]!r} is none of the {len(self._symbols)} symbols of vocabulary "
                f"{self.name!r}: leave it out of the text, or choose the vocabulary 'bytes'"
            )
        return self._ids[raw]

    def encode_all(self, texts: Iterable[bytes]) -> Iterator[np.ndarray]:
        last = NEWLINE
        for text in texts:
            last = text[-1:] or last
            yield self.encode(text)
        if self._closed and last != NEWLINE:
            yield self.encode(NEWLINE)

    def decode(self, ids: npt.ArrayLike) -> bytes:
        self.check(ids)
        found = np.asarray(ids).astype(np.int64) - self._first
        return np.frombuffer(self._symbols, np.uint8)[found[found >= 0]].tobytes()

    def num_bytes(self, tokens: np.ndarray) -> int:
        """Returns the number of tokens that are bytes: one token is one byte, and what is dropped is not scored."""
        return int(np.count_nonzero(np.asarray(tokens) >= self._first))

    def num_characters(self, tokens: np.ndarray) -> int:
        return summed(tokens, self._characters)


def characters() -> Symbols:
    """`chars`: space and a to z, as text8 has them."""
    return Symbols("chars", b" abcdefghijklmnopqrstuvwxyz")


def tensor2tensor() -> Symbols:
    """`t2t`: the bytes shifted by two, behind padding (0) and end of text (1), as in tensor2tensor's and trax' enwik8.

    Splits stay those of bytes; tensor2tensor itself cut them by Unicode characters.
    """
    return Symbols("t2t", bytes(range(256)), first=2, start=1)


def transformer_xl(texts: Iterable[bytes]) -> Symbols:
    """`txl`: the symbols of all splits by frequency, newlines dropped (Dai et al. 2019, released code).

    The released code splits a file of decimal byte values into lines and adds nothing at their ends. Bytes that are as
    frequent come in the order in which they first appear. Scores are per token, and newlines are no tokens.
    """
    counts, order = _survey(texts)
    symbols = bytes(sorted((byte for byte in order if byte not in NEWLINE), key=lambda byte: -counts[byte]))
    return load_transformer_xl(json.dumps(list(symbols)).encode())


def load_transformer_xl(state: bytes) -> Symbols:
    """The vocabulary whose `state` was kept."""
    symbols = bytes(json.loads(state))
    return Symbols("txl", symbols, dropped=NEWLINE)


def adaptive_span(texts: Iterable[bytes]) -> Symbols:
    """`adaptive_span`: the symbols in the order in which they first appear (Sukhbaatar et al. 2019, released code).

    The end of a line is a symbol, and each split ends with one, whether or not its text does.
    """
    _, order = _survey(texts)
    return load_adaptive_span(json.dumps([*order] if 10 in order else [*order, 10]).encode())


def load_adaptive_span(state: bytes) -> Symbols:
    """The vocabulary whose `state` was kept."""
    symbols = bytes(json.loads(state))
    return Symbols("adaptive_span", symbols, start=symbols.index(NEWLINE), closed=True)


def _survey(texts: Iterable[bytes]) -> tuple[np.ndarray, list[int]]:
    """How often each byte comes, and the bytes in the order in which they first appear."""
    counts, order = np.zeros(256, np.int64), dict[int, None]()
    for text in texts:
        raw = np.frombuffer(text, np.uint8)
        counts += np.bincount(raw, minlength=256)
        new = [byte for byte in np.flatnonzero(counts).tolist() if byte not in order]
        order |= dict.fromkeys(sorted(new, key=lambda byte: text.index(byte)))
    return counts, list(order)
