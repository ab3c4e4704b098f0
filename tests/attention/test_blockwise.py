"""Blockwise attention: which head reads which block, worked out by hand."""

import numpy as np
import pytest
from flax import nnx

from lra.attention import Blockwise, Full, Site, blockwise, dense, full
from tests.attention import cases, oracle

FIRST, SECOND, THIRD = [0, 1, 2], [3, 4, 5], [6, 7, 8]


def build(blocks, num_heads=12, **arguments):
    site = Site(num_heads=num_heads, head_dim=cases.WIDTH, causal=False)
    return Blockwise(blocks=blocks, **arguments, site=site, rngs=nnx.Rngs(0))


def read(grid, query):
    return grid[query].nonzero()[0].tolist()


def test_ten_and_two_heads():
    """n = 2: ten heads read their own block, two read the other one."""
    grid = dense.visible(build(2, heads=(10, 2)), 6, 6)[0]
    for head in range(10):
        assert [read(grid[head], i) for i in range(6)] == [FIRST] * 3 + [SECOND] * 3
    for head in (10, 11):
        assert [read(grid[head], i) for i in range(6)] == [SECOND] * 3 + [FIRST] * 3


def test_eight_two_and_two_heads():
    """n = 3: eight heads read their own block, two the next one, two the one after, around the end."""
    grid = dense.visible(build(3, heads=(8, 2, 2)), 9, 9)[0]
    for head in range(8):
        assert [read(grid[head], i) for i in (0, 3, 6)] == [FIRST, SECOND, THIRD]
    for head in (8, 9):
        assert [read(grid[head], i) for i in (1, 4, 7)] == [SECOND, THIRD, FIRST]
    for head in (10, 11):
        assert [read(grid[head], i) for i in (2, 5, 8)] == [THIRD, FIRST, SECOND]


def test_one_shift_a_head():
    assert build(3, heads=(8, 2, 2)).shifts == (0,) * 8 + (1,) * 2 + (2,) * 2
    grid = dense.visible(build(3, num_heads=2, shifts=(2, 1)), 9, 9)[0]
    assert [read(grid[0], i) for i in (0, 3, 6)] == [THIRD, FIRST, SECOND]
    assert [read(grid[1], i) for i in (0, 3, 6)] == [SECOND, THIRD, FIRST]


def test_the_last_block_is_shorter(rng, quick_compilation):
    """11 tokens in 3 blocks: 0-3, 4-7, 8-10."""
    grid = dense.visible(build(3, num_heads=2, shifts=(0, 1)), 11, 11)[0]
    assert read(grid[0], 9) == [8, 9, 10]
    assert read(grid[1], 5) == [8, 9, 10]
    assert read(grid[1], 8) == [0, 1, 2, 3]
    q, k, v = (cases.normal(rng, 2, 11, 2, 6) for _ in range(3))
    out = blockwise(q, k, v, blocks=3, shifts=(1, 1))
    for asking, asked in (((0, 4), (4, 8)), ((4, 8), (8, 11)), ((8, 11), (0, 4))):
        s = np.einsum("bthd,bshd->bhts", q[:, slice(*asking)], k[:, slice(*asked)]) * 6**-0.5
        p = np.exp(s - s.max(-1, keepdims=True))
        want = np.einsum("bhts,bshd->bthd", p / p.sum(-1, keepdims=True), v[:, slice(*asked)])
        assert oracle.error(out[:, slice(*asking)], want) < 1e-6


@pytest.mark.parametrize("heads", [(10, 2), (8, 2, 2)])
def test_scores_are_one_nth_of_full_attention_and_quadratic(heads):
    n = len(heads)
    everything = cases.build(Full, causal=False, heads=12)
    for length in (48, 96):
        assert n * dense.pairs(build(n, heads=heads), length) == dense.pairs(everything, length)
    assert dense.pairs(build(n, heads=heads), 96) == 4 * dense.pairs(build(n, heads=heads), 48)


def test_one_block_is_full_attention(rng, quick_compilation):
    q, k, v = (cases.normal(rng, 2, 13, 3, 6) for _ in range(3))
    assert oracle.error(blockwise(q, k, v, blocks=1, heads=(3,)), full(q, k, v, causal=False)) < 1e-6


def test_causal_is_refused_with_the_reason(rng):
    reason = "no causal form: a shifted block lies ahead of some queries.*choose a pattern.*block_local"
    with pytest.raises(ValueError, match=reason):
        cases.build(Blockwise, heads=12, blocks=2)
    x = cases.normal(rng, 1, 6, 3, 4)
    with pytest.raises(ValueError, match=reason):
        blockwise(x, x, x, blocks=2, heads=(2, 1), causal=True)
