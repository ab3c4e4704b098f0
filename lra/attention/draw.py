"""Drawings of who reads whom, from the rule alone: in the terminal and as PNG."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lra.attention.dense import reads
from lra.attention.pattern import Pattern
from lra.errors import UserError

READS, READS_NOT = "██", "· "


def grids(pattern: Pattern, length: int) -> np.ndarray:
    """Which keys each query reads among `length` tokens: booleans [H, T, T]."""
    return reads(pattern, length, length)[0]


def distinct(heads: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Heads [H, T, S] that read the same, together: ("heads 0-3", [T, S]) pairs."""
    groups: list[tuple[list[int], np.ndarray]] = []
    for head, grid in enumerate(heads):
        for members, known in groups:
            if np.array_equal(known, grid):
                members.append(head)
                break
        else:
            groups.append(([head], grid))
    if len(groups) == 1:
        return [("all heads", groups[0][1])]
    return [
        (("head " if len(members) == 1 else "heads ") + ", ".join(map(str, members)), grid) for members, grid in groups
    ]


def text(grid: np.ndarray) -> str:
    """A grid [T, S] in block characters: a row a query, two columns a key."""
    return "\n".join("".join(READS if cell else READS_NOT for cell in row).rstrip() for row in grid)


def png(heads: np.ndarray, path: Path, title: str) -> None:
    """Writes the drawing of heads [H, T, S] as PNG; needs the extra `plots`.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("a PNG needs matplotlib, which is not installed: pip install 'lra[plots]'") from error
    parts = distinct(heads)
    figure = Figure(figsize=(4 * len(parts), 4.4), layout="constrained")
    axes = figure.subplots(1, len(parts), squeeze=False)[0]
    for axis, (name, grid) in zip(axes, parts, strict=True):
        axis.imshow(grid, cmap="Blues", vmin=0, vmax=1.3, interpolation="nearest")
        axis.set(title=name, xlabel="key", ylabel="query")
    figure.suptitle(title, wrap=True)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another file with --png") from error
