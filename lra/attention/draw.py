"""Drawings of who reads whom, from the rule alone: in the terminal and as PNG."""

from __future__ import annotations

import dataclasses
import errno
import os
import string
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra.attention.dense import drawn, reads
from lra.attention.memory import Memory
from lra.attention.pattern import Pattern
from lra.attention.visibility import Visibility
from lra.errors import UserError

WIDE = 32
"""Keys up to which a key is two columns wide; above, a column a key and two queries a line."""

EMPTY, READS_NOT, READS = range(3)
_CELLS = {EMPTY: "  ", READS_NOT: "· ", READS: "██"}
_COLOURS = 20
_LETTERS = string.ascii_letters
_HALVES = {(True, True): "█", (True, False): "▀", (False, True): "▄"}


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Who reads whom.

    Attributes:
        heads: the keys that each query reads, slots of memory first: booleans [H, T, M + T].
        filled: which slots hold something: booleans [M].
        name: what is drawn, where there are several; or "".
        parts: names and numbers of slots of the parts of memory, in order.
        colours: the bucket or cluster of each key: integers [H, M + T], -1 for none; or None.
    """

    heads: np.ndarray
    filled: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, bool))
    name: str = ""
    parts: tuple[tuple[str, int], ...] = ()
    colours: np.ndarray | None = None

    @property
    def borders(self) -> list[int]:
        """Where a part of memory begins, but the first, and where the segment does."""
        return [int(n) for n in np.cumsum([size for _, size in self.parts])]

    def distinct(self) -> list[tuple[str, int]]:
        """Heads that read the same, in the same colours, together: their names, and the first of them."""
        alike: list[list[int]] = []
        drawn = [x for x in (self.heads, self.colours) if x is not None]
        for head in range(len(self.heads)):
            for members in alike:
                if all(np.array_equal(x[head], x[members[0]]) for x in drawn):
                    members.append(head)
                    break
            else:
                alike.append([head])
        if len(alike) == 1:
            return [("all heads", 0)]
        return [(("head " if len(each) == 1 else "heads ") + ", ".join(map(str, each)), each[0]) for each in alike]

    def panels(self) -> list[tuple[str, np.ndarray]]:
        """A heading that counts the pairs, and what is to be painted [T, M + T].

        That is `EMPTY`, `READS_NOT` or `READS`, plus the key's colour and 1, where keys have colours.
        """
        there = np.append(self.filled, np.ones(self.heads.shape[2] - len(self.filled), bool))
        panels = []
        for name, head in self.distinct():
            grid = self.heads[head]
            heading = f"{self.name}, {name}" if self.name else name
            counted = f"{heading}: {int(grid.sum())} of {grid.size} pairs, sparsity {sparsity(grid):.3f}"
            read = READS if self.colours is None else READS + 1 + self.colours[head]
            panels.append((counted, np.where(grid, read, np.where(there, READS_NOT, EMPTY))))
        return panels

    def as_dict(self) -> dict[str, list]:
        """For JSON."""
        filled = {"filled": self.filled.tolist(), "parts": dict(self.parts)} if len(self.filled) else {}
        labels = {} if self.colours is None else {"labels": self.colours.tolist()}
        return filled | labels | {"visible": self.heads.tolist(), "sparsity": [sparsity(grid) for grid in self.heads]}


def sparsity(grid: np.ndarray) -> float:
    """The share of the pairs of a grid [T, S] that are not read, in [0, 1]."""
    return 1 - int(grid.sum()) / grid.size


def once(pattern: Pattern, length: int) -> Drawing:
    """Which of `length` tokens each reads in one layer."""
    return _drawing(pattern, length, length)


def through(layers: Sequence[Pattern], length: int) -> Drawing:
    """Which of `length` tokens reach each one through layers joined by residual connections, by any of their heads."""
    itself = np.eye(length, dtype=np.float32)  # what a residual connection passes on
    steps = {id(pattern): _drawing(pattern, length, length).heads.any(0) + itself for pattern in layers}
    reached = itself
    for pattern in layers:
        reached = np.minimum(steps[id(pattern)] @ reached, 1)
    return Drawing(reached[None] > 0)


def carried(pattern: Pattern, memory: Memory, length: int, segments: int) -> list[Drawing]:
    """A row that goes on from segment to segment of `length` tokens, as its memory fills."""
    drawings, state = [], memory.initial(1, train=True)
    for n in range(segments):
        past = memory.read(state)
        _, slots, width = past.inputs.shape
        drawing = _drawing(pattern, length, slots + length, Visibility().after(past.filled, length, past.positions))
        filled, ends = np.asarray(past.filled)[0], np.cumsum([size for _, size in past.parts])
        counts = [
            f"{int(part.sum())} of {len(part)}" + f" {name}" * (len(past.parts) > 1)
            for (name, _), part in zip(past.parts, np.split(filled, ends[:-1]), strict=True)
        ]
        name = f"segment {n + 1}, {' and '.join(counts)} slots filled"
        drawings.append(dataclasses.replace(drawing, filled=filled, name=name, parts=past.parts))
        state, _, _ = memory.update(state, jnp.zeros((1, length, width), past.inputs.dtype), None, None, False)
    return drawings


def _drawing(pattern: Pattern, queries: int, keys: int, visibility: Visibility | None = None) -> Drawing:
    """Which keys each query reads; patterns that depend on content select of random content."""
    selection = drawn(pattern, queries, keys, jax.random.key(0))
    colours = pattern.colours(selection)
    heads = reads(pattern, queries, keys, visibility, selection)[0]
    return Drawing(heads, colours=None if colours is None else np.asarray(colours)[0].T)


def text(drawings: Sequence[Drawing], title: str) -> str:
    """Drawings in block characters: a row a query, parts of memory left of lines, nothing where a slot is empty.

    The line before the segment is whole, those between parts of memory are broken.
    """
    parts = [title]
    for drawing in drawings:
        lines = ["┊"] * (len(drawing.parts) - 1) + ["│"] * bool(drawing.parts)
        for heading, cells in drawing.panels():
            rows = _wide(cells) if cells.shape[1] <= WIDE else _narrow(cells)
            for border, line in reversed(list(zip(drawing.borders, lines, strict=True))):
                rows = [[*row[:border], line, *row[border:]] for row in rows]
            parts.append("\n".join([heading, *("".join(row).rstrip() for row in rows)]))
    return "\n\n".join(parts)


def _wide(cells: np.ndarray) -> list[list[str]]:
    return [[_CELLS.get(cell) or f"{_letter(cell)} " for cell in row] for row in cells.tolist()]


def _letter(cell: int) -> str:
    """Of a key's colour."""
    return _LETTERS[(cell - READS - 1) % len(_LETTERS)]


def _narrow(cells: np.ndarray) -> list[list[str]]:
    """Two queries a row: the upper and the lower half of a character."""
    cells = np.pad(cells, ((0, len(cells) % 2), (0, 0)), constant_values=EMPTY)

    def character(upper: int, lower: int) -> str:
        return _HALVES.get((upper >= READS, lower >= READS), " " if upper == EMPTY else "·")

    return [[character(*pair) for pair in zip(*pairs, strict=True)] for pairs in cells.reshape(-1, 2, cells.shape[1])]


def png(drawings: Sequence[Drawing], path: Path, title: str, *, columns: int = 4, inches: float = 4.0) -> None:
    """Writes drawings as PNG, a panel for each head that differs; needs the extra `plots`.

    Slots of memory have negative numbers, the newest -1; empty ones are grey; a line stands before the segment, and
    broken ones between parts of memory. The headings of the panels are the
    picture's `Description`.

    Args:
        drawings: at least one. path: the file. title: above all panels.
        columns: panels side by side. inches: width of a panel, in 100 pixels.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    panels = [(drawing.borders, *panel) for drawing in drawings for panel in drawing.panels()]
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    tallest = max(len(cells) / cells.shape[1] for _, _, cells in panels)
    figure = canvas(inches * columns, (0.45 + 0.65 * tallest) * inches * rows)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    font = min(10.0, 3 * inches + 1)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, (borders, heading, cells) in zip(axes, panels, strict=False):
        (length, keys), slots = cells.shape, max(borders, default=0)
        axis.set_facecolor("0.8")  # shows where nothing is painted
        place = {"interpolation": "nearest", "extent": (-slots - 0.5, keys - slots - 0.5, length - 0.5, -0.5)}
        axis.imshow(np.ma.masked_where(cells == EMPTY, cells >= READS), cmap="Blues", vmin=0, vmax=1.3, **place)
        if cells.max() > READS:
            numbers = (cells - READS - 1) % _COLOURS
            axis.imshow(np.ma.masked_where(cells <= READS, numbers), cmap="tab20", vmin=0, vmax=_COLOURS - 1, **place)
        for border in borders:
            style = "-" if border == slots else "--"
            axis.axvline(border - slots - 0.5, color="black", linewidth=1, linestyle=style)
        if keys <= WIDE:
            axis.set_xticks(np.arange(-slots, keys - slots) - 0.5, minor=True)
            axis.set_yticks(np.arange(length) - 0.5, minor=True)
            axis.grid(which="minor", color="0.9", linewidth=0.5)
            axis.tick_params(which="minor", length=0)
        axis.locator_params(integer=True)
        axis.tick_params(labelsize=font)
        axis.set_title(textwrap.fill(heading, int(120 * inches / font)), fontsize=font)
        axis.set_xlabel("key", fontsize=font)
        axis.set_ylabel("query", fontsize=font)
        axis.label_outer()
    figure.suptitle(title, wrap=True)
    save(figure, path, "\n".join(heading for _, heading, _ in panels))


def canvas(width: float, height: float) -> Any:
    """An empty matplotlib figure of that many inches.

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("a PNG needs matplotlib, which is not installed: pip install 'lra[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def check(path: Path) -> None:
    """Raises what `canvas` and `save` would, before the work that is to be drawn."""
    canvas(1, 1)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def save(figure: Any, path: Path, description: str) -> None:
    """Writes a figure as PNG with a `Description`; raises `UserError` where it cannot."""
    try:
        figure.savefig(path, format="png", metadata={"Description": description})
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot write {path} ({error.strerror}): choose another file with --png")
