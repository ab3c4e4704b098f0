"""Routing attention against loops over its definition, its running averages, and what it says of sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import Attention, Heads, Routing, Site, SlidingWindow, StrictRouting, Visibility, clustering, routing
from lra.errors import UserError
from tests.attention import cases, oracle, routed

B, T, H, D, K, W = 2, 23, 3, 6, 4, 5
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("causal", [True, False])
def test_loops(causal, rng):
    """Rows of different lengths, NaN in their padding."""
    valid = np.arange(T) < np.array([[T], [17]])
    q, k, v = (cases.normal(rng, B, T, H, D) for _ in range(3))
    k = q if causal else k
    centroids = cases.normal(rng, H, K, D)
    normal = [routed.normalised(x) for x in (q, k)]
    of_keys = routed.clusters(normal[1], centroids, W, valid)
    of_queries = of_keys if causal else routed.clusters(normal[0], centroids, W, valid)
    want, count = routed.attend(*normal, v, of_queries, of_keys, causal, 0.3)
    q, k, v = (np.where(valid[..., None, None], x, np.nan).astype(np.float32) for x in (q, k, v))
    options = {"centroids": centroids, "window": W, "causal": causal, "scale": 0.3}
    out = routing(q, k, v, visibility=Visibility.tokens(valid=jnp.asarray(valid)), **options)
    assert oracle.error(out, want) < 1e-5
    assert 0 < np.mean(count[valid] == 0) < 1
    np.testing.assert_array_equal(np.asarray(out)[count == 0], 0)


def learned(cls, rng, **arguments):
    """A pattern, what it returned in training, its normalised keys, and their validity."""
    pattern = cases.build(cls, clusters=K, window=W, **arguments)
    q, v = cases.normal(rng, B, T, H, D), cases.normal(rng, B, T, H, D)
    valid = np.arange(T) < np.array([[T], [11]])
    visibility = Visibility.tokens(valid=jnp.asarray(valid))
    q = np.where(valid[..., None, None], q, np.nan).astype(np.float32)
    return pattern, pattern(q, q, v, visibility=visibility, train=True), routed.normalised(q), valid


@pytest.mark.parametrize("cls", [Routing, StrictRouting])
@pytest.mark.parametrize("space", ["normalised", "projected"])
def test_averages_and_commitment_count_valid_tokens(cls, space, rng):
    pattern, attended, x, valid = learned(cls, rng, space=space, decay=0.9, commitment=0.5)
    if space == "projected":
        turn = np.asarray(pattern.projection[...], np.float64)
        np.testing.assert_allclose(turn @ turn.T, np.eye(D), atol=1e-5)
        x = x @ turn
    before = np.asarray(pattern.centroids, np.float64)
    sums, counts, away = 0.9 * before, np.full((H, K), 0.9), []
    for b, t, h in np.ndindex(B, T, H):
        if valid[b, t]:
            n = np.argmax(before[h] @ x[b, t, h])
            sums[h, n] += 0.1 * x[b, t, h]
            counts[h, n] += 0.1
            away.append(np.mean((x[b, t, h] - before[h, n]) ** 2))
    assert oracle.error(attended.updates["sums"], sums) < 1e-5
    assert oracle.error(attended.updates["counts"], counts) < 1e-6
    assert oracle.error(attended.losses["commitment"], 0.5 * np.mean(away)) < 1e-5
    pattern.sums[...], pattern.counts[...] = attended.updates["sums"], attended.updates["counts"]
    assert oracle.error(pattern.centroids, sums / counts[..., None]) < 1e-4


def test_the_first_update_as_released_inflates(rng):
    """Centroids that no token is nearest to are divided by next to nothing."""
    sizes = {}
    for name in ("corrected", "released"):
        pattern = cases.build(Routing, clusters=2, window=W, first_update=name)
        start = np.asarray(pattern.centroids)
        np.testing.assert_allclose(np.linalg.norm(start, axis=-1), D**0.5, rtol=1e-5)
        x = clustering.normalise(jnp.asarray(start[None, :, :1].swapaxes(1, 2)))  # each head has one token, its first
        _, updates = pattern.learn((x, jnp.zeros((1, 1, H), jnp.int32), None))
        new = clustering.centroids(updates["sums"], updates["counts"])
        sizes[name] = np.linalg.norm(new, axis=-1) / D**0.5
    np.testing.assert_allclose(sizes["corrected"], 1, rtol=1e-3)
    np.testing.assert_allclose(sizes["released"][:, 0], 1000, rtol=1e-2)
    assert (sizes["released"][:, 1] > 1e5).all()


def test_evaluation_leaves_buffers_alone_and_reports_who_is_in_no_cluster(rng):
    pattern = cases.build(Routing, clusters=2, window=W)
    q, v = cases.normal(rng, B, T, H, D), cases.normal(rng, B, T, H, D)
    attended = pattern(q, q, v)
    assert not attended.updates
    assert not attended.losses
    members = routed.clusters(routed.normalised(q), np.asarray(pattern.centroids), W)
    inside = [len({t for row in head for t in row}) for heads in members for head in heads]
    np.testing.assert_allclose(attended.metrics["unrouted"], 1 - np.sum(inside) / (B * T * H), rtol=1e-6)


def layer(pattern, heads=2):
    return Attention(pattern=pattern, site=Site(num_heads=heads, head_dim=4, width=8), rngs=nnx.Rngs(0))


def test_local_heads_stand_beside_routing_heads(rng):
    near = functools.partial(SlidingWindow, window=3)
    far = functools.partial(Routing, clusters=K, window=W)
    attention = layer(functools.partial(Heads, groups=((1, near), (1, far))))
    x = jnp.asarray(cases.normal(rng, B, 19, 8))

    graph, parameters, rest = nnx.split(attention, nnx.Param, ...)

    def loss(parameters):
        attended = nnx.merge(graph, parameters, rest)(x, 19, train=True)
        return attended.losses["1.commitment"], attended

    gradients, attended = jax.grad(loss, has_aux=True)(parameters)
    gradient = np.asarray(gradients["query"]["kernel"][...])
    assert {*attended.updates} == {"1.sums", "1.counts"}
    assert attention.key.kernel.shape == (8, 4)  # of the local head alone
    np.testing.assert_array_equal(gradient[:, :4], 0)
    assert np.abs(gradient[:, 4:]).max() > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"clusters": 0}, "clusters needs to be at least 1, got 0"),
        ({"window": 0}, "window counts tokens of a cluster and needs to be at least 1, got 0"),
        ({"decay": 1.0}, r"decay needs to be at least 0 and below 1, got 1\.0"),
        ({"commitment": -1.0}, r"commitment needs to be at least 0, got -1\.0"),
        ({"first_update": "first"}, "first_update needs to be 'corrected' or 'released', got 'first'"),
        ({"space": "keys"}, "space needs to be 'normalised' or 'projected', got 'keys'"),
        ({"clusters": (2, 3)}, r"clusters needs one entry for each of 1 layers, got 2"),
    ],
)
@pytest.mark.parametrize("cls", [Routing, StrictRouting])
def test_mistakes(cls, arguments, sentence):
    with pytest.raises(ValueError, match=f"{cls.__name__ if 'needs one' in sentence else ''}.*{sentence}"):
        cases.build(cls, **{"clusters": K, "window": W} | arguments)


def test_rows_that_the_sizes_do_not_fit(rng):
    attention = layer(functools.partial(Routing, clusters=2, window=5))
    assert attention(jnp.zeros((1, 20, 8)), 20).out.shape == (1, 20, 8)
    with pytest.raises(UserError, match=r"window is 5, but rows have 4 tokens, .*: lower it, to about 2 tokens"):
        attention(jnp.zeros((1, 4, 8)), 4)
    sentence = r"clusters = 2 x window = 5 are 10 places for rows of 21 tokens, .*: raise one of them"
    with pytest.raises(UserError, match=sentence):
        attention(jnp.zeros((1, 21, 8)), 21)
    mixed = functools.partial(Heads, groups=((2, functools.partial(Routing, clusters=2, window=5)),))
    with pytest.raises(UserError, match=sentence):
        layer(mixed)(jnp.zeros((1, 21, 8)), 21)
