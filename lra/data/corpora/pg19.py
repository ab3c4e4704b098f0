"""PG-19: books from Project Gutenberg published before 1919 (Rae et al. 2019, arXiv:1911.05507)."""

from __future__ import annotations

import collections
import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lra.data import store
from lra.data.corpora import download, sources
from lra.data.corpora.published import Facts, PublishedCorpus
from lra.data.corpora.sources import Progress
from lra.data.store import Documents
from lra.errors import UserError

FOLDERS = {"train": "train", "valid": "validation", "test": "test"}
FIELDS = ("title", "year", "url")
METADATA = "metadata.csv"
LAYOUT = "train, validation, test and metadata.csv"
BUCKET = "deepmind-gutenberg"
URL = f"https://storage.googleapis.com/{BUCKET}/"
OFFICIAL_WORDS = {"train": 1_973_136_207, "valid": 3_007_061, "test": 6_966_499}
"""Table 2 of the paper: what perplexity per word divides by."""
WORDS_TOLERANCE = 0.01
"""Share by which words between white space may differ: the paper does not say how it counts."""


class Books(PublishedCorpus):
    """A folder `train/`, `validation/` and `test/` of `ID.txt`, and `metadata.csv` with id, title, year and URL.

    Books come in the order of their numbers, one document each, with what `metadata.csv` says of them. A split is its
    books one after the other, with nothing in between.
    """

    words = True

    def open(self, source: Path, work: Path, progress: Progress) -> Mapping[str, Documents]:
        if source.is_file():
            raise sources.refused(
                source, self.name, f"a folder with {LAYOUT}", "a file", "give the folder with --source"
            )
        if not source.is_dir():
            raise UserError(f"there is no folder {source}: give one with {LAYOUT} with --source")
        self._known = _metadata(source)
        paths = {split: _books(source / folder) for split, folder in FOLDERS.items()}
        missing = [path for found in paths.values() for path in found if path.stem not in self._known]
        if missing:
            raise UserError(
                f"{source / METADATA} has no row for {len(missing)} of the books, such as {missing[0]}: "
                "add their rows (id,title,year,url), or get the file again"
            )
        names = collections.Counter(path.name for found in paths.values() for path in found)
        twice = [name for name, folders in names.items() if folders > 1]
        if twice:
            raise UserError(
                f"{source} holds {len(twice)} of the books in two splits, such as {twice[0]}, but a score is of text "
                f"that was not trained on: keep each in one of {', '.join(FOLDERS.values())}"
            )
        self._check_books(source, paths)
        return {split: self._documents(source, found) for split, found in paths.items()}

    def _check_books(self, source: Path, paths: Mapping[str, list[Path]]) -> None:
        """Raises `UserError` before anything is read where the number of books is wrong."""

    def _documents(self, source: Path, paths: list[Path]) -> Iterator[tuple[str, bytes]]:
        for path in paths:
            try:
                yield path.relative_to(source).as_posix(), path.read_bytes()
            except OSError as error:
                raise UserError(f"{path} cannot be read ({error.strerror}): make it readable") from error

    def _options(self) -> dict[str, Any]:
        return {"fields": FIELDS, "about": lambda path: self._known[Path(path).stem]}

    def books(self, split: str) -> Iterator[dict[str, bytes]]:
        """Yields the books of a split in order: "path", "title", "year", "url" and "text"."""
        self._check_split(split)
        self.prepare()
        return store.read_documents(self.folder, split)

    def document_starts(self, split: str) -> np.ndarray:
        """Returns where the books begin."""
        self._check_split(split)
        self.prepare()
        return store.document_starts(self.folder, self.vocabulary, split)

    def num_words(self, split: str) -> int | None:
        """Returns the words between white space, without line ends."""
        self._check_split(split)
        return int(self.info()["splits"][split]["words"])


class PG19(Books):
    """PG-19: 28,602 books to train on, 50 to validate and 100 to test.

    Args:
        vocabulary: "bytes"; "sentencepiece:32000" for pieces trained on the train split, or "sentencepiece:FILE".
    """

    name = "pg19"
    facts = Facts(
        about="books from Project Gutenberg published before 1919",
        licence="Apache-2.0",
        citation="Rae, Potapenko, Jayakumar, Lillicrap (2019): Compressive Transformers, arXiv:1911.05507",
        urls={URL: None},
        counts={"train": {"documents": 28_602}, "valid": {"documents": 50}, "test": {"documents": 100}},
    )

    def __init__(self, vocabulary: str = "bytes") -> None:
        super().__init__(vocabulary)

    def _check_books(self, source: Path, paths: Mapping[str, list[Path]]) -> None:
        found = {"splits": {split: {"documents": len(books)} for split, books in paths.items()}}
        self._compare(source, found, self.facts.counts)

    def _check(self, source: Path, info: Mapping[str, Any]) -> None:
        super()._check(source, info)
        for split, words in OFFICIAL_WORDS.items():
            found = info["splits"][split]["words"]
            if abs(found - words) > WORDS_TOLERANCE * words:
                raise UserError(
                    f"{source} is not pg19: {split} has {found:,} words between white space, but {words:,} are counted "
                    f"in the paper: get the books again from {URL}"
                )

    def num_words(self, split: str) -> int | None:
        """Returns the paper's count (Table 2), the official normaliser of perplexity per word."""
        super().num_words(split)
        return OFFICIAL_WORDS[split]

    def _download(self, progress: Progress) -> Path:
        wanted = re.compile(rf"({'|'.join(FOLDERS.values())})/\d+\.txt|{re.escape(METADATA)}")
        return download.bucket(BUCKET, download.home(self.name), wanted, progress)


class PG19Head(Books):
    """A folder in PG-19's layout that holds a part of it, or other books.

    Args:
        vocabulary: as for `PG19`.
    """

    name = "pg19_head"
    facts = Facts(
        about="books in PG-19's layout, not all of it",
        licence="that of the books",
        citation=PG19.facts.citation,
    )

    def __init__(self, vocabulary: str = "bytes") -> None:
        super().__init__(vocabulary)


def _books(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.txt"), key=lambda path: (len(path.stem), path.stem))  # by number
    if not found:
        raise UserError(f"{folder} holds no ID.txt: give a folder with {LAYOUT} with --source")
    return found


def _metadata(source: Path) -> dict[str, dict[str, str]]:
    """The further fields of each book by its id."""
    path = source / METADATA
    if not path.is_file():
        raise UserError(
            f"the folder {source} holds no {METADATA}, which has each book's title and year: get it from "
            f"{URL}{METADATA}, or write one with the columns id,title,year,url and no header"
        )
    with path.open(encoding="utf-8", newline="") as file:
        known = {}
        for number, row in enumerate(csv.reader(file), 1):
            if len(row) != 1 + len(FIELDS):
                raise UserError(f"{path}:{number} has {len(row)} columns, but needs id,title,year,url: mend the row")
            known[row[0]] = dict(zip(FIELDS, row[1:], strict=True))
    return known
