"""Corpora: named texts in three splits, prepared once and read from then on as memory-mapped token arrays."""

import abc
import functools
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from lra.data.vocabulary import Vocabulary
from lra.errors import UserError

SPLITS = ("train", "valid", "test")
CHUNK_BYTES = 1 << 20


def data_dir() -> Path:
    """Returns the folder of all prepared corpora: `$LRA_DATA_DIR`, by default `lra` in the user's cache folder."""
    if chosen := os.environ.get("LRA_DATA_DIR"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "lra"


class Corpus(abc.ABC):
    """A named text in the splits "train", "valid" and "test".

    A corpus says where its text comes from (`documents`); this class stores it. Under `data_dir()` each corpus has a
    folder named by corpus, vocabulary and digest, so that texts that differ never collide. It holds the documents as
    array_record files, written and read by tfds, and beside them one `.npy` of tokens a split.

    Attributes:
        name: what reports and tables call the corpus.
        vocabulary: the map between its text and its tokens.
    """

    name: str
    vocabulary: Vocabulary

    @abc.abstractmethod
    def documents(self, split: str) -> Iterator[tuple[str, bytes]]:
        """Yields (path, text) in corpus order; the split is the texts one after the other, with nothing in between."""

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """One line for reports: the name, which version of what it is, and the digest."""

    @functools.cached_property
    def digest(self) -> str:
        """The first 16 characters of the SHA-256 (hex) of the three splits' SHA-256; reads the whole source once."""
        return _digest((text for _, text in self.documents(split)) for split in SPLITS)

    @property
    def folder(self) -> Path:
        """Where the prepared corpus lies, or will."""
        return data_dir() / f"{self.name}-{self.vocabulary.name}-{self.digest}"

    @property
    def prepared(self) -> bool:
        """Whether the corpus has been prepared."""
        return self.folder.is_dir()

    def prepare(self) -> None:
        """Writes the corpus under `data_dir()`, unless it is there.

        Everything is written in a sibling folder that gets its final name last: what is killed half-way leaves nothing
        that looks finished, and of several processes at once the first one wins and the others use its work.

        Raises:
            UserError: the folder cannot be written, or the source changed meanwhile.
        """
        if self.prepared:
            return
        work = self.folder.with_name(f".{self.folder.name}.{uuid.uuid4().hex}")
        try:
            work.mkdir(parents=True)
        except OSError as error:
            raise UserError(
                f"cannot write prepared corpora to {work.parent} ({error.strerror}): "
                "set LRA_DATA_DIR to a folder that you may write"
            ) from error
        try:
            self._write(work)
            try:
                work.rename(self.folder)
            except OSError:
                if not self.prepared:
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def tokens(self, split: str) -> np.ndarray:
        """Returns a split's tokens, 1-D, memory-mapped and read-only, of type `vocabulary.dtype`; prepares if need be.

        Raises:
            UserError: there is no such split, or whatever `prepare` raises.
        """
        if split not in SPLITS:
            raise UserError(f"corpus {self.name} has no split {split!r}: choose one of {', '.join(SPLITS)}")
        self.prepare()
        tokens: np.ndarray = np.load(self.folder / f"{split}.npy", mmap_mode="r")
        return tokens

    def scored(self, split: str) -> np.ndarray | None:
        """Returns which of a split's tokens are targets of training and evaluation, [N] booleans; None for all."""
        return None

    def num_bytes(self, split: str) -> int:
        """Returns the length of a split's original text in bytes; raises what `tokens` raises."""
        return self.vocabulary.num_bytes(self.tokens(split))

    def _write(self, folder: Path) -> None:
        # tfds takes half a second to import, and only preparation needs it.
        from lra.data import records

        records.write(folder, {split: self.documents(split) for split in SPLITS}, description=self.description)
        texts = [b"".join(records.read(folder, split)) for split in SPLITS]
        # What was read back is checked, so that neither a source that changes nor an order that gets lost goes unseen.
        if _digest([text] for text in texts) != self.digest:
            raise UserError(f"the source of {self.description} changed while it was read: run the command again")
        for split, text in zip(SPLITS, texts, strict=True):
            np.save(folder / f"{split}.npy", self.vocabulary.encode(text).astype(self.vocabulary.dtype, copy=False))


def _digest(splits: Iterable[Iterable[bytes]]) -> str:
    total = hashlib.sha256()
    for texts in splits:
        part = hashlib.sha256()
        for text in texts:
            part.update(text)
        total.update(part.digest())
    return total.hexdigest()[:16]
