"""The scale of the logits, which the functions take and the classes leave at 1/sqrt(D)."""

import functools

import numpy as np
import pytest

from lra.attention import (
    block_local,
    blockwise,
    fixed,
    full,
    memory_compressed,
    sliding_window,
    strided,
    window_global,
)
from tests.attention import cases, oracle

KERNEL = np.random.default_rng(0).normal(size=(3, 18, 18)).astype(np.float32)
FUNCTIONS = {
    "full": full,
    "sliding_window": functools.partial(sliding_window, window=4),
    "strided": functools.partial(strided, stride=3),
    "fixed": functools.partial(fixed, block=4, summary=1),
    "block_local": functools.partial(block_local, block=4),
    "blockwise": functools.partial(blockwise, blocks=2, heads=(2, 1)),
    "window_global": functools.partial(window_global, window=2, global_positions=(1,)),
    "memory_compressed": functools.partial(
        memory_compressed, rate=3, key_convolution=(KERNEL, None), value_convolution=(KERNEL, None)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_scale_is_a_factor_of_the_queries(name, rng, quick_compilation):
    q, k, v = (cases.normal(rng, 2, 13, 3, 6) for _ in range(3))
    attend = FUNCTIONS[name]
    scaled = attend(q, k, v, scale=0.7)
    assert oracle.error(scaled, attend(np.float32(0.7 * 6**0.5) * q, k, v)) < 1e-5
    assert oracle.error(scaled, attend(q, k, v)) > 0.01
