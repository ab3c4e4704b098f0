"""The seam of patterns that depend on content: one projection for queries and keys, and integers chosen once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import Attention, Full, Heads, Pattern, Promise, Site, dense
from lra.attention.pattern import Attended
from lra.models.stack import REMAT
from tests.attention import oracle

WIDTH, HEAD_DIM, LENGTH = 10, 4, 13


@dataclasses.dataclass(frozen=True)
class SameSide:
    def __call__(self, q, k):
        return (q.labels["side"] == k.labels["side"]) & (k.position <= q.position)


class Sides(Pattern):
    """A query reads the keys on its own side of a plane: a pattern of ten lines that depends on content."""

    projections = "shared_qk"

    def __init__(self, *, site, rngs):
        super().__init__(site)

    @property
    def promise(self):
        return Promise(causal="strict", memory=True, sorts=True)

    @property
    def rule(self):
        return SameSide()

    @classmethod
    def examples(cls):
        return ({},)

    def select(self, q, k, *, visibility=None, key=None, train=False):
        return (k[..., 0] > 0).astype(jnp.int32)

    def labels(self, queries, keys, visibility, selection=None):
        return {"side": selection[:, keys - queries :]}, {"side": selection}

    def __call__(self, q, k, v, *, visibility=None, terms=(), selection=None, **_):
        if selection is None:
            selection = self.select(q, k)
        same = selection[:, k.shape[1] - q.shape[1] :, None] == selection[:, None]  # [B, T, S, H]
        past = np.tril(np.ones((q.shape[1], k.shape[1]), bool), k.shape[1] - q.shape[1])
        allowed = same & past[None, :, :, None]
        return Attended(dense.attend(q, k, v, allowed=jnp.moveaxis(allowed, 3, 1))[0])


def layer(pattern, heads=3, **options):
    site = Site(num_heads=heads, head_dim=HEAD_DIM, width=WIDTH)
    return Attention(pattern=pattern, site=site, rngs=nnx.Rngs(0), **options)


MIXED = functools.partial(Heads, groups=((1, Sides), (1, Full), (1, Sides)))


@pytest.mark.parametrize("extra", [0, 5])
def test_heads_that_share_read_keys_that_are_queries(extra, rng):
    attention = layer(MIXED, bias=True)
    for linear in (attention.query, attention.key, attention.value):
        linear.bias[...] = jnp.asarray(rng.normal(size=linear.bias.shape), jnp.float32)
    assert attention.key.kernel.shape == (WIDTH, HEAD_DIM)
    x = jnp.asarray(rng.normal(size=(2, LENGTH + extra, WIDTH)), jnp.float32)
    got = attention(x, LENGTH)

    def projected(linear):
        kernel, bias = (np.asarray(each[...], np.float64) for each in (linear.kernel, linear.bias))
        return (np.asarray(x, np.float64) @ kernel + bias).reshape(2, LENGTH + extra, -1, HEAD_DIM)

    q, k, v = (projected(each) for each in (attention.query, attention.key, attention.value))
    k = np.stack([q[:, :, 0], k[:, :, 0], q[:, :, 2]], axis=2)
    past = np.arange(LENGTH + extra) <= np.arange(extra, LENGTH + extra)[:, None]
    side = k[..., 0].swapaxes(1, 2) > 0
    allowed = (side[:, :, extra:, None] == side[:, :, None]) & past
    allowed[:, 1] = past
    want, _ = oracle.attend(
        q[:, extra:], k, v, allowed, HEAD_DIM**-0.5, oracle.TermArrays(), np.zeros((2, LENGTH, 3, HEAD_DIM)),
        np.arange(extra, LENGTH + extra)[None], np.arange(LENGTH + extra)[None],
    )  # fmt: skip
    kernel, bias = (np.asarray(each[...], np.float64) for each in (attention.output.kernel, attention.output.bias))
    assert oracle.error(got.out, want.reshape(2, LENGTH, -1) @ kernel + bias) < 1e-5
    assert got.selection[1] is None
    grid = dense.visible(attention.pattern, LENGTH, LENGTH + extra, selection=got.selection)
    np.testing.assert_array_equal(grid, allowed)


def test_no_projection_of_keys_where_all_heads_share(rng):
    attention = layer(Sides)
    assert attention.key is None
    x = jnp.asarray(rng.normal(size=(2, LENGTH, WIDTH)), jnp.float32)
    assert np.isfinite(attention(x, LENGTH).out).all()


def test_a_given_selection_is_used(rng):
    attention = layer(MIXED)
    x, y = jnp.asarray(rng.normal(size=(2, 1, LENGTH, WIDTH)), jnp.float32)
    first = attention(x, LENGTH)
    other = attention(y, LENGTH, selection=first.selection)
    np.testing.assert_array_equal(other.selection[0], first.selection[0])
    assert oracle.error(other.out, attention(y, LENGTH).out) > 0.1


@pytest.mark.parametrize("remat", [name for name in REMAT if name != "none"])
def test_a_recomputed_layer_does_not_select_again(remat, rng):
    """The comparison that chooses the side stands once in the program of the gradient, and twice without the policy."""
    attention = layer(Sides)
    x = jnp.asarray(rng.normal(size=(1, LENGTH, WIDTH)), jnp.float32)

    def comparisons(policy):
        value = jax.checkpoint(lambda x: jnp.sum(attention(x, LENGTH).out ** 2), policy=policy)
        return str(jax.make_jaxpr(jax.grad(value))(x)).count("= gt ")

    assert comparisons(REMAT[remat]) < comparisons(jax.checkpoint_policies.nothing_saveable)
