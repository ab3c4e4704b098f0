"""Prepared corpora on disk: the text as a tfds data set, what it holds (`info.json`), and tokens by vocabulary."""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lra.data.vocabulary import Vocabulary
from lra.errors import UserError

SPLITS = ("train", "valid", "test")
Documents = Iterable[tuple[str, bytes]]
"""(path, text) in corpus order."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_HEADER_BYTES = 128
"""Of a one-dimensional `.npy` file, whatever its length and type."""


def data_dir() -> Path:
    """Returns the folder of all prepared corpora: `$LRA_DATA_DIR`, by default `lra` in the user's cache folder."""
    if chosen := os.environ.get("LRA_DATA_DIR"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "lra"


@contextlib.contextmanager
def appearing(target: Path, *, file: bool = False) -> Iterator[Path]:
    """Gives a hidden sibling that becomes `target` by one rename when the block ends without an exception.

    What is killed half-way leaves nothing that looks finished, and the next one to make the same target removes it. Of
    several processes at once the first one wins, and the work of the others is thrown away.

    Args:
        target: what is not there yet, in a folder that may be missing too.
        file: whether it is an (empty) file; else a folder.

    Raises:
        UserError: it cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target)
        work, lock = _held(target, file)
    except OSError as error:
        raise unwritable(target.parent, error) from error
    try:
        yield work
        try:
            work.replace(target)
        except OSError:
            if not target.is_dir():
                raise
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise unwritable(target.parent, error) from error
    finally:
        _remove(work)
        os.close(lock)


def sweep(target: Path) -> None:
    """Removes what killed processes have left of a target: its hidden siblings that nobody holds."""
    found = os.listdir(target.parent)  # quicker than a glob, for PG-19's folder of 28,602 downloads
    for work in (target.with_name(name) for name in found if name.startswith(f".{target.name}.")):
        with contextlib.suppress(OSError):  # somebody holds it, or another sweep was quicker
            lock = os.open(work, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(work)
            finally:
                os.close(lock)


def _held(target: Path, file: bool) -> tuple[Path, int]:
    """A new hidden sibling, and the lock on it, which dies with the process."""
    while True:
        work = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        if file:
            work.touch()
        else:
            work.mkdir()
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked
            lock = os.open(work, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a disk without locks, on which nothing is swept either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if work.exists():
                return work, lock
            os.close(lock)


def _remove(work: Path) -> None:
    if work.is_dir():
        shutil.rmtree(work, ignore_errors=True)
    else:
        work.unlink(missing_ok=True)


def unwritable(folder: Path, error: OSError) -> UserError:
    """The sentence for a disk that is full or may not be written."""
    return UserError(
        f"cannot write prepared corpora to {folder} ({error.strerror}): make room there, "
        "or set LRA_DATA_DIR to a folder that you may write"
    )


def digest(sha256: Iterable[str]) -> str:
    """Returns the first 16 characters of the SHA-256 (hex) of the splits' SHA-256 (hex)."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, sha256))).hexdigest()[:16]


def sha256(documents: Documents) -> str:
    """Returns the SHA-256 (hex) of the texts, one after the other."""
    total = hashlib.sha256()
    for _, text in documents:
        total.update(text)
    return total.hexdigest()


class Counted:
    """Documents that are counted as they pass.

    Attributes:
        documents: how many.
        bytes: of their texts.
        symbols: how many of the 256 bytes they have.
        words: what whitespace separates, where asked for.
        lines: line ends, and a last line without one, where words are asked for.
    """

    def __init__(self, documents: Documents, *, words: bool = False) -> None:
        self._source, self._count_words, self._sha256 = documents, words, hashlib.sha256()
        self.documents = self.bytes = self.words = self.lines = 0
        self._seen = np.zeros(256, bool)

    @property
    def symbols(self) -> int:
        """See the attributes."""
        return int(self._seen.sum())

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        last = b"\n"
        for path, text in self._source:
            self.documents += 1
            self.bytes += len(text)
            self._sha256.update(text)
            self._seen[np.frombuffer(text, np.uint8)] = True
            if self._count_words:
                self.words += len(text.decode("utf-8", "replace").split())
                self.lines += text.count(b"\n")
                last = text[-1:] or last
            yield path, text
        self.lines += last != b"\n"

    def counts(self) -> dict[str, Any]:
        """What `info.json` says of a split."""
        more = {"words": self.words, "lines": self.lines} if self._count_words else {}
        known = {"documents": self.documents, "bytes": self.bytes, "symbols": self.symbols}
        return {**known, **more, "sha256": self._sha256.hexdigest()}


def write_text(
    folder: Path,
    splits: Mapping[str, Documents],
    *,
    name: str,
    description: str,
    words: bool = False,
    check: Callable[[dict[str, Any]], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Writes `text/` and `info.json` and returns the latter.

    Args:
        folder: an existing one.
        splits: the documents of each split, read once.
        name: of the corpus.
        description: of the corpus.
        words: whether words and lines are counted.
        check: called with the counts before anything is read back; raises what is wrong with them.
        options: of `records.write`.

    Raises:
        UserError: what is read back is not what was written.
    """
    # tfds takes half a second to import, and only preparation needs it.
    from lra.data import records

    counted = {split: Counted(documents, words=words) for split, documents in splits.items()}
    (folder / "text").mkdir()
    records.write(folder / "text", counted, name=name, description=description, **options)
    counts = {split: one.counts() for split, one in counted.items()}
    info = {"name": name, "digest": digest(one["sha256"] for one in counts.values()), "splits": counts}
    if check is not None:
        check(info)
    for split, one in counts.items():
        back = hashlib.sha256()
        for text in records.read(folder / "text", split):
            back.update(text)
        if back.hexdigest() != one["sha256"]:
            raise UserError(f"{name} {split} read back from {folder} is not what was written: check the disk")
    (folder / "info.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
    return info


def read_info(folder: Path) -> dict[str, Any]:
    """Returns what `write_text` has written."""
    info: dict[str, Any] = json.loads((folder / "info.json").read_text(encoding="utf-8"))
    return info


def read_text(folder: Path, split: str) -> Iterator[bytes]:
    """Yields the documents' texts in corpus order."""
    from lra.data import records

    return records.read(folder / "text", split)


def read_documents(folder: Path, split: str) -> Iterator[dict[str, bytes]]:
    """Yields the documents in corpus order with all their fields."""
    from lra.data import records

    return records.examples(folder / "text", split)


def tokens(folder: Path, vocabulary: Vocabulary, split: str) -> np.ndarray:
    """Returns a split's tokens, 1-D, memory-mapped and read-only; encodes all splits when the first is asked for."""
    home = folder / "tokens" / vocabulary.name
    if not home.is_dir():
        with appearing(home) as work:
            for one in SPLITS:
                write_tokens(work / f"{one}.npy", vocabulary, read_text(folder, one))
    array: np.ndarray = np.load(home / f"{split}.npy", mmap_mode="r")
    return array


def document_starts(folder: Path, vocabulary: Vocabulary, split: str) -> np.ndarray:
    """Returns the tokens at which a split's documents begin, ascending, without empty ones; kept once computed."""
    path = folder / "tokens" / vocabulary.name / f"{split}.documents.npy"
    if not path.is_file():
        size = tokens(folder, vocabulary, split).size
        ends = np.cumsum([vocabulary.encode(text).size for text in read_text(folder, split)], dtype=np.int64)
        starts = np.unique(np.append(0, ends))
        with appearing(path, file=True) as work, work.open("wb") as out:
            np.save(out, starts[starts < size])
    array: np.ndarray = np.load(path)
    return array


def write_tokens(path: Path, vocabulary: Vocabulary, texts: Iterable[bytes]) -> None:
    """Encodes texts into an `.npy` file of one dimension, one text in memory at a time."""
    size = 0
    with path.open("wb") as file:
        file.write(bytes(_HEADER_BYTES))
        for ids in vocabulary.encode_all(texts):
            file.write(ids.astype(vocabulary.dtype, copy=False).tobytes())
            size += ids.size
        header = io.BytesIO()
        form = {"descr": np.lib.format.dtype_to_descr(vocabulary.dtype), "fortran_order": False, "shape": (size,)}
        np.lib.format.write_array_header_1_0(header, form)
        if header.tell() != _HEADER_BYTES:
            raise ValueError(f"the header of {path} has {header.tell()} bytes, but {_HEADER_BYTES} were kept for it")
        file.seek(0)
        file.write(header.getvalue())
