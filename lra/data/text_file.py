"""The user's own text as a corpus."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lra.data.corpus import CHUNK_BYTES, SourceCorpus
from lra.data.store import SPLITS
from lra.errors import UserError


class TextFile(SourceCorpus):
    """One file, or several in the given order, as bytes: the first part is "train", the next "valid", the last "test".

    Args:
        path: the file or files; `~` is the home folder.
        valid_fraction: part of the bytes that is "valid", rounded down.
        test_fraction: part of the bytes that is "test", rounded down.

    Raises:
        UserError: a file is missing, empty, unreadable or no file; a fraction leaves a split without a byte.
    """

    name = "text_file"

    def __init__(self, path: str | Sequence[str], valid_fraction: float = 0.05, test_fraction: float = 0.05) -> None:
        self._paths = [Path(one).expanduser() for one in ([path] if isinstance(path, str) else path)]
        if not self._paths:
            raise UserError("TextFile.path names no file, but the corpus needs one at least: give a path")
        self._sizes = [_size(one) for one in self._paths]
        total = sum(self._sizes)
        if not (valid_fraction > 0 and test_fraction > 0 and valid_fraction + test_fraction < 1):
            raise UserError(
                f"TextFile has valid_fraction={valid_fraction} and test_fraction={test_fraction}, "
                "but both must be above 0 and their sum below 1: change them"
            )
        valid, test = int(total * valid_fraction), int(total * test_fraction)
        if not (valid and test and total > valid + test):
            raise UserError(
                f"the text of {self._names} has {total} bytes, too few for one in every split at "
                f"valid_fraction={valid_fraction} and test_fraction={test_fraction}: "
                "give a longer text or raise the fractions"
            )
        cuts = (0, total - valid - test, total - test, total)
        self._bounds = dict(zip(SPLITS, itertools.pairwise(cuts), strict=True))

    @property
    def description(self) -> str:
        """The name, the file names and the digest."""
        return f"{self.name} ({self._names}, digest {self.digest})"

    @property
    def _names(self) -> str:
        return ", ".join(path.name for path in self._paths)

    def documents(self, split: str) -> Iterator[tuple[str, bytes]]:
        """Yields (file name, chunk of at most 1 MiB) over the split's part of the files."""
        begin, end = self._bounds[split]
        offset = 0
        for path, size in zip(self._paths, self._sizes, strict=True):
            low, high = max(begin - offset, 0), min(end - offset, size)
            offset += size
            if low >= high:
                continue
            with path.open("rb") as file:
                file.seek(low)
                while low < high:
                    chunk = file.read(min(CHUNK_BYTES, high - low))
                    if not chunk:
                        raise UserError(f"text file {path} is shorter than it was at the start: run the command again")
                    yield path.name, chunk
                    low += len(chunk)

    def document_starts(self, split: str) -> np.ndarray:
        """Returns where the split's part of each file begins."""
        self._check_split(split)
        begin, end = self._bounds[split]
        files = np.cumsum([0, *self._sizes], dtype=np.int64)
        return np.append(0, files[(begin < files) & (files < end)] - begin)


def _size(path: Path) -> int:
    """Returns the size in bytes of a file that can serve as a corpus."""
    if not path.exists():
        raise UserError(f"text file {path} does not exist: give the path of a text file")
    if not path.is_file():
        raise UserError(f"{path} is not a regular file: give the path of a text file")
    try:
        with path.open("rb"):
            size = path.stat().st_size
    except OSError as error:
        raise UserError(
            f"text file {path} cannot be read ({error.strerror}): make it readable or give another one"
        ) from error
    if size == 0:
        raise UserError(f"text file {path} is empty: give a file with text")
    return size
