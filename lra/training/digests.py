"""Digests of what a checkpoint holds: of arrays in memory, and of files in `digests.json`, which has one of itself.

CRC-32 notices every burst of up to 32 flipped bits and is three times as fast as SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

FILE = "digests.json"
_PIECE_BYTES = 1 << 24


def described(leaf: Any) -> dict[str, Any]:
    """The shape, dtype and digest of an array."""
    array = np.ascontiguousarray(leaf)
    digest = zlib.crc32(array.reshape(-1).view(np.uint8).data)
    return {"shape": list(leaf.shape), "dtype": str(array.dtype), "crc32": digest}


def write(folder: Path, items: Iterable[str]) -> None:
    """Writes the digests of all files under the folders `items` of a folder."""
    files = {item: _checksums(folder / item) for item in items}
    (folder / FILE).write_text(json.dumps({"files": files, "digest": _of_json(files)}), encoding="utf-8")


def damage(folder: Path, item: str) -> str | None:
    """The first file of an item that is not as it was when the digests were written, or None."""
    try:
        digests = json.loads((folder / FILE).read_bytes())
        whole = digests["digest"] == _of_json(digests["files"])
        expected = digests["files"][item]
    except (OSError, ValueError, LookupError, TypeError):
        whole = False
    if not whole:
        return FILE
    found = _checksums(folder / item)
    names = sorted(expected.keys() | found.keys())
    return next((f"{item}/{name}" for name in names if expected.get(name) != found.get(name)), None)


def _checksums(folder: Path) -> dict[str, int]:
    """CRC-32 of each file in a folder, by its path from there."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            checksum = 0
            with path.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    checksum = zlib.crc32(piece, checksum)
            found[path.relative_to(folder).as_posix()] = checksum
    return found


def _of_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
