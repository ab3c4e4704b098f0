"""Drawings: golden texts, heads that are drawn together, layers, memory, and the pixels of a PNG."""

import functools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import (
    LSH,
    PATTERNS,
    BlockLocal,
    Fixed,
    Full,
    Heads,
    Memory,
    Recurrence,
    Site,
    SlidingWindow,
    Strided,
    dense,
    draw,
)
from lra.attention.memory import Remembered
from lra.cli import main
from lra.errors import UserError
from tests.attention.figures import FIGURES, grids

GOLDEN = Path(__file__).parent / "golden"
PUBLISHED = """\
██· · · · · · · ·
████· · · · · · ·
██████· · · · · ·
████████· · · · ·
· ████████· · · ·
· · ████████· · ·
██· · ████████· ·
· ██· · ████████·
· · ██· · ████████"""
"""The strided pattern of stride 3 on 9 tokens: the last three, and every third (Child et al. 2019, figure 3)."""
DILATED = """\
██· · · · · · ·
· ██· · · · · ·
· · ██· · · · ·
██· · ██· · · ·
· ██· · ██· · ·
· · ██· · ██· ·
██· · ██· · ██·
· ██· · ██· · ██"""


def site(num_heads: int = 2, causal: bool = True) -> Site:
    return Site(num_heads=num_heads, causal=causal)


def bare(drawing: draw.Drawing) -> str:
    """The text of the only panel, without heading."""
    _, panel = draw.text([drawing], "").split("\n\n")
    return panel.split("\n", 1)[1]


@pytest.mark.parametrize("name", PATTERNS)
def test_golden_drawings(name, capsys):
    """The files are what `lra attention show NAME --length 12` prints, example by example, form by form."""
    drawn = []
    for n in range(len(PATTERNS[name].examples())):
        for flag in ((), ("--bidirectional",)):
            if main(["attention", "show", name, "--length", "12", "--example", str(n), *flag]) == 0:
                drawn.append(capsys.readouterr().out)
    golden = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert "\n".join(drawn) == golden, "what is drawn has changed: see CONTRIBUTING.md, 'Adding a pattern'"


@pytest.mark.parametrize("name", PATTERNS)
def test_golden_drawings_are_the_figures_worked_out_by_hand(name):
    figures = [figure for (known, _, _), figure in FIGURES.items() if known == name]
    forms = [form for known, _, form in FIGURES if known == name]
    made = lambda arguments, form: PATTERNS[name](**arguments, site=site(3, form == "causal"), rngs=nnx.Rngs(0))  # noqa: E731
    blocks = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n").split("\n\n")
    seen: list[dict[int, list[list[bool]]]] = []
    for block in blocks:
        heading, *rows = block.split("\n")
        if not rows:
            assert heading.endswith(f", {forms[len(seen)]}")
            seen.append({})
            continue
        grid = [[row[2 * s : 2 * s + 2].strip() not in ("", "·") for s in range(12)] for row in rows]
        heads, pairs, share = re.fullmatch(r"(.+): (\d+) of 144 pairs, sparsity (.+)", heading).groups()
        assert int(pairs) == sum(map(sum, grid))
        assert float(share) == pytest.approx(1 - int(pairs) / 144, abs=5e-4)
        numbers = range(3) if heads == "all heads" else map(int, re.findall(r"\d+", heads))
        seen[-1] |= dict.fromkeys(numbers, grid)
    chosen = [
        dense.drawn(made(PATTERNS[name].examples()[n], form), 12, 12, jax.random.key(0))
        for known, n, form in FIGURES
        if known == name
    ]
    want = [grids(figure, 12, 12, each) for figure, each in zip(figures, chosen, strict=True)]
    assert seen == [dict(enumerate(each)) for each in want]


def test_text() -> None:
    dilated = draw.once(SlidingWindow(window=3, dilation=3, site=site(), rngs=None), 8)
    assert dilated.heads.shape == (2, 8, 8)
    assert draw.text([dilated], "a title") == f"a title\n\nall heads: 15 of 64 pairs, sparsity 0.766\n{DILATED}"


def test_the_published_strided_figure_is_both_parts_or_one_of_them_each():
    both, local, column = (draw.once(Strided(stride=3, part=part, site=site(), rngs=None), 9)
                           for part in ("both", "local", "column"))  # fmt: skip
    assert bare(both) == PUBLISHED
    np.testing.assert_array_equal(both.heads, local.heads | column.heads)
    np.testing.assert_array_equal(local.heads & column.heads, np.broadcast_to(np.eye(9, dtype=bool), (2, 9, 9)))


def test_long_drawings_have_two_queries_a_line(monkeypatch):
    monkeypatch.setattr(draw, "WIDE", 4)
    assert bare(draw.once(SlidingWindow(window=2, site=site(), rngs=None), 4)).startswith("██· · ·\n████")
    assert bare(draw.once(SlidingWindow(window=2, site=site(), rngs=None), 5)) == "█▄···\n·▀█▄·\n···▀▀"
    assert bare(draw.once(Strided(stride=2, part="column", site=site(), rngs=None), 5)) == "▀▄···\n▀▄▀▄·\n▀·▀·▀"


def test_64_tokens_fit_a_terminal():
    lines = draw.text([draw.once(Full(site=site(), rngs=None), 64)], "full").splitlines()[2:]
    assert len(lines) == 33
    assert max(map(len, lines)) == 64


@pytest.mark.parametrize("length", [1, 2, 3, 7, 13])
def test_sparsity_counts_the_pairs_that_there_are(length):
    def of(cls, causal, **arguments):
        drawing = draw.once(cls(**arguments, site=site(causal=causal), rngs=None), length)
        assert drawing.distinct() == [("all heads", 0)]
        return draw.sparsity(drawing.heads[0])

    assert of(Full, causal=False) == 0
    assert of(BlockLocal, causal=False, block=40) == 0  # a block longer than the row is no more than the row
    assert of(BlockLocal, causal=True, block=40) == 1 - length * (length + 1) / 2 / length**2
    assert of(SlidingWindow, causal=True, window=1) == 1 - 1 / length


def test_keys_have_the_letters_of_their_buckets_and_other_heads_none() -> None:
    hashed = functools.partial(LSH, chunk=4, buckets=4, rounds=2)
    pattern = Heads(groups=((1, hashed), (1, Full)), site=site(2), rngs=nnx.Rngs(0))
    drawing = draw.once(pattern, 9)
    buckets = np.asarray(dense.drawn(pattern, 9, 9, jax.random.key(0))[0])[0, :, 0, 0]
    np.testing.assert_array_equal(drawing.colours, [buckets, np.full(9, -1)])
    assert drawing.as_dict()["labels"] == drawing.colours.tolist()
    _, one, two = draw.text([drawing], "").split("\n\n")
    rows = [[row[2 * s : 2 * s + 2].strip() for s in range(9)] for row in one.split("\n")[1:]]
    want = [["abcd"[buckets[s]] if read else "·" for s, read in enumerate(row)] for row in drawing.heads[0]]
    assert rows == want
    assert two.split("\n")[1].startswith("██· ·")


def test_heads_that_read_the_same_are_drawn_once() -> None:
    near = functools.partial(SlidingWindow, window=2)
    pattern = Heads(groups=((1, near), (2, Full), (1, near)), site=site(4), rngs=None)
    drawing = draw.once(pattern, 5)
    parts = drawing.distinct()
    assert parts == [("heads 0, 3", 0), ("heads 1, 2", 1)]
    np.testing.assert_array_equal(drawing.heads[0], np.tri(5, dtype=bool) & ~np.tri(5, k=-2, dtype=bool))
    np.testing.assert_array_equal(drawing.heads[1], np.tri(5, dtype=bool))
    assert [name for name, _ in draw.Drawing(drawing.heads[:2]).distinct()] == ["head 0", "head 1"]
    assert [name for name, _ in draw.Drawing(drawing.heads[1:3]).distinct()] == ["all heads"]


# layers


def reached(length, *layers):
    return draw.through([cls(**arguments, site=site(), rngs=None) for cls, arguments in layers], length).heads[0]


def strided(stride, part):
    return Strided, {"stride": stride, "part": part}


def fixed(block, part):
    return Fixed, {"block": block, "summary": 1, "part": part}


@pytest.mark.parametrize(("window", "layers"), [(1, 3), (3, 1), (3, 4), (4, 2)])
def test_the_reach_of_a_window_is_layers_times_window_minus_one(window, layers):
    grid = reached(19, *[(SlidingWindow, {"window": window})] * layers)
    reach = layers * (window - 1)
    want = [[0 <= p - s <= reach for s in range(19)] for p in range(19)]
    np.testing.assert_array_equal(grid, want)


@pytest.mark.parametrize("length", [1, 5, 12, 16, 23])
def test_strided_reaches_everything_in_two_layers_in_either_order(length):
    everything = np.tri(length, dtype=bool)
    for stride in (1, 3, 4, 30):
        near, far = strided(stride, "local"), strided(stride, "column")
        np.testing.assert_array_equal(reached(length, near, far), everything)
        np.testing.assert_array_equal(reached(length, far, near), everything)
        if stride > 1 and length > 2 * stride - 1:
            assert not np.array_equal(reached(length, near, near), everything)
            assert not np.array_equal(reached(length, far, far), everything)


@pytest.mark.parametrize("length", [9, 12, 23])
def test_fixed_reaches_everything_in_two_layers_only_as_own_block_then_summary(length):
    own, summary, everything = fixed(4, "local"), fixed(4, "summary"), np.tri(length, dtype=bool)
    np.testing.assert_array_equal(reached(length, own, summary), everything)
    # In the other order what is read of other blocks is their ends alone.
    ends = [[s <= p and (s // 4 == p // 4 or s % 4 == 3) for s in range(length)] for p in range(length)]
    np.testing.assert_array_equal(reached(length, summary, own), ends)
    assert not np.array_equal(ends, everything)


def test_all_heads_of_a_layer_pass_on_what_they_read():
    near, far = functools.partial(SlidingWindow, window=2), functools.partial(SlidingWindow, window=2, dilation=7)
    one = (Heads, {"groups": ((1, near), (1, far))})
    assert np.flatnonzero(reached(16, one, one)[15]).tolist() == [1, 7, 8, 13, 14, 15]


# memory

CARRIED = """\
window

segment 1, 0 of 3 slots filled, all heads: 3 of 10 pairs, sparsity 0.700
      │██·
      │████

segment 2, 2 of 3 slots filled, all heads: 6 of 10 pairs, sparsity 0.400
  ████│██·
  · ██│████

segment 3, 3 of 3 slots filled, all heads: 6 of 10 pairs, sparsity 0.400
· ████│██·
· · ██│████"""


def test_memory_is_drawn_as_it_fills():
    memory = Recurrence(length=3, width=4, rngs=nnx.Rngs(0))
    drawings = draw.carried(SlidingWindow(window=3, site=site(), rngs=None), memory, length=2, segments=3)
    assert draw.text(drawings, "window") == CARRIED
    assert [drawing.as_dict()["filled"] for drawing in drawings] == [[False] * 3, [False, True, True], [True] * 3]
    assert drawings[1].as_dict()["visible"][0] == [[False, True, True, True, False], [False, False, True, True, True]]


class Summaries(Memory):
    """Two slots for the first segment, one for each that follows, from the first slot on."""

    def initial(self, batch, train, dtype=jnp.float32, length=None):
        return jnp.zeros((batch,), jnp.int32)

    def read(self, state):
        filled = jnp.arange(4, dtype=jnp.int32) < state[:, None]
        return Remembered(jnp.zeros((len(state), 4, 6)), filled, (("far", 1), ("near", 3)))

    def update(self, state, layer_inputs, valid, attention, train):
        assert layer_inputs.shape == (1, 2, 6)
        return jnp.where(state == 0, 2, state + 1), {}, {}

    def describe(self, train, length=None):
        return "summaries"


def test_any_memory_is_drawn(monkeypatch):
    monkeypatch.setattr(draw, "WIDE", 5)
    drawings = draw.carried(Full(site=site(), rngs=None), Summaries(), length=2, segments=3)
    rows = [panel.split("\n")[1:] for panel in draw.text(drawings, "").split("\n\n")[1:]]
    assert rows == [[" ┊   │█▄"], ["█┊█  │█▄"], ["█┊██ │█▄"]]
    assert drawings[2].name == "segment 3, 1 of 1 far and 2 of 3 near slots filled"
    assert drawings[1].as_dict()["parts"] == {"far": 1, "near": 3}


# PNG


def is_read(pixels):
    """Whether a pixel has the blue of a pair that is read."""
    return pixels[..., 2] - pixels[..., 0] > 0.5


def middles(pixels, rows, columns):
    """The colours [rows, columns, 3] in the middle of each cell of the one panel, whose outer cells are read."""
    vertical, horizontal = np.nonzero(is_read(pixels))
    box = pixels[vertical.min() : vertical.max() + 1, horizontal.min() : horizontal.max() + 1, :3]
    down, right = ((np.arange(n) + 0.5) * size / n for n, size in ((rows, len(box)), (columns, box.shape[1])))
    return box[down.astype(int)][:, right.astype(int)]


def test_png(tmp_path) -> None:
    image = pytest.importorskip("matplotlib.image")
    one, two, five = tmp_path / "one.png", tmp_path / "two.drawing", tmp_path / "five.png"
    grid = np.tri(8, dtype=bool)
    draw.png([draw.Drawing(grid[None])], one, "full")
    draw.png([draw.Drawing(np.stack([grid, np.eye(8, dtype=bool)]))], two, "heads")
    draw.png([draw.Drawing(grid[None], name=str(n)) for n in range(5)], five, "five", columns=3, inches=2)
    assert one.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels, wide, rows = image.imread(one), image.imread(two, format="png"), image.imread(five)
    assert wide.shape == (pixels.shape[0], 2 * pixels.shape[1], 4)
    assert rows.shape == (pixels.shape[0], 3 * pixels.shape[1] // 2, 4)
    np.testing.assert_array_equal(is_read(middles(pixels, 8, 8)), grid)


def test_png_of_memory(tmp_path) -> None:
    image, pil = pytest.importorskip("matplotlib.image"), pytest.importorskip("PIL.Image")
    heads = np.array([[[True, False, False, True], [True, False, True, True]]])
    path = tmp_path / "memory.png"
    parts = (("far", 1), ("near", 1))
    draw.png([draw.Drawing(heads, np.array([True, False]), "segment 2", parts)], path, "memory")
    colours = middles(image.imread(path), 2, 4)
    np.testing.assert_array_equal(is_read(colours), heads[0])
    grey = np.abs(colours - 0.8).max(-1) < 0.01  # an empty slot
    np.testing.assert_array_equal(grey, [[False, True, False, False]] * 2)
    with pil.open(path) as picture:
        assert picture.text["Description"] == "segment 2, all heads: 5 of 8 pairs, sparsity 0.375"


def test_mistakes(tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    drawings = [draw.Drawing(np.ones((1, 2, 2), bool))]
    with pytest.raises(UserError, match=r"cannot write .*No such file or directory.*--png"):
        draw.png(drawings, tmp_path / "missing" / "a.png", "full")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"matplotlib, which is not installed: pip install 'lra\[plots\]'"):
        draw.png(drawings, tmp_path / "a.png", "full")
    assert not list(tmp_path.iterdir())
