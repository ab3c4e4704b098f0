"""Terms that hold vectors by distance against one logit and one value a pair, with every pattern that promises them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import (
    LearnedDistance,
    ShawRelative,
    Visibility,
    XLRelative,
    dense,
)
from tests.attention import cases, oracle

HEADS, WIDTH, LENGTH, EXTRA = cases.HEADS, cases.WIDTH, 23, 5
SIZES = {"num_layers": 2, "width": HEADS * WIDTH + 2, "num_heads": HEADS, "head_dim": WIDTH}
TERMS = {
    "xl": functools.partial(XLRelative, bias="normal_1"),
    "xl_clamped": functools.partial(XLRelative, bias="normal_1", clamp_length=7, untie=True),
    "shaw": functools.partial(ShawRelative, max_distance=6, table="normal_1"),
    "shaw_heads": functools.partial(ShawRelative, max_distance=50, per_head=True, table="normal_1"),
    "learned": functools.partial(LearnedDistance, length=LENGTH + EXTRA),
}
LAYER = 1
PROMISING = [
    (name, n) for name, n in cases.PATTERN_EXAMPLES
    for pattern in [cases.make(name, n, True) or cases.make(name, n, False)] if pattern.promise.distances
]  # fmt: skip


def make(name):
    module = TERMS[name](**SIZES, rngs=nnx.Rngs(5))
    return nnx.split(module, nnx.Param, ...)


def bound(graph, params, rest, back, ahead):
    return nnx.merge(graph, params, rest)().layer(LAYER).within(ahead, back)


def by_pair(name, params, distance):
    """Key vectors [..., H, D], value vectors or None, u and v: by hand, in float64."""
    p = {
        "_".join(path): np.asarray(x, np.float64) for path, x in nnx.to_pure_dict(params).items() for path in [(path,)]
    }
    if name.startswith("xl"):
        clamp = 7 if name == "xl_clamped" else 10**6
        d = np.clip(distance, -clamp, clamp)[..., None] * 10_000.0 ** -(
            np.arange(0, SIZES["width"], 2) / SIZES["width"]
        )
        waves = np.concatenate([np.sin(d), np.cos(d)], axis=-1)
        pair = LAYER if name == "xl_clamped" else 0
        keys = np.einsum("...c,chd->...hd", waves, p["projection"][LAYER])
        return keys, None, p["content_bias"][pair], p["position_bias"][pair]
    none = np.zeros((HEADS, WIDTH))
    if name == "learned":
        return p["table"][np.maximum(distance, 0)][..., None, :], None, none, none
    most = TERMS[name].keywords["max_distance"]
    row = np.clip(distance, -most, most) + most
    keys, values = (np.moveaxis(p[name][LAYER][:, row], 0, -2) for name in ("keys", "values"))
    return keys, values, none, none


def expected(name, params, q, k, v, allowed, distance):
    """Attention with a vector for each pair; distance is [B or 1, T, S]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    keys, values, u, w = by_pair(name, params, distance)
    keys = np.broadcast_to(keys, (*keys.shape[:3], HEADS, WIDTH))
    s = np.einsum("bthd,bshd->bhts", q + u, k) + np.einsum(
        "bthd,btshd->bhts", q + w, np.broadcast_to(keys, (len(q), *keys.shape[1:]))
    )
    s = np.where(allowed, s * WIDTH**-0.5, -np.inf)
    p = np.exp(s - np.where(allowed.any(-1), s.max(-1), 0)[..., None])
    p = p / np.maximum(p.sum(-1), 1e-300)[..., None]
    out = np.einsum("bhts,bshe->bthe", p, v)
    if values is not None:
        values = np.broadcast_to(values, (len(q), *values.shape[1:3], HEADS, WIDTH))
        out = out + np.einsum("bhts,btshe->bthe", p, values)
    return out


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize(("pattern", "example"), PROMISING)
def test_equals_a_vector_for_each_pair(pattern, example, term, rng, quick_compilation):
    causal = cases.make(pattern, example, True) is not None
    if not causal and term == "learned":
        pytest.skip("holds no distances ahead")
    attend = cases.make(pattern, example, causal)
    q, k, v = (cases.normal(rng, 2, n, HEADS, WIDTH) for n in (LENGTH, LENGTH + EXTRA, LENGTH + EXTRA))
    graph, params, rest = make(term)
    back, ahead = LENGTH + EXTRA - 1, 0 if causal else LENGTH - 1
    out = jax.jit(lambda params, q, k, v: attend(q, k, v, terms=(bound(graph, params, rest, back, ahead),)).out)(
        params, q, k, v
    )
    visibility = Visibility()
    allowed = np.asarray(dense.visible(attend, LENGTH, LENGTH + EXTRA, visibility))
    places = [np.asarray(side.position) for side in attend.entries(LENGTH, LENGTH + EXTRA, visibility)]
    k, v = (np.asarray(x) for x in attend.summarise(jnp.asarray(k), jnp.asarray(v), visibility))
    want = expected(term, params, q, k, v, allowed, places[0][:, :, None] - places[1][:, None, :])
    assert oracle.error(out, want) < 1e-5
