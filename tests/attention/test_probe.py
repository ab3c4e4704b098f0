"""Weights by distance against the dense weights themselves, added up one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import (
    BlockLocal,
    Fixed,
    Full,
    Heads,
    MemoryCompressed,
    Promise,
    Rotary,
    Site,
    SlidingWindow,
    Strided,
    Visibility,
    WindowGlobal,
    dense,
)
from lra.attention.probe import WEIGHT_BY_DISTANCE, Probe, observed, refusal
from lra.attention.terms import ALiBiTerm
from tests.attention import oracle

pytestmark = pytest.mark.usefixtures("quick_compilation")
HEADS, WIDTH, T, SLOTS = 3, 6, 29, 8
REACH = 17  # below T + SLOTS, so that some weight lies beyond
near = functools.partial(SlidingWindow, window=3)
PATTERNS = {
    "full": Full,
    "sliding_window": functools.partial(SlidingWindow, window=5, dilation=2),
    "strided": functools.partial(Strided, stride=5),
    "fixed": functools.partial(Fixed, block=5, summary=1, groups=3),
    "block_local": functools.partial(BlockLocal, block=4, look_back=1),
    "window_global": functools.partial(
        WindowGlobal, window=4, global_tokens=(2,), max_globals=5, own_projections=False
    ),
    "heads": functools.partial(Heads, groups=((1, near), (2, Full))),
}


def build(make, causal=True):
    return make(site=Site(num_heads=HEADS, head_dim=WIDTH, width=HEADS * WIDTH, causal=causal), rngs=nnx.Rngs(0))


def by_hand(weights, q_position, k_position):
    """[H, REACH + 1] from weights [B, H, T, S] in float64, one at a time."""
    total = np.zeros((HEADS, REACH + 1))
    q_position, k_position = (np.broadcast_to(x, (len(weights), x.shape[1])) for x in (q_position, k_position))
    for (b, h, t, s), weight in np.ndenumerate(np.asarray(weights, np.float64)):
        total[h, min(abs(int(q_position[b, t]) - int(k_position[b, s])), REACH)] += weight
    return total


def measured(pattern, q, k, v, visibility=None, terms=(), queries=None):
    @jax.jit
    def run(q, k, v, visibility, terms, queries):
        probe = Probe(jnp.zeros((HEADS, REACH + 1)), queries)
        return observed(lambda terms: pattern(q, k, v, visibility=visibility, terms=terms), (*terms, probe))

    return run(q, k, v, visibility, terms, queries)


def compare(pattern, visibility, rng, terms, queries=None):
    """The histogram, after comparison with dense attention by the pattern's rule."""
    q, k, v = (jnp.asarray(rng.normal(size=(2, n, HEADS, WIDTH)), jnp.float32) for n in (T, T + SLOTS, T + SLOTS))
    attended = measured(pattern, q, k, v, visibility, terms, queries)
    allowed = dense.visible(pattern, T, T + SLOTS, visibility)
    out, weights = dense.attend(q, k, v, allowed=allowed, terms=terms, visibility=visibility)
    assert oracle.error(attended.out, out) < 1e-5
    weights = weights if queries is None else weights * queries[:, None, :, None]
    got, want = attended.metrics[WEIGHT_BY_DISTANCE], by_hand(weights, *visibility.positions(T, T + SLOTS))
    assert oracle.error(got, want) < 1e-5
    return np.asarray(got), allowed


@pytest.mark.parametrize("name", PATTERNS)
def test_weights_by_distance(name, rng):
    """With slots of memory of which some are empty, padding behind, and terms that act on queries, keys and scores."""
    valid = np.ones((2, T + SLOTS), bool)
    valid[0, :3] = valid[1, -4:] = False
    token = jnp.asarray(rng.integers(0, 9, (2, T + SLOTS)), jnp.int32)
    visibility = Visibility(q_valid=jnp.asarray(valid[:, SLOTS:]), k_valid=jnp.asarray(valid), k_token=token)
    terms = (
        Rotary(num_layers=1, width=HEADS * WIDTH, num_heads=HEADS, head_dim=WIDTH, rngs=nnx.Rngs(0))(),
        ALiBiTerm(jnp.asarray([0.1, 0.3, 0.05])),
    )
    got, allowed = compare(build(PATTERNS[name]), visibility, rng, terms)
    assert allowed.any(-1).all(1).sum() == 2 * T - 4  # all but padding read something
    np.testing.assert_allclose(got.sum(-1), 2 * T - 4, rtol=1e-5)
    assert (got[:, -1] > 0).any() == (name not in ("sliding_window", "block_local"))


@pytest.mark.parametrize("causal", [True, False])
def test_positions_given(causal, rng):
    """By position and not by index, in rows that start anywhere and skip some numbers; both directions count alike."""
    step = jnp.asarray(rng.integers(1, 4, (2, T + SLOTS)), jnp.int32)
    position = jnp.cumsum(step, axis=1, dtype=jnp.int32) + jnp.asarray([[11], [0]], jnp.int32)
    visibility = Visibility(q_position=position[:, SLOTS:], k_position=position)
    queries = jnp.asarray(rng.integers(0, 2, (2, T)), jnp.float32)  # that are measured
    got, _ = compare(build(Full, causal), visibility, rng, (), queries)
    np.testing.assert_allclose(got.sum(-1), queries.sum(), rtol=1e-5)


def test_queries_that_read_nothing_add_nothing(rng):
    x = jnp.asarray(rng.normal(size=(1, T, HEADS, WIDTH)), jnp.float32)
    summary = build(functools.partial(Fixed, block=5, summary=1, part="summary"))
    counted = measured(summary, x, x, x).metrics[WEIGHT_BY_DISTANCE]
    reading = dense.visible(summary, T, T)[0].any(-1).sum(-1)
    assert (reading == T - 4).all()
    np.testing.assert_allclose(counted.sum(-1), reading, rtol=1e-5)


class Absolute(Full):
    promise = Promise(causal="strict")


def test_what_is_refused():
    compressed = functools.partial(MemoryCompressed, rate=3)
    for make in (compressed, functools.partial(Heads, groups=((1, near), (2, compressed)))):
        pattern = nnx.eval_shape(lambda make=make: build(make))
        assert refusal(pattern) == "MemoryCompressed reads summaries of several tokens, which are at no one distance"
    assert refusal(build(Absolute)) == "Absolute does not promise distances"
    assert refusal(build(Full)) is None
