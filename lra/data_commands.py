"""What `lra data` does: which corpora there are, what is known of one, and preparing it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import DownloadColumn
from rich.table import Table

from lra.annotations import nearest
from lra.bar import bar
from lra.data import Corpus, PublishedCorpus, PythonSource
from lra.errors import UserError
from lra.registry import CORPORA


def list_command(options: argparse.Namespace) -> None:
    """`lra data list`: the corpora, and which of them are prepared."""
    rows = [_summary(name) for name in CORPORA]
    if options.json:
        print(json.dumps(rows))
        return
    table = Table("corpus", "status", "about", caption="prepare one with `lra data prepare NAME`", title_justify="left")
    for row in rows:
        table.add_row(row["name"], row["status"], row["about"])
    Console().print(table)


def info_command(options: argparse.Namespace) -> None:
    """`lra data info`: counts, checksums, splits, licence, citation."""
    corpus = _corpus(options.name)
    found: dict[str, Any] = {**_summary(options.name), "folder": str(corpus.folder)}
    if isinstance(corpus, PublishedCorpus):
        facts = corpus.facts
        found |= {
            "licence": facts.licence, "citation": facts.citation, "sources": dict(facts.urls),
            "vocabularies": corpus.choices(),
            "expected": {split: dict(counts) for split, counts in facts.counts.items()},
        }  # fmt: skip
    if corpus.prepared:
        info = corpus.info()
        found |= {"digest": info["digest"], "splits": info["splits"]}
    if options.json:
        print(json.dumps(found))
        return
    console = Console()
    table = Table(show_header=False, title=options.name, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in found.items():
        if key != "name" and value:
            table.add_row(key, _text(value))
    console.print(table)


def prepare_command(options: argparse.Namespace) -> None:
    """`lra data prepare`: downloads or reads, checks and stores a corpus."""
    corpus = _corpus(options.name)
    before = corpus.prepared
    if isinstance(corpus, PublishedCorpus):
        with bar(DownloadColumn()) as progress:
            corpus.prepare_from(None if options.source is None else Path(options.source).expanduser(), progress)
    elif options.source is not None:
        raise UserError(f"{options.name} has a source of its own: leave out --source")
    else:
        corpus.prepare()
    if options.json:
        print(json.dumps({"folder": str(corpus.folder), "prepared_before": before, **corpus.info()}))
        return
    print(f"{corpus.description} is prepared in {corpus.folder}{' already' if before else ''}")


def _summary(name: str) -> dict[str, Any]:
    cls = CORPORA[name]
    about = cls.facts.about if issubclass(cls, PublishedCorpus) else (cls.__doc__ or "").split("\n")[0]
    try:
        status = "prepared" if _corpus(name).prepared else "not prepared"
    except UserError:
        status = "set its path"
    return {"name": name, "status": status, "about": about}


def _corpus(name: str) -> Corpus:
    if name not in CORPORA:
        raise UserError(f"there is no corpus {name!r}: {nearest(name, list(CORPORA))}")
    cls: Any = CORPORA[name]
    if issubclass(cls, PublishedCorpus | PythonSource):
        corpus: Corpus = cls()
        return corpus
    raise UserError(
        f"{name} is prepared when a run reads it: set {name}.path, as in --set \"{name}.path = 'book.txt'\""
    )


def _text(value: Any) -> str:
    if not isinstance(value, dict):
        return ", ".join(value) if isinstance(value, list) else str(value)
    lines = []
    for key, inner in value.items():
        shown = inner
        if isinstance(inner, dict):
            shown = ", ".join(
                f"{name} {one:,}" if isinstance(one, int) else f"{name} {one}" for name, one in inner.items()
            )
        lines.append(f"{key}: {shown}" if shown else key)
    return "\n".join(lines)


COMMANDS = {"data list": list_command, "data info": info_command, "data prepare": prepare_command}
