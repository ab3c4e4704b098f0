"""Block-local attention: sets of keys worked out by hand."""

import numpy as np
import pytest

from lra.attention import BlockLocal, block_local, dense, full
from tests.attention import cases, oracle


def read(pattern, length):
    return [row.nonzero()[0].tolist() for row in dense.visible(pattern, length, length)[0, 0]]


def test_causal_sets():
    """Blocks 012 | 345 | 6."""
    assert read(cases.build(BlockLocal, block=3), 7) == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [3, 4, 5], [6]]
    assert read(cases.build(BlockLocal, block=3, look_back=1), 7) == [
        [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [3, 4, 5, 6],
    ]  # fmt: skip


def test_bidirectional_sets():
    """Blocks 01 | 23 | 45 | 6."""
    alone = read(cases.build(BlockLocal, block=2, causal=False), 7)
    assert alone == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6]]
    around = read(cases.build(BlockLocal, block=2, look_back=1, causal=False), 7)
    assert around[0] == around[1] == [0, 1, 2, 3]
    assert around[2] == around[3] == [0, 1, 2, 3, 4, 5]
    assert around[4] == around[5] == [2, 3, 4, 5, 6]
    assert around[6] == [4, 5, 6]


@pytest.mark.parametrize("causal", [True, False])
def test_blocks_are_attention_of_their_own(rng, causal, quick_compilation):
    q, k, v = (cases.normal(rng, 2, 17, 3, 6) for _ in range(3))
    out = block_local(q, k, v, block=7, causal=causal)
    for first, last in ((0, 7), (7, 14), (14, 17)):
        assert oracle.error(out[:, first:last], full(*(x[:, first:last] for x in (q, k, v)), causal=causal)) < 1e-6
    np.testing.assert_array_equal(out[:, [0, 7, 14]] == v[:, [0, 7, 14]], causal)


def test_a_block_that_holds_the_row_is_full_attention(rng, quick_compilation):
    q, k, v = (cases.normal(rng, 2, 13, 3, 6) for _ in range(3))
    for options in ({"block": 13}, {"block": 40}, {"block": 7, "look_back": 1}):
        assert oracle.error(block_local(q, k, v, **options), full(q, k, v)) < 1e-6
