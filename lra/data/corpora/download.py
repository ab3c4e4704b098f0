"""Downloads: a file that is there has arrived whole."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import hashlib
import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lra import __version__
from lra.data import store
from lra.data.corpora.sources import CHUNK_BYTES, Progress, describe, silent
from lra.errors import UserError

TIMEOUT_SECONDS = 60.0
GOOGLE = "https://storage.googleapis.com"
THREADS = 8
"""Objects of a bucket on their way at once."""
PAUSE_SECONDS = 1.0
TRIES = 3
"""For each object of a bucket: of thousands of answers some break off."""


def home(name: str) -> Path:
    """Returns where the downloads of a corpus lie."""
    return store.data_dir() / "downloads" / name


def fetch(url: str, folder: Path, md5: str | None, progress: Progress, *, advice: str | None = None) -> Path:
    """Returns a downloaded file, downloading it if it is not there yet.

    Args:
        url: where from.
        folder: where to.
        md5: of the file (hex), or None where it is not known.
        progress: see `Progress`.
        advice: how to go on without it; by hand if None.

    Raises:
        UserError: it cannot be downloaded or written, is shorter than the server said, or has another checksum.
    """
    path = folder / Path(urllib.parse.urlsplit(url).path).name
    if path.is_file():
        return path
    advice = advice or f"get {url} by hand and give it with --source"
    size, found = 0, hashlib.md5(usedforsecurity=False)
    with store.appearing(path, file=True) as part:
        with _answer(url, advice) as answer, part.open("wb") as file:
            length = answer.headers.get("Content-Length")
            while chunk := answer.read(CHUNK_BYTES):
                file.write(chunk)
                found.update(chunk)
                size += len(chunk)
                progress(f"downloading {path.name}", size, int(length) if length else None)
        if length and size != int(length):
            raise UserError(f"{url} broke off after {size:,} of {int(length):,} bytes: try again, or {advice}")
        if md5 not in (None, found.hexdigest()):
            raise UserError(
                f"{url} gave {describe(part)} with MD5 {found.hexdigest()}, but {md5} is needed: "
                f"try again later, or {advice}"
            )
    return path


def bucket(name: str, folder: Path, wanted: re.Pattern[str], progress: Progress) -> Path:
    """Returns a folder with the objects of a public Google bucket; downloads those that are not there yet.

    Args:
        name: of the bucket.
        folder: where to; an object's name is its path there.
        wanted: matches the whole names of the objects to download.
        progress: see `Progress`.

    Raises:
        UserError: the bucket or an object cannot be downloaded, or as `fetch`.
    """
    advice = (
        "run the command again, which goes on with what is missing, or get the files by hand, as "
        f"`gcloud storage cp -r gs://{name} .` does, and give their folder with --source"
    )
    objects = [each for each in _listing(name, advice) if wanted.fullmatch(each["name"])]
    if not objects:
        raise UserError(f"the bucket {GOOGLE}/{name} lists no such file as {wanted.pattern}: get them by hand")
    done, total = 0, sum(int(each["size"]) for each in objects)

    def get(each: dict[str, Any]) -> int:
        path = Path(each["name"])
        md5 = base64.b64decode(each["md5Hash"]).hex() if "md5Hash" in each else None  # which composed objects have not
        for left in reversed(range(TRIES)):
            try:
                fetch(f"{GOOGLE}/{name}/{path}", folder / path.parent, md5, silent, advice=advice)
                break
            except UserError:
                if not left:
                    raise
                time.sleep(PAUSE_SECONDS)
        return int(each["size"])

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for size in pool.map(get, objects):
            done += size
            progress(f"downloading {len(objects):,} files", done, total)
    return folder


def _listing(name: str, advice: str) -> Iterator[dict[str, Any]]:
    """The objects of a bucket: their names, sizes and MD5 (base64), page by page."""
    url, page = f"{GOOGLE}/storage/v1/b/{name}/o", ""
    while True:
        fields = {"fields": "items(name,size,md5Hash),nextPageToken"} | ({"pageToken": page} if page else {})
        with _answer(f"{url}?{urllib.parse.urlencode(fields)}", advice) as answer:
            text = answer.read()
        try:
            found = json.loads(text)
        except ValueError as error:
            raise UserError(f"{url} gave {text[:24]!r} and no list of files: try again later") from error
        yield from found.get("items", ())
        page = found.get("nextPageToken", "")
        if not page:
            return


@contextlib.contextmanager
def _answer(url: str, advice: str) -> Iterator[Any]:
    """What a server answers; raises `UserError` where it fails or breaks off."""
    request = urllib.request.Request(url, headers={"User-Agent": f"lra/{__version__}"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            yield answer
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise UserError(f"{url} cannot be downloaded ({getattr(error, 'reason', error)}): {advice}") from error
