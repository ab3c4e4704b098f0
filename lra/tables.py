"""What `lra table` prints: published numbers on a corpus beside this project's own runs."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tabulate
from rich import box
from rich.console import Console
from rich.table import Table

from lra.errors import UserError
from lra.evaluation import published
from lra.training import evaluations, folder, record

METRICS = {
    "enwik8": ("bits per byte, bits per character in papers", "bits_per_byte"),
    "text8": ("bits per byte, bits per character in papers", "bits_per_byte"),
    "wikitext103": ("perplexity per word", "perplexity_per_word"),
    "pg19": ("perplexity per word", "perplexity_per_word"),
}
"""What a table shows, and where reports have it."""
TOKENS = {"enwik8": "bytes", "text8": "chars", "wikitext103": "words"}
"""The tokenisation that numbers are compared in; on PG-19 the official word count joins all of them."""
IDS = {"wikitext103": 267_735}
"""Of the vocabularies of words that numbers stand on: with fewer, more words are `<unk>`, which is easy to predict."""
HEADERS = ("system", "parameters", "valid", "test", "protocol", "tokens", "steps", "source", "marks")
FORMATS = ("terminal", "markdown", "csv", "json", "latex")
RUNS = "runs"
_GIVEN = re.compile(r"^words_[0-9a-f]{8} \(")
"""Words of a file."""
_SEED = re.compile(r"^Experiment\.seed = .*\n", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes:
        system: what was trained, or the run.
        parameters: how many, or None.
        valid: scores on the valid split: one, or one a seed.
        test: on the test split.
        protocol: in which context tokens were scored.
        tokens: the tokenisation.
        steps: updates done; None for what is published.
        source: paper, or "this project".
        marks: why the row is not to be compared with others, or what is to be known first.
    """

    system: str
    parameters: int | None
    valid: tuple[float, ...]
    test: tuple[float, ...]
    protocol: str
    tokens: str
    steps: int | None
    source: str
    marks: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The row for JSON: means in "valid" and "test", their standard deviations and how many they are."""
        values: dict[str, Any] = dataclasses.asdict(self) | {"marks": list(self.marks)}
        for split in ("valid", "test"):
            scores = values[split]
            values[split] = statistics.fmean(scores) if scores else None
            values[f"{split}_spread"] = statistics.stdev(scores) if len(scores) > 1 else None
            values[f"{split}_seeds"] = len(scores)
        return values

    def cells(self) -> list[str]:
        """The row as text."""
        parameters = "" if self.parameters is None else f"{self.parameters:,}"
        steps = "" if self.steps is None else f"{self.steps:,}"
        scores = [_shown(scores, self.steps is None) for scores in (self.valid, self.test)]
        return [self.system, parameters, *scores, self.protocol, self.tokens, steps, self.source, "; ".join(self.marks)]


def rows(name: str, root: Path, *, everything: bool = False) -> list[Row]:
    """The published rows, then this project's.

    Args:
        name: of `METRICS`.
        root: folder of the runs, which need not exist.
        everything: whether ablations and numbers that one paper repeats from another are shown too.
    """
    return [*_published(name, everything), *_runs(name, root)]


def _published(name: str, everything: bool) -> list[Row]:
    groups: dict[tuple[Any, ...], list[published.Published]] = defaultdict(list)
    for one in published.read(name):
        if everything or one.kind == "result":
            groups[one.system, one.configuration, one.paper, one.kind].append(one)
    found = []
    for (system, configuration, paper, kind), group in groups.items():
        first = group[0]
        marks = [] if all(one.verified for one in group) else ["unverified: from memory"]
        marks += [f"{one.split}: {one.value:g}" for one in group if one.split not in ("valid", "test")]
        marks += _marks(name, first.tokenisation, first.selection)
        marks += [kind] if kind != "result" else []
        marks += list(dict.fromkeys(one.note for one in group if one.note))
        values = {split: tuple(one.value for one in group if one.split == split) for split in ("valid", "test")}
        if any(len(scores) > 1 for scores in values.values()):
            raise ValueError(f"{name}.json has {system} {configuration} of {paper} twice: name them apart")
        sizes = [one.parameters for one in group if one.parameters is not None]
        found.append(
            Row(
                f"{system}, {configuration}" if configuration not in ("", "-") else system, sizes[0] if sizes else None,
                values["valid"], values["test"], first.protocol, first.tokenisation, None, paper, tuple(marks),
            )
        )  # fmt: skip
    return found


def _runs(name: str, root: Path) -> list[Row]:
    """A row for each configuration, protocol and kind of weights; runs that differ by their seed alone share one.

    A run counts once, however many reports of one kind it has.
    """
    groups: dict[tuple[Any, ...], dict[str, dict[Path, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for run in record.runs(root):
        config = _SEED.sub("", (run / folder.CONFIG).read_text(encoding="utf-8", errors="replace"))
        for report in evaluations.read(run):
            if report["corpus"] in (name, f"{name}_head"):
                kind = tuple(report[part] for part in ("corpus", "protocol", "weights", "step", "tokenisation"))
                partial = report["tokens_scored"] if report["partial"] else None
                groups[(*kind, partial), config][report["split"]][run] = report
    found = []
    for ((corpus, protocol, weights, step, tokenisation, partial), _), splits in groups.items():
        reports = [report for split in splits.values() for report in split.values()]
        marks = [f"{corpus}, not {name}"] if corpus != name else []
        marks += [f"partial: the first {partial:,} tokens of a split only"] if partial else []
        tokens, ids = _GIVEN.sub("words (", tokenisation).removesuffix(" ids)").split(" (")
        marks += _marks(name, tokens, any(report["causality"] == "selection" for report in reports))
        if tokens == "words" and int(ids) != IDS.get(name, int(ids)):
            marks.append(f"{int(ids):,} words instead of {IDS[name]:,}")
        marks += ["moving average of the parameters"] if weights == "ema" else []
        runs = list(dict.fromkeys(str(run) for split in splits.values() for run in split))
        valid, test = (
            _known(_score(name, report) for report in splits.get(split, {}).values()) for split in ("valid", "test")
        )
        found.append(
            Row(
                runs[0] if len(runs) == 1 else f"{runs[0]} and {len(runs) - 1} more",
                reports[0]["parameters"], valid, test, protocol, tokenisation, step, "this project", tuple(marks),
            )
        )  # fmt: skip
    return found


def _score(name: str, report: dict[str, Any]) -> float | None:
    """The table's metric; of a part of a split only where a word is a token."""
    score: float | None = report[METRICS[name][1]]
    if score is None and _GIVEN.sub("words (", report["tokenisation"]).startswith("words ("):
        score = report["perplexity"]
    return score


def _known(scores: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(score for score in scores if score is not None)


def _marks(name: str, tokens: str, selection: bool) -> list[str]:
    marks = []
    if name in TOKENS and tokens == "not stated":
        marks.append("tokenisation not stated")
    elif name in TOKENS and tokens != TOKENS[name]:
        marks.append(f"other tokenisation than {TOKENS[name]}")
    if selection:
        marks.append("selection reads the future")
    return marks


def _shown(scores: Sequence[float], printed: bool) -> str:
    if not scores:
        return ""
    if printed:
        return str(scores[0])
    mean = f"{statistics.fmean(scores):.4f}"
    return mean if len(scores) == 1 else f"{mean} ± {statistics.stdev(scores):.4f} ({len(scores)} seeds)"


def terminal(found: Sequence[Row], name: str) -> tuple[Table, list[str]]:
    """The table to print with rich, and the marks that its last column numbers; runs are bold."""
    table = Table(title=f"{name}: {METRICS[name][0]}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in HEADERS:  # a number that is cut is a wrong number
        table.add_column(header, overflow="fold", no_wrap=header in ("parameters", "valid", "test", "steps"))
    marks = {mark: number for number, mark in enumerate(dict.fromkeys(mark for row in found for mark in row.marks), 1)}
    for row in found:
        numbers = ", ".join(str(marks[mark]) for mark in row.marks)
        table.add_row(*row.cells()[:-1], numbers, style="bold" if row.steps is not None else None)
    return table, [f"{number}: {mark}" for mark, number in marks.items()]


def text(found: Sequence[Row], form: str) -> str:
    """The table as "markdown", "latex" or "csv"."""
    cells = [row.cells() for row in found]
    if form == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([HEADERS, *cells])
        return out.getvalue()
    style = {"markdown": "github", "latex": "latex_booktabs"}[form]
    return tabulate.tabulate(cells, HEADERS, tablefmt=style, disable_numparse=True) + "\n"


def command(options: argparse.Namespace) -> None:
    """`lra table`: published numbers beside this project's runs."""
    root = Path(options.runs)
    if options.runs != RUNS and not root.is_dir():
        raise UserError(f"there is no folder {root}: name one that holds runs with --runs")
    form = "json" if options.json else options.format
    found = rows(options.name, root, everything=options.all)
    if form == "json":
        print(
            json.dumps({"name": options.name, "metric": METRICS[options.name][0], "rows": [r.as_dict() for r in found]})
        )
    elif form == "terminal":
        console = Console()
        table, marks = terminal(found, options.name)
        console.print(table)
        console.print("\n".join(marks), markup=False, highlight=False, soft_wrap=True)
    else:
        print(text(found, form), end="")


COMMANDS = {"table": command}
