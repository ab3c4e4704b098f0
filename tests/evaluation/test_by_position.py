"""The score by position in the segment: against loops, and how it is shown."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib import image
from rich.console import Console

from lra.data import Batch
from lra.evaluation import BREAKDOWNS, ByPosition


def test_loops(rng: np.random.Generator) -> None:
    breakdown, sums, counts = begun(7), [0.0] * 7, [0] * 7
    for _ in range(3):
        weights = rng.integers(0, 2, (5, 7)).astype(np.float32)
        weights[:, 3] = 0
        nats = np.where(weights > 0, rng.exponential(2, (5, 7)), np.nan).astype(np.float32)
        breakdown.add(Batch(weights, weights, weights, np.zeros(5, bool)), nats, {})
        for row, column in zip(*np.nonzero(weights), strict=True):
            sums[column], counts[column] = sums[column] + float(nats[row, column]), counts[column] + 1
    shown = json.loads(json.dumps(breakdown.as_dict(), allow_nan=False))
    assert shown["tokens"] == counts
    assert shown["nats_per_token"][3] is None
    del shown["nats_per_token"][3], sums[3], counts[3]
    assert shown["nats_per_token"] == pytest.approx([a / b for a, b in zip(sums, counts, strict=True)], rel=1e-12)
    assert BREAKDOWNS["position"] is ByPosition


@pytest.mark.parametrize(
    ("size", "octaves"),
    [(1, ["0"]), (2, ["0", "1"]), (4, ["0", "1", "2-3"]), (7, ["0", "1", "2-3", "4-6"]), (8, ["0", "1", "2-3", "4-7"])],
)
def test_as_table(size: int, octaves: list[str]) -> None:
    breakdown = begun(size)
    ones = np.ones((2, size), np.float32)
    breakdown.add(Batch(ones, ones, ones, np.zeros(2, bool)), np.tile(np.arange(size), (2, 1)), {})
    console = Console(width=100)
    with console.capture() as capture:
        console.print(breakdown.table())
    rows = [line.split("│")[1:-1] for line in capture.get().splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows] == octaves
    for row, octave in zip(rows, octaves, strict=True):
        first, _, last = octave.partition("-")
        places = np.arange(int(first), int(last or first) + 1)
        assert [cell.strip() for cell in row[1:3]] == [str(2 * places.size), f"{places.mean():.4f}"]


def test_as_png(tmp_path: Path) -> None:
    breakdown = begun(3)
    ones = np.ones((1, 3), np.float32)
    weights = np.asarray([[1, 0, 1]], np.float32)
    breakdown.add(Batch(ones, ones, weights, np.zeros(1, bool)), ones, {})
    breakdown.png(tmp_path / "by.png", "runs/toy at step 3")
    assert image.imread(tmp_path / "by.png").shape[1] > 400
    assert b"By position, runs/toy at step 3" in (tmp_path / "by.png").read_bytes()


def begun(segment: int) -> ByPosition:
    breakdown, protocol = ByPosition(), SimpleNamespace(segment=segment)
    nothing: Any = None
    breakdown.begin(nothing, nothing, protocol, segment)  # type: ignore[arg-type]
    return breakdown
