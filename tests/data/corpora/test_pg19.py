"""PG-19's layout: folders, metadata, counts."""

import base64
import dataclasses
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lra.data import SPLITS
from lra.data.corpora import PG19, PG19Head, download, pg19
from lra.errors import UserError

FOLDERS = {"train": (7, 10, 902), "valid": (11,), "test": (3, 1001)}


@pytest.fixture
def books(tmp_path: Path) -> Path:
    root = tmp_path / "deepmind-gutenberg"
    rows = []
    for split, numbers in FOLDERS.items():
        folder = root / ("validation" if split == "valid" else split)
        folder.mkdir(parents=True)
        for number in numbers:
            (folder / f"{number}.txt").write_bytes(f"Book {number} \r\n\n is \u00e9 so".encode() * number)
            rows.append(
                f'{number},"Of {number}, and more",18{number % 90 + 10},http://www.gutenberg.org/ebooks/{number}'
            )
    (root / "metadata.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return root


@pytest.fixture
def bucket(books: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A server on this machine that stands for Google's; `broken` are objects that arrive damaged so many times."""
    (books / "README.md").write_text("not of the corpus")
    files = {path.relative_to(books).as_posix(): path.read_bytes() for path in books.rglob("*") if path.is_file()}
    state: dict[str, Any] = {"objects": files, "asked": [], "broken": {}}
    listed = [
        {"name": name, "size": str(len(text)), "md5Hash": base64.b64encode(hashlib.md5(text).digest()).decode()}
        for name, text in files.items()
    ]

    def answer(url: urllib.parse.SplitResult) -> bytes:
        if url.path == "/storage/v1/b/deepmind-gutenberg/o":
            begin = int(urllib.parse.parse_qs(url.query).get("pageToken", ["0"])[0])
            more = {"nextPageToken": str(begin + 3)} if begin + 3 < len(listed) else {}
            return json.dumps({"items": listed[begin : begin + 3], **more}).encode()
        name = url.path.removeprefix("/deepmind-gutenberg/")
        state["asked"].append(name)
        left = state["broken"].get(name, 0)
        state["broken"][name] = left - 1
        return files[name][: -1 if left > 0 else None]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answer(urllib.parse.urlsplit(self.path))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    monkeypatch.setattr(download, "GOOGLE", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(download, "PAUSE_SECONDS", 0.0)
    yield state
    server.shutdown()
    server.server_close()


def words(number: int) -> int:
    return len((f"Book {number} \r\n\n is \u00e9 so" * number).split())


def test_the_published_facts() -> None:
    assert [PG19.facts.counts[split]["documents"] for split in SPLITS] == [28_602, 50, 100]
    assert [pg19.OFFICIAL_WORDS[split] for split in SPLITS] == [1_973_136_207, 3_007_061, 6_966_499]


def test_books_by_folder_with_their_metadata(books: Path) -> None:
    corpus = PG19Head()
    corpus.prepare_from(books)
    for split, numbers in FOLDERS.items():
        found = list(corpus.books(split))
        assert [book["path"].decode().split("/")[1] for book in found] == [f"{number}.txt" for number in numbers]
        assert [book["title"].decode() for book in found] == [f"Of {number}, and more" for number in numbers]
        assert [book["year"].decode() for book in found] == [f"18{number % 90 + 10}" for number in numbers]
        assert found[0]["url"] == f"http://www.gutenberg.org/ebooks/{numbers[0]}".encode()
        assert corpus.tokens(split).tobytes() == b"".join(book["text"] for book in found)
        assert corpus.info()["splits"][split]["documents"] == len(numbers)
        assert corpus.num_words(split) == sum(map(words, numbers))


@pytest.mark.parametrize("vocabulary", ["bytes", "sentencepiece:300"])
def test_books_are_documents(books: Path, vocabulary: str) -> None:
    corpus = PG19Head(vocabulary)
    corpus.prepare_from(books)
    for split in SPLITS:
        pieces = np.split(corpus.tokens(split), corpus.document_starts(split)[1:])
        texts = [book["text"] for book in corpus.books(split)]
        assert [corpus.vocabulary.decode(piece) for piece in pieces] == texts


def test_counts_of_the_whole(books: Path, monkeypatch: pytest.MonkeyPatch, prepared_root: Path) -> None:
    with pytest.raises(UserError, match="train needs 28,602 documents, but has 3"):
        PG19().prepare_from(books)
    counts = {split: {"documents": len(numbers)} for split, numbers in FOLDERS.items()}
    monkeypatch.setattr(PG19, "facts", dataclasses.replace(PG19.facts, counts=counts))
    with pytest.raises(UserError, match=r"train has [\d,]+ words between white space, but 1,973,136,207 are counted"):
        PG19().prepare_from(books)
    assert list(prepared_root.glob("*")) == []
    official = {split: sum(map(words, numbers)) for split, numbers in FOLDERS.items()}
    monkeypatch.setattr(pg19, "OFFICIAL_WORDS", official | {"train": official["train"] + 3})
    PG19().prepare_from(books)
    assert [PG19().num_words(split) for split in SPLITS] == [official["train"] + 3, official["valid"], official["test"]]


def test_the_download_goes_on_where_it_stopped(
    books: Path, bucket: dict[str, Any], monkeypatch: pytest.MonkeyPatch, prepared_root: Path
) -> None:
    counts = {split: {"documents": len(numbers)} for split, numbers in FOLDERS.items()}
    monkeypatch.setattr(PG19, "facts", dataclasses.replace(PG19.facts, counts=counts))
    monkeypatch.setattr(pg19, "OFFICIAL_WORDS", {split: sum(map(words, FOLDERS[split])) for split in FOLDERS})
    bucket["broken"] = {"train/902.txt": 99}
    with pytest.raises(UserError, match=r"gave a text .* with MD5 \w+, but \w+ is needed: .*goes on with what is"):
        PG19().prepare_from(None)
    assert not PG19().prepared
    assert bucket["asked"].count("train/902.txt") == download.TRIES
    bucket["broken"] = {"train/902.txt": download.TRIES - 1}
    PG19().prepare_from(None)
    asked = [name for name in bucket["asked"] if name != "train/902.txt"]
    assert sorted(asked) == sorted(name for name in bucket["objects"] if name not in ("train/902.txt", "README.md"))
    for split, numbers in FOLDERS.items():
        folder = books / ("validation" if split == "valid" else split)
        assert b"".join(PG19().text(split)) == b"".join((folder / f"{n}.txt").read_bytes() for n in numbers)
    assert next(PG19().books("test"))["title"] == b"Of 3, and more"
    assert not list((prepared_root / "downloads").rglob(".*"))


def test_mistakes(books: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        PG19Head().prepare_from(tmp_path / "gone")
    with pytest.raises(
        UserError, match=r"is not pg19_head: a folder with train, validation, test and metadata.csv needed"
    ):
        PG19Head().prepare_from(books / "metadata.csv")
    (books / "train" / "12.txt").write_text("new")
    with pytest.raises(UserError, match=r"metadata.csv has no row for 1 of the books, such as .*12\.txt"):
        PG19Head().prepare_from(books)
    (books / "train" / "12.txt").unlink()
    copy = books / "train" / "11.txt"
    copy.write_bytes((books / "validation" / "11.txt").read_bytes())
    with pytest.raises(UserError, match=r"holds 1 of the books in two splits, such as 11\.txt"):
        PG19Head().prepare_from(books)
    copy.unlink()
    rows = (books / "metadata.csv").read_text()
    (books / "metadata.csv").write_text(rows + "12,title,1812\n")
    with pytest.raises(UserError, match=r"metadata.csv:7 has 3 columns, but needs id,title,year,url"):
        PG19Head().prepare_from(books)
    (books / "metadata.csv").unlink()
    with pytest.raises(
        UserError,
        match=r"holds no metadata.csv, .*get it from https://storage.googleapis.com/deepmind-gutenberg/metadata.csv",
    ):
        PG19Head().prepare_from(books)
    (books / "metadata.csv").write_text(rows)
    (books / "validation" / "11.txt").unlink()
    with pytest.raises(UserError, match=r"validation holds no ID\.txt"):
        PG19Head().prepare_from(books)
