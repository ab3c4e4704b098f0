"""Published results as data: what papers, released code and secondary sources print for a corpus."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources

NAMES = ("enwik8", "text8", "wikitext103", "pg19")


@dataclasses.dataclass(frozen=True)
class Published:
    """One number as it was printed.

    Attributes:
        system: what was trained.
        configuration: which one, as the source calls it.
        paper: authors, year, arXiv number.
        split: "test", "valid", a part of it, or "not stated".
        metric: "bits per character", "perplexity" (per token) or "perplexity per word".
        value: the number.
        parameters: as printed, or None.
        approximate: whether the source gives the parameters with a "~".
        verified: whether the number was read in a source; else it is from memory and no threshold for anything.
        source: where it was read.
        protocol: in which context tokens were scored, or "not stated".
        tokenisation: by a vocabulary's name where this project has it, or "not stated".
        selection: whether content selects the keys so that later tokens can change which earlier ones are read.
        kind: "result", "ablation", or "comparator" for a row that repeats another paper's number.
        note: misprints, conflicts between sources, spreads.
    """

    system: str
    configuration: str
    paper: str
    split: str
    metric: str
    value: float
    parameters: int | None
    approximate: bool
    verified: bool
    source: str
    protocol: str
    tokenisation: str
    selection: bool
    kind: str
    note: str | None


def read(name: str) -> list[Published]:
    """Returns the published numbers on a corpus, in the order of their papers.

    Args:
        name: one of `NAMES`.

    Example:
        >>> from lra.evaluation import published
        >>> [row.value for row in published.read("enwik8") if row.system == "Reformer"]
        [1.19, 1.05]
    """
    text = (resources.files(__name__) / f"{name}.json").read_text(encoding="utf-8")
    return [Published(**row) for row in json.loads(text)]
