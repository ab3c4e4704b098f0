"""Corpora: named texts in three splits, prepared once and read from then on as memory-mapped token arrays."""

import abc
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lra.data import store
from lra.data.store import SPLITS, data_dir
from lra.data.vocabulary import Bytes, Vocabulary, num_characters
from lra.errors import UserError

CHUNK_BYTES = 1 << 20


class Corpus(abc.ABC):
    """A named text in the splits "train", "valid" and "test", read as tokens of a vocabulary.

    A prepared corpus is a folder under `data_dir()`: its text in `text/`, written and read by tfds, what it holds in
    `info.json`, and for each vocabulary that it was read with one `.npy` of tokens a split.

    Attributes:
        name: what reports and tables call the corpus.
    """

    name: str

    @property
    @abc.abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The map between text and tokens."""

    @property
    @abc.abstractmethod
    def digest(self) -> str:
        """The first 16 characters of the SHA-256 (hex) of the three splits' SHA-256."""

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """One line for reports: the name, which version of what it is, and the digest."""

    @property
    @abc.abstractmethod
    def folder(self) -> Path:
        """Where the prepared corpus lies, or will."""

    @abc.abstractmethod
    def prepare(self) -> None:
        """Makes sure that the corpus is prepared; raises `UserError` where it cannot."""

    @property
    def prepared(self) -> bool:
        """Whether the corpus has been prepared."""
        return self.folder.is_dir()

    def info(self) -> dict[str, Any]:
        """Returns what the prepared corpus holds: "name", "digest", and counts and SHA-256 by split in "splits"."""
        self.prepare()
        return store.read_info(self.folder)

    def tokens(self, split: str) -> np.ndarray:
        """Returns a split's tokens, 1-D, memory-mapped and read-only, of type `vocabulary.dtype`; prepares if need be.

        Raises:
            UserError: there is no such split, or whatever `prepare` raises.
        """
        self._check_split(split)
        self.prepare()
        return store.tokens(self.folder, self.vocabulary, split)

    def document_starts(self, split: str) -> np.ndarray:
        """Returns the tokens at which a split's documents begin, [D] int64, ascending from 0.

        Raises:
            UserError: the corpus doesn't say where documents begin, or as `tokens`.
        """
        raise UserError(
            f"corpus {self.name} does not say where documents begin: read it as one text "
            "(Streams.documents = False; a number for Carried.streams)"
        )

    def text(self, split: str) -> Iterator[bytes]:
        """Yields a split's original text, piece by piece; raises as `tokens`."""
        self._check_split(split)
        self.prepare()
        return store.read_text(self.folder, split)

    def num_bytes(self, split: str, limit: int | None = None) -> int:
        """Returns the bytes of original text that a split's tokens, or the first `limit` of them, stand for.

        What the vocabulary leaves out (newlines, in some) does not count, since it is not scored; words that the
        vocabulary does not know count in full for a whole split, and as the token that stands for them in a part.

        Raises:
            UserError: as `tokens`.
        """
        tokens = self.tokens(split)
        if limit is not None and limit < tokens.size:
            return self.vocabulary.num_bytes(tokens[:limit])
        if self.vocabulary.complete:
            return int(self.info()["splits"][split]["bytes"])
        return self.vocabulary.num_bytes(tokens)

    def num_characters(self, split: str, limit: int | None = None) -> int:
        """Returns the Unicode characters that `num_bytes` counts the bytes of: those of a text in UTF-8.

        Raises:
            UserError: as `tokens`.
        """
        tokens = self.tokens(split)
        if self.vocabulary.complete and (limit is None or limit >= tokens.size):
            return sum(map(num_characters, self.text(split)))
        return self.vocabulary.num_characters(tokens[:limit])

    def num_words(self, split: str) -> int | None:
        """Returns what perplexity per word divides a split's nats by; None where the corpus has no such convention."""
        self._check_split(split)
        return None

    def _check_split(self, split: str) -> None:
        if split not in SPLITS:
            raise UserError(f"corpus {self.name} has no split {split!r}: choose one of {', '.join(SPLITS)}")

    def scored(self, split: str) -> np.ndarray | None:
        """Returns which of a split's tokens are targets of training and evaluation, [N] booleans; None for all."""
        return None


class SourceCorpus(Corpus):
    """A corpus of bytes whose source is at hand, and read again for every run, so that a change shows in the digest.

    Its folder is named by corpus and digest, so that texts that differ never collide.
    """

    @property
    def vocabulary(self) -> Vocabulary:
        return Bytes()

    @abc.abstractmethod
    def documents(self, split: str) -> Iterator[tuple[str, bytes]]:
        """Yields (path, text) in corpus order; the split is the texts one after the other, with nothing in between."""

    @functools.cached_property
    def digest(self) -> str:
        """See `Corpus`; reads the whole source once."""
        return store.digest(store.sha256(self.documents(split)) for split in SPLITS)

    @property
    def folder(self) -> Path:
        return data_dir() / f"{self.name}-{self.digest}"

    def prepare(self) -> None:
        """Writes the corpus under `data_dir()`, unless it is there.

        Raises:
            UserError: the folder cannot be written, or the source changed meanwhile.
        """
        if self.prepared:
            return
        with store.appearing(self.folder) as work:
            documents = {split: self.documents(split) for split in SPLITS}
            store.write_text(work, documents, name=self.name, description=self.description, check=self._unchanged)

    def _unchanged(self, info: dict[str, Any]) -> None:
        if info["digest"] != self.digest:
            raise UserError(f"the source of {self.description} changed while it was read: run the command again")
