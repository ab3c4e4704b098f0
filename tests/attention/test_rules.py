"""Who reads whom, against sets written out by hand: nothing here uses the library's own rules."""

import functools

import numpy as np
import pytest

from lra.attention import Entry, Full, Heads, Site, SlidingWindow, dense
from lra.attention.heads import HeadsRule

window = functools.partial(functools.partial, SlidingWindow)
near, far = window(window=3), window(window=2, dilation=5)
# For every head: the keys that the query at p reads, of which those in 0..16 exist. Queries are 5..16.
GOLDEN = {
    "full": (Full, True, [lambda p: {*range(p + 1)}]),
    "full, bidirectional": (Full, False, [lambda p: {*range(17)}]),
    "window 4": (window(window=4), True, [lambda p: {p, p - 1, p - 2, p - 3}]),
    "window 1": (window(window=1), True, [lambda p: {p}]),
    "window 40": (window(window=40), True, [lambda p: {*range(p + 1)}]),
    "dilated": (window(window=3, dilation=3), True, [lambda p: {p, p - 3, p - 6}]),
    "right": (window(window=2, window_right=3), False, [lambda p: {p - 1, p, p + 1, p + 2, p + 3}]),
    "right, dilated": (window(window=2, window_right=1, dilation=4), False, [lambda p: {p - 4, p, p + 4}]),
    "heads": (
        functools.partial(Heads, groups=((1, near), (2, far))), True,
        [lambda p: {p, p - 1, p - 2}, lambda p: {p, p - 5}, lambda p: {p, p - 5}],
    ),
    "heads with full": (
        functools.partial(Heads, groups=((2, Full), (1, near))), False,
        [lambda p: {*range(17)}, lambda p: {*range(17)}, lambda p: {p, p - 1, p - 2}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_grids(name):
    """The rule, and what the blocks really read: with equal scores the output is the share of every key."""
    make, causal, heads = GOLDEN[name]
    pattern = make(site=Site(num_heads=len(heads), causal=causal), rngs=None)
    want = np.array([[[s in reads(p) for s in range(17)] for p in range(5, 17)] for reads in heads])
    np.testing.assert_array_equal(dense.visible(pattern, 12, 17)[0], want)
    q, k = np.zeros((1, 12, len(heads), 4), np.float32), np.zeros((1, 17, len(heads), 4), np.float32)
    v = np.broadcast_to(np.eye(17, dtype=np.float32)[None, :, None], (1, 17, len(heads), 17))
    shares = np.moveaxis(np.asarray(pattern(q, k, v).out[0]), 1, 0)
    np.testing.assert_allclose(shares, want / want.sum(-1, keepdims=True), rtol=1e-6)


def test_groups_of_heads_see_their_own_numbers_and_labels():
    """In each group heads count from 0, and a label is found under its own name."""

    def rule(q, k):
        return (q.position - k.position == q.head) & (q.labels["mark"] == k.labels["mark"])

    heads, marks = np.arange(5)[:, None, None], {"0.mark": np.arange(6) * 0, "1.mark": np.arange(6) % 2}
    q = Entry(np.arange(6)[:, None], heads, {name: mark[:, None] for name, mark in marks.items()})
    got = HeadsRule((rule, rule), (0, 2, 5))(q, Entry(np.arange(6), heads, marks))
    own, previous, second = (np.eye(6, k=-n) for n in range(3))
    np.testing.assert_array_equal(got, [own, previous, own, 0 * previous, second])
