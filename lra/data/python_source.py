"""The corpus that every machine has: the standard library of the Python that runs."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lra.data import store
from lra.data.corpus import SourceCorpus
from lra.errors import UserError

_SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
# Written by Python's own build, with the paths and options of one machine.
_GENERATED = ("_sysconfigdata", "python-config")


class PythonSource(SourceCorpus):
    """The `.py` files of the running Python's standard library as bytes, without tests, generated and installed files.

    Files are sorted by their relative path. A file's split follows from its relative path alone: with h the first 8
    bytes (big-endian) of the path's SHA-256, modulo 100, it is "train" below 90, "valid" below 95, "test" otherwise.
    Python versions differ in content: a score belongs to the version and digest of `description`.
    """

    name = "python_source"

    @property
    def description(self) -> str:
        """The name, the Python version and the digest."""
        return f"{self.name} (standard library of Python {platform.python_version()}, digest {self.digest})"

    def documents(self, split: str) -> Iterator[tuple[str, bytes]]:
        """Yields (relative path, content) of the split's files in the order of their paths."""
        root = _root()
        for path in _files(root):
            if _split(path) == split:
                yield path, (root / path).read_bytes()

    def document_starts(self, split: str) -> np.ndarray:
        """Returns where the files begin."""
        self._check_split(split)
        self.prepare()
        return store.document_starts(self.folder, self.vocabulary, split)


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _files(root: Path) -> list[str]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found += [
            (Path(folder) / name).relative_to(root).as_posix()
            for name in names
            if name.endswith(".py") and not name.startswith(("test_", *_GENERATED))
        ]
    if not found:
        raise UserError(
            f"there are no .py files under {root}: use a Python that is installed with its standard library"
        )
    return sorted(found)


def _split(path: str) -> str:
    percent = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8]) % 100
    return "train" if percent < 90 else "valid" if percent < 95 else "test"
