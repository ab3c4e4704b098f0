"""Downloads: a file that is there has arrived whole."""

import hashlib
import http.client
import os
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
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    by_hand = f"get {url} by hand and give it with --source"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        request = urllib.request.Request(url, headers={"User-Agent": f"lra/{__version__}"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer, part.open("wb") as file:
            length = answer.headers.get("Content-Length")
            size, digest = 0, hashlib.md5(usedforsecurity=False)
            while chunk := answer.read(CHUNK_BYTES):
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                progress(f"downloading {path.name}", size, int(length) if length else None)
        if length and size != int(length):
            raise UserError(f"{url} broke off after {size:,} of {int(length):,} bytes: try again, or {by_hand}")
        if md5 is not None and digest.hexdigest() != md5:
            raise UserError(
                f"{url} gave {describe(part)} with MD5 {digest.hexdigest()}, but {md5} is needed: "
                f"try again later, or {by_hand}"
            )
        os.replace(part, path)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise UserError(f"{url} cannot be downloaded ({getattr(error, 'reason', error)}): {by_hand}") from error
    except OSError as error:
        raise store.unwritable(path.parent, error) from error
    finally:
        part.unlink(missing_ok=True)
    return path
