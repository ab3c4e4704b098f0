"""Terms that hold vectors by distance against one vector a pair, with every pattern that promises `distances`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import Heads, LearnedDistance, ShawRelative, SlidingWindow, Visibility, XLRelative, dense, full
from lra.attention.distance_terms import DistanceTerm
from lra.attention.terms import Range
from lra.models import Decoder, Stack
from tests.attention import cases, oracle

HEADS, WIDTH, LENGTH, EXTRA, LAYER = cases.HEADS, cases.WIDTH, 23, 5, 1
SIZES = {"num_layers": 2, "width": HEADS * WIDTH + 2, "num_heads": HEADS, "head_dim": WIDTH}
TERMS = {
    "xl": functools.partial(XLRelative, bias="normal_1"),
    "xl_clamped": functools.partial(XLRelative, bias="normal_1", clamp_length=7, untie=True),
    "shaw": functools.partial(ShawRelative, max_distance=6, table="normal_1"),
    "shaw_heads": functools.partial(ShawRelative, max_distance=50, per_head=True, table="normal_1"),
    "learned": functools.partial(LearnedDistance, length=LENGTH + EXTRA),
}
XL, ONES = TERMS["xl"](**SIZES, rngs=nnx.Rngs(0)), [jnp.ones((1, 3, HEADS, WIDTH))] * 3
PROMISING = [
    (name, n) for name, n in cases.PATTERN_EXAMPLES
    if (cases.make(name, n, True) or cases.make(name, n, False)).promise.distances
]  # fmt: skip
EACH = [pytest.param(name, n, ("xl", "shaw"), marks=[pytest.mark.slow] * (n > 0)) for name, n in PROMISING]
MORE = [(name, n, ("xl_clamped", "shaw_heads", "learned")) for name, n in (("full", 0), ("strided", 0))]


def split(name):
    return nnx.split(TERMS[name](**SIZES, rngs=nnx.Rngs(5)), nnx.Param, ...)


def bound(name, params, ahead, back):
    """The term of one layer, of these parameters."""
    graph, _, rest = split(name)
    return nnx.merge(graph, params, rest)().layer(LAYER).within(ahead, back)


def by_pair(name, params, distance):
    """Key vectors [..., H, D], value vectors or None, u and v."""
    p = {path[0]: x for path, x in nnx.to_flat_state(params)}
    p = {key: x[...] for key, x in p.items()}
    if name.startswith("xl"):
        clamp = 7 if name == "xl_clamped" else 10**6
        angle = np.clip(distance, -clamp, clamp)[..., None] * 1e4 ** -(np.arange(0, SIZES["width"], 2) / SIZES["width"])
        waves = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)
        pair = LAYER if name == "xl_clamped" else 0
        return (
            jnp.einsum("...c,chd->...hd", waves, p["projection"][LAYER]), None, p["content_bias"][pair],
            p["position_bias"][pair],
        )  # fmt: skip
    none = np.zeros((HEADS, WIDTH))
    if name == "learned":
        return p["table"][np.maximum(distance, 0)][..., None, :], None, none, none
    most = TERMS[name].keywords["max_distance"]
    row = np.clip(distance, -most, most) + most
    keys, values = (jnp.moveaxis(p[side][LAYER][:, row], 0, -2) for side in ("keys", "values"))
    return keys, values, none, none


def explicit(name, params, q, k, v, attend, sets, places):
    """Attention with a vector for each pair: positions [B or 1, T] and [B or 1, S], sets [B or 1, H, T, S]."""
    distance = places[0][:, :, None] - places[1][:, None, :]
    keys, values, u, w = by_pair(name, params, distance)
    q, k = attend.prepare(q, k)
    whole = (len(q), *distance.shape[1:], HEADS, WIDTH)
    s = jnp.einsum("bthd,bshd->bhts", q + u, k)
    s = (s + jnp.einsum("bthd,btshd->bhts", q + w, jnp.broadcast_to(keys, whole))) * (attend.scale or WIDTH**-0.5)
    for term in attend.own_terms:
        s = s + term.score(q, *(x[:, None, None] for x in places), 1.0)[:, 0]

    def softmax(times):
        p = jnp.exp(s - jnp.where(times > 0, s, -1e30).max(-1, keepdims=True)) * times
        p = p / jnp.maximum(p.sum(-1, keepdims=True), 1e-30)
        out = jnp.einsum("bhts,bshe->bthe", p, v)
        return out if values is None else out + jnp.einsum("bhts,btshe->bthe", p, jnp.broadcast_to(values, whole))

    if attend.combination == "mean":
        count = np.sum([each.any(-1) for each in sets], axis=0).swapaxes(1, 2)[..., None]
        return sum(softmax(each) for each in sets) / np.maximum(count, 1)
    return softmax(np.sum(sets, axis=0) if attend.combination == "rounds" else np.any(sets, axis=0))


def arrays(pattern, rng):
    """q, k, v, the pattern's selection, the sets of what is read, and positions."""
    q, k, v = (cases.normal(rng, 2, n, HEADS, WIDTH) for n in (LENGTH, LENGTH + EXTRA, LENGTH + EXTRA))
    q = cases.tied(pattern, q, k)
    selection = pattern.select(jnp.asarray(q), jnp.asarray(k))
    about = LENGTH, LENGTH + EXTRA, Visibility(), selection
    places = [np.asarray(side.position) for side in pattern.entries(*about)]
    return q, k, v, selection, dense.sets(pattern, *about), places


def wide(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tree)


@pytest.mark.parametrize(("pattern", "example", "terms"), [*EACH, *MORE])
def test_equals_a_vector_for_each_pair(pattern, example, terms, rng, quick_compilation):
    causal = cases.make(pattern, example, True) is not None
    attend = cases.make(pattern, example, causal)
    q, k, v, selection, sets, places = arrays(attend, rng)
    params = {name: split(name)[1] for name in terms}
    ahead, back = 0 if causal else LENGTH - 1, LENGTH + EXTRA - 1

    @jax.jit
    def run(params):
        terms_of = {name: (bound(name, params[name], ahead, back),) for name in terms}
        return {name: attend(q, k, v, terms=terms_of[name], selection=selection).out for name in terms}

    out = run(params)
    k, v = attend.summarise(jnp.asarray(k), jnp.asarray(v), Visibility())
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for name in terms:
            want = explicit(name, wide(params[name]), *wide((q, k, v)), attend, sets, places)
            assert oracle.error(out[name], want) < 1e-5, name


@pytest.mark.parametrize(("pattern", "example"), [("full", 0), ("sliding_window", 1), ("strided", 0)])
@pytest.mark.parametrize("term", ["xl", "shaw"])
def test_gradients(pattern, example, term, rng, quick_compilation):
    """By ranges, by ranges with gaps, and by arrays."""
    attend = cases.make(pattern, example, True)
    q, k, v, _, sets, places = arrays(attend, rng)
    params, weight = split(term)[1], rng.normal(size=(2, LENGTH, HEADS, WIDTH)).astype(np.float32)

    def loss(params, q, k, v):
        return (attend(q, k, v, terms=(bound(term, params, 0, LENGTH + EXTRA - 1),)).out * weight).sum()

    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(params, q, k, v)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):

        def wanted(params, q, k, v):
            return (explicit(term, params, q, k, v, attend, sets, places) * weight).sum()

        want = jax.grad(wanted, argnums=(0, 1, 2, 3))(*wide((params, q, k, v)))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert oracle.error(x, y) < 1e-5


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("queries", "keys", "step"), [(64, 71, 1), (5, 9, 1), (6, 4, 3)])
def test_ranges_equal_arrays(queries, keys, step, shared, rng):
    """Blocks before, across and beyond both ends of a table; 64 queries are taken in parts."""
    rows = jnp.asarray(cases.normal(rng, 1 if shared else HEADS, 40, WIDTH))
    term = DistanceTerm(keys=rows, values=rows[..., :4], last=30)
    q, weights = (jnp.asarray(cases.normal(rng, 2, 1, HEADS, queries, n)) for n in (WIDTH, keys))
    for gap in (-90, -3, 11, 200):
        where = Range(jnp.int32(50 + gap), queries, step), Range(jnp.int32(50), keys, step)
        apart = [x.positions for x in where]
        assert oracle.error(term.score(q, *where, 0.3), term.score(q, *apart, 0.3)) < 1e-6
        assert oracle.error(term.value(weights, *where), term.value(weights, *apart)) < 1e-6


def model(term, **stack):
    return Decoder(
        num_layers=2, width=8, num_heads=2, vocabulary_size=7, terms=(term,), rngs=nnx.Rngs(3),
        pattern=functools.partial(Heads, groups=((1, functools.partial(SlidingWindow, window=4)),) * 2),
        stack=functools.partial(Stack, **stack),
    )  # fmt: skip


def test_layers_have_their_own_under_scan(rng):
    tokens = jnp.asarray(rng.integers(0, 7, (2, 9)), jnp.int32)
    term = functools.partial(XLRelative, untie=True, dropout=0.5, bias="normal_1")
    one, other = model(term), model(term, scan=True)

    @nnx.jit
    def run(model, key):
        return model(tokens)[0], model(tokens, key=key, train=True)[0]

    want, trained = run(one, jax.random.key(1))
    for x, y in zip(run(other, jax.random.key(1)), (want, trained), strict=True):
        assert oracle.error(x, y) < 1e-5
    assert oracle.error(trained, want) > 1e-3
    one.terms[0].projection[...] = one.terms[0].projection[...][::-1]
    assert oracle.error(run(one, jax.random.key(1))[0], want) > 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: XLRelative(clamp_length=0, **SIZES, rngs=nnx.Rngs(0)), "clamp_length needs to be at least 1"),
        (lambda: XLRelative(dropout=1.0, **SIZES, rngs=nnx.Rngs(0)), "dropout needs to be at least 0 and below 1"),
        (lambda: XLRelative(**(SIZES | {"width": 7}), rngs=nnx.Rngs(0)), "needs an even width"),
        (lambda: ShawRelative(max_distance=0, **SIZES, rngs=nnx.Rngs(0)), "max_distance needs to be at least 1"),
        (lambda: LearnedDistance(length=0, **SIZES, rngs=nnx.Rngs(0)), "length needs to be at least 1"),
        (lambda: model(functools.partial(LearnedDistance, length=3))(jnp.zeros((1, 9), jnp.int32)),
         "distances up to 2, but 3 can occur: raise LearnedDistance.length to 4"),
        (lambda: bound("learned", split("learned")[1], 1, 4), "no vectors for keys after the query"),
        (lambda: full(*ONES, terms=(XL(),)), "each layer has a term of its own"),
        (lambda: full(*ONES, terms=(XL().layer(0),)), "call `within"),
    ],
    ids=range(9),
)  # fmt: skip
def test_mistakes(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_table_as_long_as_the_window_suffices():
    assert model(functools.partial(LearnedDistance, length=4))(jnp.zeros((1, 9), jnp.int32))[0].shape == (1, 9, 7)
