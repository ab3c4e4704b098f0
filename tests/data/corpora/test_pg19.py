"""PG-19's layout: folders, metadata, counts."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from lra.data import SPLITS
from lra.data.corpora import PG19, PG19Head, pg19
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


def test_mistakes(books: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"28,752 files .*gcloud storage cp -r gs://deepmind-gutenberg"):
        PG19().prepare_from(None)
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
    rows = (books / "metadata.csv").read_text()
    (books / "metadata.csv").write_text(rows + "12,title,1812\n")
    with pytest.raises(UserError, match=r"metadata.csv:7 has 3 columns, but needs id,title,year,url"):
        PG19Head().prepare_from(books)
    (books / "metadata.csv").unlink()
    with pytest.raises(UserError, match=r"holds no metadata.csv, .*get it from gs://deepmind-gutenberg"):
        PG19Head().prepare_from(books)
    (books / "metadata.csv").write_text(rows)
    (books / "validation" / "11.txt").unlink()
    with pytest.raises(UserError, match=r"validation holds no ID\.txt"):
        PG19Head().prepare_from(books)
