"""The feed-forward layer in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.models import FeedForward
from tests.attention import oracle


def make(**options):
    return FeedForward(width=3, hidden=64, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("chunk", "activation"), [(1, "gelu"), (4, "geglu"), (13, "relu"), (99, "gelu")])
def test_chunks_change_nothing(chunk, activation, rng):
    """Neither the result nor the gradients, whatever is left over for the last chunk."""
    x = jnp.asarray(rng.normal(size=(2, 13, 3)), jnp.float32)

    @nnx.jit
    def both(layer, x):
        return layer(x), nnx.grad(lambda layer, x: (layer(x) ** 2).sum(), argnums=(0, 1))(layer, x)

    want, got = (both(make(activation=activation, chunk=size), x) for size in (None, chunk))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert oracle.error(a, b) < 1e-5


def test_every_chunk_drops_other_units(rng):
    layer, x = make(chunk=4, dropout=0.5), jnp.tile(jnp.asarray(rng.normal(size=(1, 1, 3)), jnp.float32), (1, 12, 1))
    out = np.asarray(layer(x, key=jax.random.key(1), train=True))
    assert len(np.unique(out[0, :, 0])) == 12
    np.testing.assert_array_equal(out, layer(x, key=jax.random.key(1), train=True))
    assert oracle.error(layer(x, key=jax.random.key(1)), make()(x)) < 1e-6


def test_memory_does_not_grow_with_hidden_units_times_length():
    def temporary(chunk):
        layer = FeedForward(width=4, hidden=512, chunk=chunk, rngs=nnx.Rngs(0))
        graph, state = nnx.split(layer)
        step = jax.grad(lambda state, x: (nnx.merge(graph, state)(x) ** 2).sum())
        x = jax.ShapeDtypeStruct((1, 2048, 4), jnp.float32)
        return jax.jit(step).lower(state, x).compile().memory_analysis().temp_size_in_bytes

    hidden = 2048 * 512 * 4
    assert temporary(None) > hidden
    assert temporary(64) < hidden / 4


def test_a_chunk_of_nothing():
    with pytest.raises(ValueError, match=r"FeedForward.chunk needs to be at least 1, or None .*, got 0"):
        make(chunk=0)
