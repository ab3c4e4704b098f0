"""Who reads whom, against sets written out by hand: nothing here uses the library's own rules."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from lra.attention import EXAMPLE_HEADS, PATTERNS, Entry, Fixed, Pattern, Site, SlidingWindow, dense
from lra.attention.heads import HeadsRule
from tests.attention.figures import FIGURES, grids, past


def example(name, number, form):
    arguments = PATTERNS[name].examples()[number]
    figure = FIGURES[name, number, form]
    heads = EXAMPLE_HEADS if callable(figure) else len(figure)
    return PATTERNS[name](**arguments, site=Site(num_heads=heads, causal=form == "causal"), rngs=nnx.Rngs(0))


MORE = {
    "window 1": (SlidingWindow, {"window": 1}, True, lambda p, n: {p}),
    "window 40": (SlidingWindow, {"window": 40}, True, lambda p, n: {*range(p + 1)}),
    "right, dilated": (
        SlidingWindow, {"window": 2, "window_right": 1, "dilation": 4}, False, lambda p, n: {p - 4, p, p + 4},
    ),
    "own block": (
        Fixed, {"block": 4, "summary": 4, "part": "local"}, True, lambda p, n: past(p, range(p // 4 * 4, p + 1)),
    ),
    "one block": (Fixed, {"block": 40, "summary": 3}, True, lambda p, n: {*range(p + 1)}),
}  # fmt: skip
GOLDEN = {f"{name} {n} {form}": (functools.partial(example, name, n, form), figure)
          for (name, n, form), figure in FIGURES.items()} | {
    name: (functools.partial(cls, **arguments, site=Site(causal=causal), rngs=nnx.Rngs(0)), [figure])
    for name, (cls, arguments, causal, figure) in MORE.items()
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_grids(name):
    """The rule, and what the blocks really read: with equal scores the output is the share of every key."""
    make, figure = GOLDEN[name]
    pattern = make()
    selection = dense.drawn(pattern, 12, 17, jax.random.key(0))
    want = np.array(grids(figure, 12, 17, selection))
    np.testing.assert_array_equal(dense.reads(pattern, 12, 17, selection=selection)[0], want)
    if type(pattern).summarise is not Pattern.summarise or pattern.combination != "union":
        return  # what is read is no mean of the values: the contract suite compares it
    heads = pattern.num_heads
    q, k = np.zeros((1, 12, heads, 4), np.float32), np.zeros((1, 17, heads, 4), np.float32)
    v = np.broadcast_to(np.eye(17, dtype=np.float32)[None, :, None], (1, 17, heads, 17))
    shares = np.moveaxis(np.asarray(pattern(q, k, v, selection=selection).out[0]), 1, 0)
    if pattern.own_terms:  # soft weights: the contract suite compares them
        np.testing.assert_array_equal(shares > 0, want)
        return
    np.testing.assert_allclose(shares, want / np.maximum(want.sum(-1, keepdims=True), 1), rtol=1e-6)


@pytest.mark.parametrize("name", PATTERNS)
def test_every_example_has_a_figure(name):
    forms = {(n, form) for known, n, form in FIGURES if known == name}
    assert {n for n, _ in forms} == {*range(len(PATTERNS[name].examples()))}
    for n in range(len(PATTERNS[name].examples())):
        for form in ("causal", "bidirectional"):
            site = Site(num_heads=3, causal=form == "causal")
            if (n, form) in forms:
                continue
            with pytest.raises(ValueError, match=r"no \w+ form|window_right"):  # or it wants a figure in figures.py
                PATTERNS[name](**PATTERNS[name].examples()[n], site=site, rngs=nnx.Rngs(0))


def test_groups_of_heads_see_their_own_numbers_and_labels():
    """In each group heads count from 0, and a label is found under its own name."""

    def rule(q, k):
        return (q.position - k.position == q.head) & (q.labels["mark"] == k.labels["mark"])

    heads, marks = np.arange(5)[:, None, None], {"0.mark": np.arange(6) * 0, "1.mark": np.arange(6) % 2}
    q = Entry(np.arange(6)[:, None], heads, {name: mark[:, None] for name, mark in marks.items()})
    got = HeadsRule((rule, rule), (0, 2, 5))(q, Entry(np.arange(6), heads, marks))
    own, previous, second = (np.eye(6, k=-n) for n in range(3))
    np.testing.assert_array_equal(got, [own, previous, own, 0 * previous, second])
