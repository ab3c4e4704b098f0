"""Small texts that stand for the corpora of papers: their facts are replaced by those of the small text."""

import dataclasses
import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lra.data.corpora import Enwik8, PublishedCorpus, Text8

MARKUP = b'<mediawiki xmlns="x">\n' + b"".join(b"line %d \xc3\xa9\n\n" % number for number in range(211)) + b"end"
LETTERS = b" anarchism originated as a term of abuse " + b" ".join([b"zebra", b"quick", b"fox"] * 97)


def cuts(size: int) -> dict[str, dict[str, int]]:
    """About 90 / 5 / 5."""
    part = size // 20
    return {"train": {"bytes": size - 2 * part}, "valid": {"bytes": part}, "test": {"bytes": part}}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[PublishedCorpus], bytes], None]:
    """Lets a corpus of one file be this text."""

    def be(cls: type[PublishedCorpus], text: bytes, **facts: object) -> None:
        changed = dataclasses.replace(cls.facts, **{"counts": cuts(len(text)), "ids": {}, **facts})
        monkeypatch.setattr(cls, "facts", changed)
        monkeypatch.setattr(cls, "md5", hashlib.md5(text).hexdigest())

    return be


@pytest.fixture
def enwik8(small: Callable[..., None], tmp_path: Path) -> Path:
    small(Enwik8, MARKUP)
    path = tmp_path / "enwik8"
    path.write_bytes(MARKUP)
    return path


@pytest.fixture
def text8(small: Callable[..., None], tmp_path: Path) -> Path:
    small(Text8, LETTERS)
    path = tmp_path / "text8"
    path.write_bytes(LETTERS)
    return path


@pytest.fixture
def wiki() -> Callable[[int, str], str]:
    """Lines as WikiText has them: headings, blank lines, words and `<unk>`."""

    def make(paragraphs: int, seed: str) -> str:
        draw = random.Random(seed)
        words = ["the", "of", "<unk>", "@-@", "戦場", "é", *(f"word{number}" for number in range(37))]
        lines = [" ", " = Valkyria Chronicles III = ", " "]
        for _ in range(paragraphs):
            lines += [" " + " ".join(draw.choices(words, k=draw.randint(1, 19))) + " ", " "]
        return "".join(f"{line}\n" for line in lines)

    return make
