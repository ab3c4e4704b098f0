"""The number of pairs that a rule allows, counted without the grid, against the grid."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from lra.attention import Full, Heads, Site, SlidingWindow, dense
from tests.attention import cases


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("name", "example"), cases.PATTERN_EXAMPLES)
@pytest.mark.parametrize(("queries", "keys"), [(37, 37), (131, 149)])
def test_pairs_are_those_of_the_grid(name, example, causal, queries, keys):
    pattern = cases.make(name, example, causal=causal)
    if pattern is None:
        pytest.skip("the pattern has no such form")
    selection = dense.drawn(pattern, queries, keys, jax.random.key(3))
    want = int(np.sum(dense.visible(pattern, queries, keys, selection=selection)))
    assert dense.pairs(pattern, queries, keys, selection) == want > 0


def make(cls, heads=12, causal=True, **arguments):
    return cls(**arguments, site=Site(num_heads=heads, causal=causal), rngs=nnx.Rngs(0))


def test_pairs_by_hand():
    assert dense.pairs(make(Full, causal=False), 512) == 12 * 512 * 512 == 3_145_728
    assert dense.pairs(make(Full), 101) == 12 * 101 * 102 // 2
    near = functools.partial(SlidingWindow, window=5)
    assert dense.pairs(make(SlidingWindow, window=5), 101) == 12 * (1 + 2 + 3 + 4 + 97 * 5)
    assert dense.pairs(make(Heads, heads=3, groups=((1, Full), (2, near))), 101) == 101 * 102 // 2 + 2 * 495


def test_more_pairs_than_an_int32_holds():
    """And no grid: 20,011 x 20,011 x 12 booleans would take 4.8 GB."""
    assert dense.pairs(make(Full, causal=False), 20_011) == 12 * 20_011**2 > 2**32
