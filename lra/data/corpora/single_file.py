"""Corpora of one file that is cut into train, valid and test, in this order: enwik8, text8 and heads of them."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from lra.data import symbols
from lra.data.corpora import sources
from lra.data.corpora.published import Facts, PublishedCorpus
from lra.data.corpora.sources import Progress
from lra.data.store import SPLITS, Documents
from lra.data.vocabulary import Recipe, Vocabulary
from lra.errors import UserError

WHOLE_BYTES = 100_000_000
HEAD_CUTS = (0.9, 0.95)
ENWIK8_URL, TEXT8_URL = "http://mattmahoney.net/dc/enwik8.zip", "http://mattmahoney.net/dc/text8.zip"
_CUTS = {"train": {"bytes": 90_000_000}, "valid": {"bytes": 5_000_000}, "test": {"bytes": 5_000_000}}


class SingleFile(PublishedCorpus):
    """A corpus of one file; a head of it is cut at 90 % and 95 % of its bytes, rounded down.

    Attributes:
        whole: the name of the whole corpus, and of the file.
        md5: of the whole file (hex), None for a head.
    """

    whole: ClassVar[str]
    md5: ClassVar[str | None] = None

    @staticmethod
    @abc.abstractmethod
    def fits(text: bytes) -> bool:
        """Whether a text that begins so may be this corpus."""

    def check(self, text: bytes, offset: int) -> None:
        """Raises `UserError` where a piece of text at an offset, which is not empty, cannot be of the corpus."""

    def open(self, source: Path, work: Path, progress: Progress) -> Mapping[str, Documents]:
        path = sources.find(source, self.whole)
        file, size, md5 = sources.plain(path, work, self.whole, progress)
        begin = sources.head(file)
        if self.md5 is None:
            wanted = f"the beginning of {self.whole}, of less than {WHOLE_BYTES:,} bytes,"
            right = 20 <= size < WHOLE_BYTES and self.fits(begin)
            advice = f"all of it is the corpus {self.whole}" if size == WHOLE_BYTES else "give another file"
        else:
            cuts = [0, *itertools.accumulate(self.facts.counts[split]["bytes"] for split in SPLITS)]
            wanted = f"{cuts[-1]:,} bytes with MD5 {self.md5}"
            right = size == cuts[-1] and md5 == self.md5
            advice = f"get it again from {' or '.join(self.facts.urls)}"
            if 0 < size < cuts[-1] and self.fits(begin):
                advice += f", or prepare what there is as {self.whole}_head"
        if not right:
            raise sources.refused(path, self.name, wanted, f"{size:,} bytes with MD5 {md5}", advice)
        if self.md5 is None:
            cuts = [0, *(int(size * cut) for cut in HEAD_CUTS), size]
        ranges = zip(SPLITS, itertools.pairwise(cuts), strict=True)
        return {split: self._documents(file, *ends) for split, ends in ranges}

    def _documents(self, file: Path, begin: int, end: int) -> Iterator[tuple[str, bytes]]:
        for chunk in sources.chunks(file, begin, end):
            self.check(chunk, begin)
            yield f"{self.whole}:{begin}", chunk
            begin += len(chunk)


def _all(texts: Callable[[str], Iterator[bytes]]) -> Iterator[bytes]:
    for split in SPLITS:
        yield from texts(split)


class Enwik8Head(SingleFile):
    """The beginning of enwik8: a file of less than its 100,000,000 bytes, cut 90 / 5 / 5.

    Args:
        vocabulary: "bytes"; "txl" and "adaptive_span", the symbols of two papers' code; "t2t", bytes shifted by two;
            or SentencePiece, see `PublishedCorpus`.
    """

    name = "enwik8_head"
    whole = "enwik8"
    facts = Facts(
        about="a beginning of enwik8, cut 90 / 5 / 5",
        licence="CC BY-SA 3.0 and GFDL",
        citation="Matt Mahoney (2006): Large Text Compression Benchmark",
    )
    vocabularies: ClassVar[Mapping[str, Vocabulary | Recipe]] = {
        "txl": Recipe(lambda texts: symbols.transformer_xl(_all(texts)), symbols.load_transformer_xl),
        "adaptive_span": Recipe(lambda texts: symbols.adaptive_span(_all(texts)), symbols.load_adaptive_span),
        "t2t": symbols.tensor2tensor(),
    }

    def __init__(self, vocabulary: str = "bytes") -> None:
        super().__init__(vocabulary)

    @staticmethod
    def fits(text: bytes) -> bool:
        return text.startswith(b"<mediawiki ")


class Enwik8(SingleFile):
    """The first 100,000,000 bytes of an English Wikipedia dump of 2006, cut 90 / 5 / 5 million bytes.

    Args:
        vocabulary: as for `Enwik8Head`; "txl" has 204 ids, "adaptive_span" 205, "t2t" 258.
    """

    name = whole = "enwik8"
    md5 = "a1fa5ffddb56f4953e226637dabbb36a"
    facts = Facts(
        about="the first 100,000,000 bytes of an English Wikipedia dump of 2006",
        licence=Enwik8Head.facts.licence,
        citation=Enwik8Head.facts.citation,
        urls={ENWIK8_URL: None},
        counts=_CUTS,
        ids={"txl": 204, "adaptive_span": 205},
    )
    vocabularies = Enwik8Head.vocabularies
    fits = staticmethod(Enwik8Head.fits)

    def __init__(self, vocabulary: str = "bytes") -> None:
        super().__init__(vocabulary)


class Text8Head(SingleFile):
    """The beginning of text8: a file of less than its 100,000,000 bytes, of a to z and space, cut 90 / 5 / 5.

    Args:
        vocabulary: "chars", 27 ids; "bytes"; or SentencePiece, see `PublishedCorpus`.
    """

    name = "text8_head"
    whole = "text8"
    facts = Facts(
        about="a beginning of text8, cut 90 / 5 / 5",
        licence="CC BY-SA 3.0 and GFDL",
        citation="Matt Mahoney (2006): Large Text Compression Benchmark, about the test data",
    )
    vocabularies: ClassVar[Mapping[str, Vocabulary | Recipe]] = {"chars": symbols.characters()}

    def __init__(self, vocabulary: str = "chars") -> None:
        super().__init__(vocabulary)

    @staticmethod
    def fits(text: bytes) -> bool:
        return text.lstrip(b" ").startswith(b"anarchism originated as a term of abuse")

    def check(self, text: bytes, offset: int) -> None:
        if other := text.translate(None, b" abcdefghijklmnopqrstuvwxyz"):
            place = offset + text.index(other[:1])
            raise UserError(
                f"byte {place:,} of the source of {self.name} is {other[:1]!r}, but text8 has a to z and space alone: "
                "give text8 itself, or clean the text"
            )


class Text8(SingleFile):
    """text8: 100,000,000 characters of cleaned English Wikipedia, a to z and space, cut 90 / 5 / 5 million.

    Args:
        vocabulary: as for `Text8Head`.
    """

    name = whole = "text8"
    md5 = "3bea1919949baf155f99411df5fada7e"
    facts = Facts(
        about="100,000,000 characters of cleaned English Wikipedia, a to z and space",
        licence=Text8Head.facts.licence,
        citation=Text8Head.facts.citation,
        urls={TEXT8_URL: None},
        counts=_CUTS,
    )
    vocabularies = Text8Head.vocabularies
    fits = staticmethod(Text8Head.fits)
    check = Text8Head.check

    def __init__(self, vocabulary: str = "chars") -> None:
        super().__init__(vocabulary)
