"""Strided attention: the union, two layers, heads side by side, and what it costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra.attention import Heads, Strided, dense, strided
from lra.models import traced
from tests.attention import cases, oracle

pytestmark = pytest.mark.usefixtures("quick_compilation")


def shares(function, length, heads=1, **arguments):
    """The weights [H, T, S] of equal scores, read off values that are the keys' own unit vectors."""
    q = np.zeros((1, length, heads, 4), np.float32)
    v = np.broadcast_to(np.eye(length, dtype=np.float32)[None, :, None], (1, length, heads, length))
    return np.asarray(function(q, q, v, **arguments))[0].swapaxes(0, 1)


@pytest.mark.parametrize("causal", [True, False])
def test_the_union_counts_no_key_twice(causal):
    length, stride = 23, 4
    want = np.zeros((length, length))
    for i in range(length):
        keys = {j for j in range(length) if abs(i - j) < stride} | {j for j in range(length) if (i - j) % stride == 0}
        keys = sorted(j for j in keys if j <= i or not causal)
        want[i, keys] = 1 / len(keys)
    np.testing.assert_allclose(shares(strided, length, stride=stride, causal=causal)[0], want, rtol=1e-6)


def test_local_of_stride_l_reads_l_keys():
    assert shares(strided, 11, stride=4, part="local")[0, 9].nonzero()[0].tolist() == [6, 7, 8, 9]
    assert shares(strided, 11, stride=4, part="column")[0, 9].nonzero()[0].tolist() == [1, 5, 9]
    drawn = shares(strided, 11, stride=5)[0, 9].nonzero()[0].tolist()  # 4 keys before it, and columns 5 apart
    assert drawn == [4, 5, 6, 7, 8, 9]


def test_two_layers_reach_everything_in_either_order():
    local, column = (
        dense.visible(cases.build(Strided, stride=5, part=part), 31, 31)[0, 0].astype(int)
        for part in ("local", "column")
    )
    everything = np.tri(31, dtype=bool)
    for first, then in ((local, column), (column, local)):
        np.testing.assert_array_equal(then @ first > 0, everything)
        assert not np.array_equal(first > 0, everything)


def test_factors_split_over_heads(rng):
    parts = {"local": 1, "column": 2}
    groups = tuple((count, functools.partial(Strided, stride=4, part=part)) for part, count in parts.items())
    q, k, v = (cases.normal(rng, 2, 19, 3, 6) for _ in range(3))
    out = cases.build(Heads, groups=groups)(q, k, v).out
    assert oracle.error(out[:, :, :1], strided(*(x[:, :, :1] for x in (q, k, v)), stride=4, part="local")) < 1e-6
    assert oracle.error(out[:, :, 1:], strided(*(x[:, :, 1:] for x in (q, k, v)), stride=4, part="column")) < 1e-6


def test_cost_grows_as_the_root():
    """From 1024 to 4096 tokens at l = sqrt(T): 8 times the operations, 4 times the memory; full attention: 16 times."""

    def cost(length, stride):
        x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
        gradient = jax.grad(lambda q, k, v: jnp.sum(strided(q, k, v, stride=stride) ** 2), argnums=(0, 1, 2))
        compiled = jax.jit(gradient).lower(x, x, x).compile()
        return traced.flops(gradient, x, x, x), compiled.memory_analysis().temp_size_in_bytes

    (few, small), (many, large) = cost(1024, 32), cost(4096, 64)
    assert 4 < many / few < 8.5
    assert large / small < 8
