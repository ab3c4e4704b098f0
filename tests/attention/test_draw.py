"""Drawings: a golden text, heads that are drawn together, and the pixels of a PNG."""

import functools
import sys

import numpy as np
import pytest

from lra.attention import Full, Heads, Site, SlidingWindow, draw
from lra.errors import UserError

DILATED = """\
██· · · · · · ·
· ██· · · · · ·
· · ██· · · · ·
██· · ██· · · ·
· ██· · ██· · ·
· · ██· · ██· ·
██· · ██· · ██·
· ██· · ██· · ██"""


def site(num_heads: int = 2) -> Site:
    return Site(num_heads=num_heads)


def test_text() -> None:
    pattern = SlidingWindow(window=3, dilation=3, site=site(), rngs=None)
    grids = draw.grids(pattern, 8)
    assert grids.shape == (2, 8, 8)
    assert [draw.text(grid) for grid in grids] == [DILATED, DILATED]


def test_heads_that_read_the_same_are_drawn_once() -> None:
    near = functools.partial(SlidingWindow, window=2)
    pattern = Heads(groups=((1, near), (2, Full), (1, near)), site=site(4), rngs=None)
    parts = draw.distinct(draw.grids(pattern, 5))
    assert [name for name, _ in parts] == ["heads 0, 3", "heads 1, 2"]
    np.testing.assert_array_equal(parts[0][1], np.tri(5, dtype=bool) & ~np.tri(5, k=-2, dtype=bool))
    np.testing.assert_array_equal(parts[1][1], np.tri(5, dtype=bool))
    assert [name for name, _ in draw.distinct(draw.grids(pattern, 5)[:2])] == ["head 0", "head 1"]
    assert [name for name, _ in draw.distinct(draw.grids(pattern, 5)[1:3])] == ["all heads"]


def test_png(tmp_path) -> None:
    image = pytest.importorskip("matplotlib.image")
    one, two = tmp_path / "one.png", tmp_path / "two.drawing"
    grid = np.tri(8, dtype=bool)
    draw.png(grid[None], one, "full")
    draw.png(np.stack([grid, np.eye(8, dtype=bool)]), two, "heads")
    assert one.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels, wide = image.imread(one), image.imread(two, format="png")
    assert wide.shape[1] == 2 * pixels.shape[1]
    read = (pixels[..., 2] - pixels[..., 0] > 0.5).astype(float)  # the blue of a pair that is read
    rows, columns = np.nonzero(read)
    box = read[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    cells = [
        [box[int((i + 0.5) * len(box) / 8), int((j + 0.5) * box.shape[1] / 8)] for j in range(8)] for i in range(8)
    ]
    np.testing.assert_array_equal(cells, grid)


def test_mistakes(tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    grid = np.ones((1, 2, 2), bool)
    with pytest.raises(UserError, match=r"cannot write .*No such file or directory.*--png"):
        draw.png(grid, tmp_path / "missing" / "a.png", "full")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"matplotlib, which is not installed: pip install 'lra\[plots\]'"):
        draw.png(grid, tmp_path / "a.png", "full")
    assert not list(tmp_path.iterdir())
