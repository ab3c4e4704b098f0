"""Corpora of words: counts, vocabularies by frequency, heads, what is refused."""

import collections
import dataclasses
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lra.data import SPLITS
from lra.data.corpora import PTB, WikiText2, WikiText103, WikiText103Head, sources
from lra.errors import UserError

Make = Callable[[int, str], str]


@pytest.fixture
def texts(wiki: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Small splits in `tmp_path / "wiki"`, of which WikiText-103's facts are now true."""
    made = {split: wiki(number, split) for split, number in zip(SPLITS, (41, 5, 7), strict=True)}
    (tmp_path / "wiki").mkdir()
    for split, text in made.items():
        (tmp_path / "wiki" / f"wiki.{split}.tokens").write_text(text, encoding="utf-8")
    counts = {split: {"tokens": len(lines(text))} for split, text in made.items()}
    ids = {"words": len({*lines(made["train"])})}
    monkeypatch.setattr(WikiText103, "facts", dataclasses.replace(WikiText103.facts, counts=counts, ids=ids))
    return made


def lines(text: str) -> list[str]:
    """Tokens as Transformer-XL's code makes them, line by line."""
    return [word for line in text.split("\n")[:-1] for word in [*line.strip().split(), "<eos>"]]


def test_the_published_facts() -> None:
    facts = WikiText103.facts
    assert [facts.counts[split]["tokens"] for split in SPLITS] == [103_227_021, 217_646, 245_569]
    assert facts.ids["words"] == 267_735
    assert facts.urls == {
        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip": "9ddaacaf6af0710eda8c456decff7832"
    }


@pytest.mark.parametrize("chunk", [1 << 20, 31])  # many lines in a piece, and pieces of many chunks
def test_tokens_and_ids(texts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", chunk)
    corpus = WikiText103()
    corpus.prepare_from(tmp_path / "wiki")
    counted = collections.Counter(word for word in lines(texts["train"]) if word != "<eos>")
    by_id = ["<eos>", *(word for word, _ in counted.most_common())]
    assert corpus.vocabulary.size == len(by_id)
    assert corpus.vocabulary.start == 0
    for split, text in texts.items():
        expected = [word if word in by_id else "<unk>" for word in lines(text)]
        assert [by_id[token] for token in corpus.tokens(split)] == expected
        assert corpus.num_words(split) == len(expected)
        assert corpus.num_bytes(split) == len(text.encode())
        assert corpus.num_characters(split) == len(text)
    train = corpus.vocabulary.decode(corpus.tokens("train"))
    assert b" " + train == texts["train"].encode() + b" "
    begin = "".join(f"{line}\n" for line in texts["train"].split("\n")[:5]).encode()
    assert corpus.num_bytes("train", len(lines(begin.decode()))) == len(begin)
    assert corpus.num_characters("train", len(lines(begin.decode()))) == len(begin.decode())


def test_the_variant_without_line_ends(texts: dict[str, str], tmp_path: Path) -> None:
    WikiText103().prepare_from(tmp_path / "wiki")
    corpus = WikiText103("words_no_eos")
    words = [word for word in lines(texts["test"]) if word != "<eos>"]
    assert corpus.tokens("test").size == len(words)
    assert corpus.vocabulary.size == WikiText103().vocabulary.size - 1
    assert corpus.num_words("test") == len(words) + texts["test"].count("\n")
    assert WikiText103("bytes").tokens("test").tobytes() == texts["test"].encode()


def test_an_archive(texts: dict[str, str], tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "wikitext-103-v1.zip", "w") as archive:
        archive.writestr("wikitext-103/", "")
        for split, text in texts.items():
            archive.writestr(f"wikitext-103/wiki.{split}.tokens", text)
    WikiText103().prepare_from(tmp_path / "wikitext-103-v1.zip")
    assert b"".join(WikiText103().text("valid")) == texts["valid"].encode()


def test_a_split_that_is_not_whole(texts: dict[str, str], tmp_path: Path, prepared_root: Path) -> None:
    path = tmp_path / "wiki" / "wiki.test.tokens"
    path.write_text(texts["test"][:-40], encoding="utf-8")
    found = len(texts["test"][:-40].split()) + texts["test"][:-40].count("\n") + 1
    wanted = len(lines(texts["test"]))
    looks = r"\(wiki\.test\.tokens is a text of .*\)"
    with pytest.raises(
        UserError, match=f"test needs {wanted:,} tokens, but has {found:,} {looks}: get it again from https"
    ):
        WikiText103().prepare_from(tmp_path / "wiki")
    assert list(prepared_root.glob("*")) == []


def test_carriage_returns(texts: dict[str, str], tmp_path: Path) -> None:
    for split, text in texts.items():
        path = tmp_path / "wiki" / f"wiki.{split}.tokens"
        path.write_bytes(text.replace("\n", "\r\n").encode())
    with pytest.raises(UserError, match=r"wiki.train.tokens has a carriage return at byte 1, .*dos2unix"):
        WikiText103().prepare_from(tmp_path / "wiki")


def test_other_sources(texts: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not ptb: .* needed, one file found; it is a text of"):
        PTB().prepare_from(tmp_path / "wiki" / "wiki.test.tokens")
    with pytest.raises(UserError, match=r"holds no ptb\.train\.txt"):
        PTB().prepare_from(tmp_path / "wiki")
    for split in SPLITS:
        (tmp_path / "wiki" / f"ptb.{split}.txt").write_text(texts[split], encoding="utf-8")
    with pytest.raises(UserError, match=r"a train split that begins with b' aer banknote berlitz calloway ' needed"):
        PTB().prepare_from(tmp_path / "wiki")
    with pytest.raises(UserError, match=r"is not wikitext2: train needs 2,088,628 tokens, but has"):
        WikiText2().prepare_from(tmp_path / "wiki")


def test_a_head_is_cut_at_line_ends(wiki: Make, tmp_path: Path) -> None:
    text = wiki(53, "head")
    path = tmp_path / "head"
    path.write_text(text + " cut off in the mid", encoding="utf-8")
    corpus = WikiText103Head()
    corpus.prepare_from(path)
    splits = [b"".join(corpus.text(split)) for split in SPLITS]
    assert b"".join(splits) == text.encode()
    assert all(split.endswith(b"\n") for split in splits)
    size = path.stat().st_size
    assert len(splits[0]) <= 0.9 * size < len(splits[0]) + 200
    assert sum(corpus.tokens(split).size for split in SPLITS) == len(lines(text))


def test_a_head_with_whole_valid_and_test(texts: dict[str, str], tmp_path: Path) -> None:
    train = tmp_path / "wiki" / "wiki.train.tokens"
    head = "".join(f"{line}\n" for line in texts["train"].split("\n")[:31])
    train.with_name("wiki.train.tokens.head").write_text(head + " cut", encoding="utf-8")
    train.unlink()
    corpus = WikiText103Head()
    corpus.prepare_from(tmp_path / "wiki")
    assert [b"".join(corpus.text(split)).decode() for split in SPLITS] == [head, texts["valid"], texts["test"]]
    assert corpus.num_bytes("test") == len(texts["test"].encode())  # though words that train has not are <unk>
    assert corpus.num_characters("test") == len(texts["test"])
    other = tmp_path / "wiki" / "wiki.test.tokens"
    other.write_text(texts["test"] + " more \n", encoding="utf-8")
    with pytest.raises(UserError, match="prepared already from another text"):
        WikiText103Head().prepare_from(tmp_path / "wiki")
    other.unlink()
    with pytest.raises(
        UserError, match=r"holds no wiki\.test\.tokens: give a folder with .*, or a beginning of the first"
    ):
        WikiText103Head().prepare_from(tmp_path / "wiki")


def test_a_head_in_the_words_of_the_whole(texts: dict[str, str], tmp_path: Path) -> None:
    train = tmp_path / "wiki" / "wiki.train.tokens"
    counted = collections.Counter(word for word in lines(texts["train"]) if word not in ("<eos>", "<unk>"))
    (tmp_path / "dict.txt").write_text("".join(f"{word} {n}\n" for word, n in counted.most_common()), encoding="utf-8")
    train.write_text("".join(f"{line}\n" for line in texts["train"].split("\n")[:7]), encoding="utf-8")
    WikiText103Head().prepare_from(tmp_path / "wiki")
    corpus = WikiText103Head(f"words:{tmp_path / 'dict.txt'}")
    by_id = ["<eos>", "<unk>", *(word for word, _ in counted.most_common())]
    assert corpus.vocabulary.size == len(by_id) > WikiText103Head().vocabulary.size
    for split in ("valid", "test"):
        expected = [word if word in by_id else "<unk>" for word in lines(texts[split])]
        assert [by_id[token] for token in corpus.tokens(split)] == expected
    with pytest.raises(UserError, match=r"must be one of bytes, .*, sentencepiece:FILE, words:FILE"):
        WikiText103Head("words:")


def test_a_head_that_is_all_or_too_short(texts: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds all of WikiText-103: prepare it as the corpus wikitext103"):
        WikiText103Head().prepare_from(tmp_path / "wiki" / "wiki.train.tokens")
    short = tmp_path / "short"
    short.write_bytes(b" \n = Valkyria Chronicles III = \n")
    with pytest.raises(UserError, match="lines for three splits needed"):
        WikiText103Head().prepare_from(short)
