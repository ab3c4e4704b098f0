"""Vocabularies of words between white space, as in WikiText and the Penn Treebank."""

from __future__ import annotations

import collections
import functools
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from lra.data.vocabulary import Pieces
from lra.errors import UserError

LINE_END, UNKNOWN = "<eos>", "<unk>"
_FILLER = re.compile(r"madeupword\d+ 0")
"""What fairseq's `dict.txt` fills its size up with."""


class Words(Pieces):
    r"""Words by id, with one `<eos>` at each line's end, blank lines included, or without.

    White space is Unicode's, as Python's `str.split` has it. A word that the vocabulary has not is `<unk>` where the
    vocabulary has that word, as WikiText and the Penn Treebank do, and an error elsewhere. `decode` writes a space
    after each word and each line's end: the text as these corpora have it, but for the space that begins it.

    Args:
        name: of the vocabulary.
        words: by id; with `<eos>` among them, lines end with it.

    Example:
        >>> from lra.data.words import Words
        >>> vocabulary = Words("words", ["<eos>", "<unk>", "a", "b"])
        >>> vocabulary.encode(" b a \n \n new \n").tolist()
        [3, 2, 0, 0, 1, 0]
        >>> vocabulary.decode([3, 2, 0, 0])
        b'b a \n \n '
    """

    lossless = False

    def __init__(self, name: str, words: Sequence[str]) -> None:
        self.name, self.size = name, len(words)
        self._words = [word.encode() for word in words]
        self._ids = {word: number for number, word in enumerate(words)}
        self.complete = LINE_END in self._ids
        self._unknown = self._ids.get(UNKNOWN)
        self.start = self._ids.get(LINE_END, self._unknown or 0)

    @functools.cached_property
    def pieces(self) -> list[bytes]:
        return [b"\n " if word == LINE_END.encode() else word + b" " for word in self._words]

    def state(self) -> bytes:
        """The words in the order of their ids, one a line, in UTF-8."""
        return b"\n".join(self._words)

    def encode(self, text: bytes | str) -> np.ndarray:
        """Returns the ids of the words and line ends.

        Raises:
            UserError: the text is not UTF-8, or has a word that the vocabulary has not and no `<unk>` to stand for it.
        """
        words = split(text, self.complete)
        try:
            return np.fromiter(map(self._ids.__getitem__, words), self.dtype, len(words))
        except KeyError as error:
            if self._unknown is None:
                raise UserError(
                    f"vocabulary {self.name!r} has neither the word {error.args[0]!r} nor {UNKNOWN}: "
                    "choose another vocabulary or leave the word out"
                ) from None
        get, unknown = self._ids.get, self._unknown
        return np.fromiter((get(word, unknown) for word in words), self.dtype, len(words))


def split(text: bytes | str, line_ends: bool) -> list[str]:
    """Returns the words of a text, with `<eos>` for each newline or without; raises `UserError` if it is not UTF-8."""
    try:
        decoded = text if isinstance(text, str) else text.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"byte {error.start} of a text is not UTF-8, which vocabularies of words need: "
            "convert the text, or choose the vocabulary 'bytes'"
        ) from error
    return (decoded.replace("\n", f" {LINE_END} ") if line_ends else decoded).split()


def by_frequency(name: str, texts: Iterable[bytes], *, line_ends: bool) -> Words:
    """Makes a vocabulary of all words of the texts, the most frequent first, `<eos>` before them all.

    Words that are as frequent come in the order in which they first appear (the order of Dai et al. 2019's code).

    Args:
        name: of the vocabulary.
        texts: pieces that end where words end.
        line_ends: whether there is an `<eos>`.
    """
    counts = collections.Counter[str]()
    for text in texts:
        counts.update(split(text, line_ends=False))
    words = [word for word, _ in counts.most_common() if not (line_ends and word == LINE_END)]
    return Words(name, [LINE_END, *words] if line_ends else words)


def load(name: str, state: bytes) -> Words:
    """The vocabulary whose `state` was kept."""
    return Words(name, state.decode().split("\n"))


def words_of(argument: str) -> Words:
    """What "words:ARGUMENT" stands for: the words of a file, one a line in the order of their ids.

    A file with "word count" in every line, such as fairseq's `dict.txt`, is read without its counts and without the
    fillers `madeupword0000 0`. What a file has not of `<eos>` and `<unk>` comes before its words, in this order. The
    vocabulary is named by its words, so that any file with the same ones is the same vocabulary.

    Raises:
        UserError: the file cannot be read, is empty or not UTF-8, or a line is neither a word nor a word and its count
            or repeats a word.
    """
    path, needed = Path(argument).expanduser(), 'give one with a word, or "word count", a line'
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise UserError(f"the words {path} cannot be read ({error.strerror}): {needed}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"byte {error.start} of the words {path} is not UTF-8: {needed}") from error
    form = re.compile(r"\S+ \d+" if " " in lines[0] else r"\S+")
    known = dict[str, None]()
    for number, line in enumerate(lines, 1):
        word = line.split(" ")[0]
        if not form.fullmatch(line) or word in known:
            wrong = f"the word {word} again" if word in known else f"{line[:64]!r}"
            raise UserError(f"{path}:{number} has {wrong}: {needed}, all lines alike and each word once")
        if not _FILLER.fullmatch(line):
            known[word] = None
    words = [*(word for word in (LINE_END, UNKNOWN) if word not in known), *known]
    return Words(f"words_{hashlib.sha256(chr(10).join(words).encode()).hexdigest()[:8]}", words)
