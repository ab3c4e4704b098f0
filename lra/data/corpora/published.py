"""Corpora that papers report on: prepared once from a file, a folder or the original download, and checked then."""

from __future__ import annotations

import abc
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from lra.data import store
from lra.data.corpora import download
from lra.data.corpora.sources import Progress, silent
from lra.data.corpus import Corpus
from lra.data.store import SPLITS, Documents
from lra.data.subwords import sentencepiece_of
from lra.data.vocabulary import Bytes, Recipe, Vocabulary
from lra.errors import UserError


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a corpus before it is prepared.

    Attributes:
        about: one line.
        licence: of the text.
        citation: authors, year, title.
        urls: the original sources, with the MD5 of each file (None where it is not known); empty for what is made of
            a part of another corpus.
        counts: what each split must hold, by the names of `info.json`, "tokens" being words and lines.
        ids: sizes that vocabularies made of the whole corpus must have.
    """

    about: str
    licence: str
    citation: str
    urls: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    counts: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    ids: Mapping[str, int] = dataclasses.field(default_factory=dict)


class PublishedCorpus(Corpus):
    """A corpus that stands under its own name once `prepare_from` has checked and stored it.

    Args:
        vocabulary: one of `vocabularies`; "bytes"; "sentencepiece:32000" for a model of so many pieces trained on the
            train split; "sentencepiece:FILE" for a given model; or what else `given` knows.

    Raises:
        UserError: there is no such vocabulary.
    """

    facts: ClassVar[Facts]
    vocabularies: ClassVar[Mapping[str, Vocabulary | Recipe]] = {}
    given: ClassVar[Mapping[str, Callable[[str], Vocabulary | Recipe]]] = {"sentencepiece": sentencepiece_of}
    """What makes a vocabulary "KIND:ARGUMENT", by kind."""
    words: ClassVar[bool] = False
    """Whether words and lines are counted."""

    def __init__(self, vocabulary: str) -> None:
        known = {"bytes": Bytes(), **self.vocabularies}
        kind, _, argument = vocabulary.partition(":")
        if kind in self.given and argument:
            self._recipe: Vocabulary | Recipe = self.given[kind](argument)
        elif vocabulary in known:
            self._recipe = known[vocabulary]
        else:
            raise UserError(
                f"{self.name}.vocabulary is {vocabulary!r}, but must be one of {', '.join(self.choices())}: "
                "choose one of these"
            )
        self._choice = vocabulary.replace(":", "_")

    @classmethod
    def choices(cls) -> list[str]:
        """The vocabularies that can be asked for."""
        return ["bytes", *cls.vocabularies, "sentencepiece:SIZE", *(f"{kind}:FILE" for kind in cls.given)]

    @abc.abstractmethod
    def open(self, source: Path, work: Path, progress: Progress) -> Mapping[str, Documents]:
        """Checks a source and returns the documents of each split.

        Args:
            source: a file or folder.
            work: a folder for what has to be unpacked, which is removed later.
            progress: see `Progress`.

        Raises:
            UserError: it is not the corpus.
        """

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The map between text and tokens; one that is made of the text needs the corpus to be prepared."""
        if isinstance(self._recipe, Vocabulary):
            return self._recipe
        self.prepare()
        return self._made(self.folder, self._recipe)

    @property
    def digest(self) -> str:
        return str(self.info()["digest"])

    @property
    def description(self) -> str:
        sizes = ", ".join(f"{split} {counts['bytes']:,}" for split, counts in self.info()["splits"].items())
        return f"{self.name} (bytes: {sizes}; digest {self.digest})"

    @property
    def folder(self) -> Path:
        return store.data_dir() / self.name

    @functools.cache  # noqa: B019 - lives as long as the run
    def info(self) -> dict[str, Any]:
        return super().info()

    def num_words(self, split: str) -> int | None:
        """Returns words and line ends, since a model of words predicts both; None where words are not counted."""
        self._check_split(split)
        if not self.words:
            return None
        counts = self.info()["splits"][split]
        return int(counts["words"] + counts["lines"])

    def prepare(self) -> None:
        """Checks that the corpus is prepared; `prepare_from` does it.

        Raises:
            UserError: it is not, and how to do it.
        """
        if not self.prepared:
            raise UserError(
                f"the corpus {self.name} is not prepared: run `lra data prepare {self.name}"
                f"{'`, which downloads it, or `lra data prepare ' + self.name if self.facts.urls else ''}"
                " --source FILE_OR_FOLDER`"
            )

    def prepare_from(self, source: Path | None, progress: Progress = silent) -> None:
        """Prepares the corpus from a file or folder, or from its original download; does nothing if that was done.

        Args:
            source: the file or folder, packed or not; None to download.
            progress: see `Progress`.

        Raises:
            UserError: the source is missing, damaged, of another corpus or of other counts; a part of a corpus was
                prepared from another source; or the disk is full.
        """
        if self.prepared:
            store.sweep(self.folder)
            if source is not None and not self.facts.counts:
                self._check_same(source, progress)
            return
        given = source
        if source is None:
            source = self._download(progress)
        with store.appearing(self.folder) as work:
            scratch = work / "scratch"
            scratch.mkdir()
            try:
                documents = self.open(source, scratch, progress)
            except UserError:
                if given is None and source.is_file():  # else it would be there for ever
                    source.unlink()
                raise
            shown = {split: _shown(documents[split], split, progress) for split in SPLITS}
            self._write(work, shown, source)
            for path in sorted(scratch.rglob("*"), reverse=True):
                path.unlink()
            scratch.rmdir()
            vocabulary = self._recipe if isinstance(self._recipe, Vocabulary) else self._made(work, self._recipe)
            progress("encoding", 0, None)
            store.tokens(work, vocabulary, "train")

    def _write(self, work: Path, documents: Mapping[str, Documents], source: Path) -> None:
        facts = {"citation": self.facts.citation, "license": self.facts.licence}
        store.write_text(
            work, documents, name=self.name, description=self.facts.about, words=self.words,
            check=functools.partial(self._check, source), facts=facts, **self._options(),
        )  # fmt: skip

    def _check_same(self, source: Path, progress: Progress) -> None:
        """Raises `UserError` where a source is not what the corpus was prepared from."""
        with tempfile.TemporaryDirectory() as scratch:
            documents = self.open(source, Path(scratch), progress)
            found = store.digest(store.sha256(documents[split]) for split in SPLITS)
        if found != self.digest:
            raise UserError(
                f"{self.name} is prepared already from another text than {source} ({self.digest}, not {found}): "
                f"remove {self.folder} first"
            )

    def _options(self) -> dict[str, Any]:
        """Further arguments of `records.write`."""
        return {}

    def _check(self, source: Path, info: Mapping[str, Any]) -> None:
        """Raises `UserError` where a split does not hold what it must."""
        self._compare(source, info, self.facts.counts)

    def _compare(self, source: Path, info: Mapping[str, Any], wanted: Mapping[str, Mapping[str, int]]) -> None:
        for split, counts in wanted.items():
            found = dict(info["splits"][split])
            found["tokens"] = found.get("words", 0) + found.get("lines", 0)
            for unit, number in counts.items():
                if found[unit] != number:
                    raise UserError(
                        f"{source} is not {self.name}: {split} needs {number:,} {unit}, but has {found[unit]:,}"
                        f"{self._looks(source, split)}: "
                        f"get it again{' from ' + ' or '.join(self.facts.urls) if self.facts.urls else ''}"
                    )

    def _looks(self, source: Path, split: str) -> str:
        """What the file of a split looks like, in brackets, where splits have files of their own."""
        return ""

    def _download(self, progress: Progress) -> Path:
        """The file of the original download, or the folder of its files."""
        if not self.facts.urls:
            raise UserError(f"{self.name} has no download: give a file or folder with --source")
        paths = [download.fetch(url, download.home(self.name), md5, progress) for url, md5 in self.facts.urls.items()]
        return paths[0] if len(paths) == 1 else paths[0].parent

    def _made(self, folder: Path, recipe: Recipe) -> Vocabulary:
        """A vocabulary that is made of the corpus' text when it is first asked for, and kept."""
        path = folder / "vocabularies" / self._choice
        if path.is_file():
            return recipe.load(path.read_bytes())
        made = recipe.make(functools.partial(store.read_text, folder))
        expected = self.facts.ids.get(self._choice, made.size)
        if made.size != expected:
            raise UserError(
                f"the vocabulary {self._choice} of {self.name} has {made.size:,} ids, but {expected:,} are needed: "
                "prepare the corpus again from its original source"
            )
        with store.appearing(path, file=True) as new:
            new.write_bytes(made.state())
        return made


def _shown(documents: Documents, split: str, progress: Progress) -> Documents:
    done = 0
    for path, text in documents:
        yield path, text
        done += len(text)
        progress(f"storing {split}", done, None)
