"""Fixed attention: groups of heads, two layers, and what it costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra.attention import Fixed, Full, Heads, dense, fixed
from lra.models import traced
from tests.attention import cases, oracle

pytestmark = pytest.mark.usefixtures("quick_compilation")


def keys(grid, query):
    return grid[query].nonzero()[0].tolist()


def test_groups_give_heads_different_columns():
    """Blocks of 6, two columns a group, counted from the end: 4, 5 | 2, 3 | 0, 1 of every block."""
    grid = dense.visible(cases.build(Fixed, heads=4, block=6, summary=2, groups=3), 17, 17)[0]
    assert keys(grid[0], 13) == [4, 5, 10, 11, 12, 13]
    assert keys(grid[1], 13) == [2, 3, 8, 9, 12, 13]
    assert keys(grid[2], 13) == [0, 1, 6, 7, 12, 13]
    np.testing.assert_array_equal(grid[3], grid[0])
    alone = dense.visible(cases.build(Fixed, heads=2, block=6, summary=2, groups=3, part="summary"), 17, 17)[0]
    assert keys(alone[1], 15) == [2, 3, 8, 9, 14, 15]
    assert keys(alone[0], 3) == []


def test_the_union_counts_no_key_twice():
    """Weights of equal scores, read off values that are the keys' own unit vectors, for two heads of two groups."""
    q = np.zeros((1, 17, 2, 4), np.float32)
    v = np.repeat(np.eye(17, dtype=np.float32)[None, :, None], 2, axis=2)
    weights = np.asarray(fixed(q, q, v, block=6, summary=2, groups=2))[0]
    hand = {
        0: {5: [0, 1, 2, 3, 4, 5], 9: [4, 5, 6, 7, 8, 9], 16: [4, 5, 10, 11, 12, 13, 14, 15, 16]},
        1: {5: [0, 1, 2, 3, 4, 5], 9: [2, 3, 6, 7, 8, 9], 16: [2, 3, 8, 9, 12, 13, 14, 15, 16]},
    }
    for head, rows in hand.items():
        for query, want in rows.items():
            np.testing.assert_allclose(weights[query, head, want], 1 / len(want), rtol=1e-6)
            np.testing.assert_allclose(weights[query, head].sum(), 1, rtol=1e-6)


def test_two_layers_reach_everything_as_own_block_then_summary_only():
    """Through residual layers, in which a token reads itself."""
    local, summary = (
        dense.visible(cases.build(Fixed, block=5, summary=1, part=part), 31, 31)[0, 0] | np.eye(31, dtype=bool)
        for part in ("local", "summary")
    )
    everything = np.tri(31, dtype=bool)
    np.testing.assert_array_equal(summary.astype(int) @ local.astype(int) > 0, everything)
    other = local.astype(int) @ summary.astype(int) > 0
    assert other[12].nonzero()[0].tolist() == [4, 9, 10, 11, 12]


def test_groups_inside_heads(rng):
    """A group of heads counts its own heads from 0."""
    groups = ((1, Full), (2, functools.partial(Fixed, block=6, summary=2, groups=2)))
    q, k, v = (cases.normal(rng, 2, 19, 3, 6) for _ in range(3))
    pattern = cases.build(Heads, groups=groups)
    want = fixed(*(x[:, :, 1:] for x in (q, k, v)), block=6, summary=2, groups=2)
    assert oracle.error(pattern(q, k, v).out[:, :, 1:], want) < 1e-6
    grid = dense.visible(pattern, 19, 19)[0]
    assert keys(grid[1], 13) == [4, 5, 10, 11, 12, 13]
    assert keys(grid[2], 13) == [2, 3, 8, 9, 12, 13]


def test_cost_grows_as_the_root():
    """From 1024 to 4096 tokens at l = sqrt(T): 8 times the operations, 4 times the memory; full attention: 16 times."""

    def cost(length, block):
        x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
        gradient = jax.grad(lambda *x: jnp.sum(fixed(*x, block=block, summary=4) ** 2), argnums=(0, 1, 2))
        compiled = jax.jit(gradient).lower(x, x, x).compile()
        return traced.flops(gradient, x, x, x), compiled.memory_analysis().temp_size_in_bytes

    (few, small), (many, large) = cost(1024, 32), cost(4096, 64)
    assert 4 < many / few < 8.5
    assert large / small < 8
