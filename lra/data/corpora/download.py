"""Downloads: a file that is there has arrived whole."""

import hashlib
import http.client
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from lra import __version__
from lra.data import store
from lra.data.corpora.sources import CHUNK_BYTES, Progress, describe
from lra.errors import UserError

TIMEOUT_SECONDS = 60.0


def fetch(url: str, name: str, md5: str | None, progress: Progress) -> Path:
    """Returns a downloaded file under `data_dir()`, downloading it if it is not there yet.

    Args:
        url: where from.
        name: of the corpus, whose folder it goes into.
        md5: of the file (hex), or None where it is not known.
        progress: see `Progress`.

    Raises:
        UserError: it cannot be downloaded or written, is shorter than the server said, or has another checksum.
    """
    path = store.data_dir() / "downloads" / name / Path(urllib.parse.urlsplit(url).path).name
    if path.is_file():
        return path
    by_hand = f"get {url} by hand and give it with --source"
    with store.appearing(path, file=True) as part:
        size, length, found = _receive(url, part, progress, by_hand)
        if length is not None and size != length:
            raise UserError(f"{url} broke off after {size:,} of {length:,} bytes: try again, or {by_hand}")
        if md5 not in (None, found):
            raise UserError(
                f"{url} gave {describe(part)} with MD5 {found}, but {md5} is needed: try again later, or {by_hand}"
            )
    return path


def _receive(url: str, part: Path, progress: Progress, by_hand: str) -> tuple[int, int | None, str]:
    """Writes what a server answers; returns its size, the size announced and the MD5 (hex)."""
    name = Path(urllib.parse.urlsplit(url).path).name
    size, digest = 0, hashlib.md5(usedforsecurity=False)
    try:
        request = urllib.request.Request(url, headers={"User-Agent": f"lra/{__version__}"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer, part.open("wb") as file:
            length = answer.headers.get("Content-Length")
            while chunk := answer.read(CHUNK_BYTES):
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                progress(f"downloading {name}", size, int(length) if length else None)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise UserError(f"{url} cannot be downloaded ({getattr(error, 'reason', error)}): {by_hand}") from error
    return size, int(length) if length else None, digest.hexdigest()
