"""What a user gives as the source of a corpus: files that may be packed, and folders; and what is wrong with them."""

import bz2
import contextlib
import gzip
import hashlib
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from lra.data import store
from lra.errors import UserError

CHUNK_BYTES = 1 << 20
Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, how far it is, and how far it goes (None where that is not known)."""

_PACKED: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
_ZIP = b"PK\x03\x04"
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError)


def silent(what: str, done: int, total: int | None) -> None:
    """Reports no progress."""


def head(path: Path, size: int = 512) -> bytes:
    """Returns the first bytes of a file; raises `UserError` where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give the file or folder with --source") from error


def describe(path: Path) -> str:
    """What a file looks like, with its size: "an HTML page of 2.4 kB that begins with b'<html>'".

    Example:
        >>> import pathlib, tempfile
        >>> page = pathlib.Path(tempfile.mkdtemp()) / "enwik8.zip"
        >>> _ = page.write_bytes(b"<!DOCTYPE html><title>Not found</title>")
        >>> describe(page)
        "an HTML page of 39 bytes that begins with b'<!DOCTYPE html><title>No'"
    """
    begin, size = head(path), path.stat().st_size
    if not begin:
        return "an empty file"
    start = begin.lstrip()[:64].lower()
    kinds = (
        (begin.startswith(_ZIP), "a zip archive"),
        (any(map(begin.startswith, _PACKED)), "a packed file"),
        (b"<html" in start or start.startswith(b"<!doctype html"), "an HTML page"),
        (b"\0" not in begin, "a text"),
    )
    kind = next((name for matches, name in kinds if matches), "a binary file")
    return f"{kind} of {readable(size)} that begins with {begin[:24]!r}"


def readable(size: int) -> str:
    """A number of bytes with at most one decimal: "2.4 kB"."""
    if size < 1000:
        return f"{size} bytes"
    for unit, scale in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if size < 999.95 * scale or unit == "GB":
            break
    return f"{size / scale:.1f} {unit}"


def find(source: Path, name: str, advice: str = "give the file itself with --source") -> Path:
    """Returns the file that is meant: the source itself, or the one of that name (perhaps packed) in a folder.

    Raises:
        UserError: there is none.
    """
    if source.is_file():
        return source
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.name in (name, *(f"{name}{suffix}" for suffix in (".gz", ".bz2", ".xz", ".zip"))):
                return path
        raise UserError(f"the folder {source} holds no {name}: {advice}")
    raise UserError(f"there is no file or folder {source}: give one that exists with --source")


def zipped(path: Path) -> bool:
    """Whether a file is a zip archive, told by its first bytes."""
    return head(path).startswith(_ZIP)


@contextlib.contextmanager
def unpacked(path: Path, member: str | None = None) -> Iterator[IO[bytes]]:
    """Opens a file, whether it is packed by zip, gzip, bzip2 or xz (told by its first bytes) or plain.

    Args:
        path: the file.
        member: the last part of the name of the file wanted in a zip archive of several.

    Raises:
        UserError: it cannot be read, or the archive has not one such file.
    """
    begin = head(path)
    try:
        if begin.startswith(_ZIP):
            with zipfile.ZipFile(path) as archive:
                names = [name for name in archive.namelist() if not name.endswith("/")]
                wanted = [name for name in names if len(names) == 1 or Path(name).name == member]
                if len(wanted) != 1:
                    raise UserError(
                        f"{path} is a zip archive of {len(names)} files, with {len(wanted)} named {member}: "
                        "unpack it and give the file or folder with --source"
                    )
                with archive.open(wanted[0]) as file:
                    yield file
            return
        opener = next((opener for magic, opener in _PACKED.items() if begin.startswith(magic)), None)
        with opener(path) if opener else path.open("rb") as file:
            yield file
    except _DAMAGE as error:
        raise UserError(
            f"{path} is damaged or cut short ({type(error).__name__}: {error}); it is {describe(path)}: get it again"
        ) from error


def copy(path: Path, target: Path, member: str | None, progress: Progress) -> tuple[int, str]:
    """Unpacks a file into another one; returns its size in bytes and its MD5 (hex)."""
    size, md5 = 0, hashlib.md5(usedforsecurity=False)
    with unpacked(path, member) as source, target.open("wb") as out:
        while chunk := source.read(CHUNK_BYTES):
            try:
                out.write(chunk)
            except OSError as error:
                raise store.unwritable(target.parent, error) from error
            md5.update(chunk)
            size += len(chunk)
            progress(f"reading {path.name}", size, None)
    return size, md5.hexdigest()


def measure(path: Path, progress: Progress) -> tuple[int, str]:
    """Returns the size in bytes and the MD5 (hex) of a file as it lies there."""
    size, md5, total = 0, hashlib.md5(usedforsecurity=False), path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            md5.update(chunk)
            size += len(chunk)
            progress(f"checking {path.name}", size, total)
    return size, md5.hexdigest()


def plain(path: Path, work: Path, member: str, progress: Progress) -> tuple[Path, int, str]:
    """Returns a plain file with a packed or plain one's content, its size in bytes and its MD5.

    Args:
        path: the file.
        work: a folder for what has to be unpacked.
        member: the name of the file wanted.
        progress: see `Progress`.

    Raises:
        UserError: as `unpacked`.
    """
    begin = head(path)
    if begin.startswith(_ZIP) or any(map(begin.startswith, _PACKED)):
        target = work / member
        return target, *copy(path, target, member, progress)
    return path, *measure(path, progress)


def refused(source: Path, name: str, wanted: str, found: str, advice: str, *, file: Path | None = None) -> UserError:
    """The sentence for a source that is not what it should be; `file` is what it was found in, if not itself."""
    return UserError(
        f"{source} is not {name}: {wanted} needed, {found} found; it is {describe(file or source)}: {advice}"
    )


def chunks(path: Path, begin: int, end: int) -> Iterator[bytes]:
    """Yields a range of a file's bytes in pieces of at most 1 MiB."""
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end:
            chunk = file.read(min(CHUNK_BYTES, end - begin))
            if not chunk:
                raise UserError(f"{path} is shorter than it was at the start: run the command again")
            yield chunk
            begin += len(chunk)


def lines(path: Path, begin: int, end: int) -> Iterator[bytes]:
    """Like `chunks`, but every piece but the last ends with a newline."""
    rest: list[bytes] = []
    for chunk in chunks(path, begin, end):
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield b"".join([*rest, chunk[:cut]])
            rest = []
        rest.append(chunk[cut:])
    if last := b"".join(rest):
        yield last


def line_end(path: Path, place: int) -> int:
    """Returns the place behind the last newline among a file's first `place` bytes; 0 for none."""
    with path.open("rb") as file:
        while place:
            begin = max(place - CHUNK_BYTES, 0)
            file.seek(begin)
            if (cut := file.read(place - begin).rfind(b"\n")) >= 0:
                return begin + cut + 1
            place = begin
    return 0
