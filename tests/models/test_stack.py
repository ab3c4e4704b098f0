"""Layers stored as stacks: loop, scan and remat are one function, with one storage and one set of values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import ALiBi, Attended, Attention, Full, Heads, Pattern, Recurrence, Site, SlidingWindow, full
from lra.attention.full import FullRule
from lra.attention.pattern import Buffer
from lra.attention.promise import Promise
from lra.models import Decoder, FeedForward, Layer, Stack
from tests.attention import oracle

VOCABULARY, BATCH, LENGTH = 11, 2, 5


class Watched(Pattern):
    """Full attention that counts in a buffer, and whose loss and metric are the mean square of its keys."""

    promise = Promise(causal="strict", memory=True, padding=True, distances=True, dropout=True)
    rule = FullRule(causal=True)

    def __init__(self, *, site, rngs):
        self.seen = Buffer(jnp.zeros((2,)))
        super().__init__(site)

    @classmethod
    def examples(cls):
        return ({},)

    def __call__(self, q, k, v, *, visibility=None, terms=(), key=None, train=False, **_):
        size = jnp.mean(k**2)
        out = full(q, k, v, visibility=visibility, terms=terms, dropout=self.dropout_rate(train), key=key)
        return Attended(out, {"size": size}, {"size": size}, {"seen": self.seen[...] + jnp.stack([jnp.ones(()), size])})


window = functools.partial(SlidingWindow, window=3)
mixed = functools.partial(Heads, groups=((1, window), (1, Watched)))


def make(layers=4, pattern=(Watched, mixed), dropout=0.0, memory=None, **stack):
    return Decoder(
        num_layers=layers, width=6, num_heads=2, pattern=pattern, terms=(ALiBi,), dropout=dropout,
        attention=functools.partial(Attention, dropout=dropout),
        feed_forward=functools.partial(FeedForward, hidden=7, dropout=dropout),
        stack=functools.partial(Stack, dropout=dropout, **stack),
        memory=None if memory is None else functools.partial(Recurrence, length=memory),
        vocabulary_size=VOCABULARY, rngs=nnx.Rngs(2),
    )  # fmt: skip


def tokens(rng, *shape):
    return jnp.asarray(rng.integers(0, VOCABULARY, shape), jnp.int32)


def by_layer(model):
    """The state of each layer, from p stacks with leading axis L/p."""
    stacks = [nnx.split(layer)[1] for layer in model.stack.layers]
    period, layers = len(stacks), model.stack.num_layers
    assert all(len(x) == layers // period for x in jax.tree.leaves(stacks))
    return [jax.tree.map(lambda x, i=i: x[i // period], stacks[i % period]) for i in range(layers)]


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def compiled_step(model):
    """Loss and gradients of a segment by the model's parameters, and what `score` returned."""
    graph, parameters, buffers = nnx.split(model, nnx.Param, ...)

    def step(parameters, buffers, memory, x, key):
        def loss(parameters):
            model = nnx.merge(graph, parameters, buffers)
            scored = model.score(x[:, :-1], x[:, 1:], memory=memory, key=key, train=True)
            return scored.nats.mean() + sum(scored.losses.values()), scored

        return jax.value_and_grad(loss, has_aux=True)(parameters)

    fast = jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})  # a third of the time to compile
    return functools.partial(fast, parameters, buffers)


@pytest.mark.parametrize(
    ("norm", "dropout", "layers", "pattern", "options"),
    [
        ("post", 0.0, 4, (Watched, mixed), [(False, "none"), (True, "none")]),
        ("pre", 0.3, 4, (window, Watched), [(False, "none"), (True, "full")]),
        ("post", 0.3, 2, Watched, [(False, "none"), (False, "full"), (False, "dots"), (True, "dots")]),
    ],
    ids=("post", "pre-dropout", "post-dropout"),
)
def test_loop_scan_and_remat_are_one_function(norm, dropout, layers, pattern, options, rng):
    """The second of two segments: scores, gradients, memory, losses, metrics, updates; with dropout, the same masks."""
    x = tokens(rng, 2, BATCH, LENGTH + 1)
    results = []
    for scan, remat in options:
        model = make(layers, pattern, dropout, memory=3, norm=norm, scan=scan, remat=remat)
        step = compiled_step(model)
        (_, first), _ = step(model.initial_memory(BATCH, True), x[0], jax.random.key(0))
        results.append(step(first.memory, x[1], jax.random.key(1)))
    (loss, _), _ = step(first.memory, x[1], jax.random.key(2))
    want = results[0]
    assert (abs(loss - want[0][0]) > 1e-3) == (dropout > 0)  # another key, other masks
    for option, got in zip(options, results, strict=True):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for part, like in zip(got, want, strict=True):  # what is scored, then gradients
            pairs = list(zip(jax.tree.leaves(part), jax.tree.leaves(like), strict=True))
            for value, reference in pairs:
                np.testing.assert_array_equal(np.isnan(value), np.isnan(reference))
                assert oracle.error(np.nan_to_num(value), np.nan_to_num(reference)) < 1e-5, option
            flat = [np.concatenate([np.nan_to_num(x).ravel() for x in side]) for side in zip(*pairs, strict=True)]
            assert oracle.error(*flat) < 1e-6, option


def test_every_draw_has_its_own_key(rng, monkeypatch):
    """Of the embedding, and of each layer's attention weights, hidden units and both residual branches."""
    keys = []

    def spy(x, rate, key):
        keys.append(key)
        return x

    def attend(self, q, k, v, *, key=None, **options):
        keys.append(key)
        return Attended(v)

    for module in ("layer", "feed_forward", "decoder"):
        monkeypatch.setattr(f"lra.models.{module}.dropout", spy)
    monkeypatch.setattr(Watched, "__call__", attend)
    model = make(pattern=(Watched, mixed), dropout=0.3)
    for seed in (0, 1):
        model(tokens(rng, BATCH, LENGTH), key=jax.random.key(seed), train=True)
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == len(keys) == 2 * (1 + 4 * 4)


def test_losses_metrics_and_updates_by_layer(rng):
    """Layers 0 and 3 are watched, 1 and 4 are not, 2 and 5 are in a group of heads."""
    model, x = make(layers=6, pattern=(Watched, window, mixed)), tokens(rng, BATCH, LENGTH)
    _, output = model(x, train=True)
    assert {name: value.shape for name, value in output.metrics.items()} == {"size": (6,), "1.size": (6,)}
    size, inside = (np.asarray(output.metrics[name]) for name in ("size", "1.size"))
    np.testing.assert_array_equal(np.isnan(size), [False, True, True, False, True, True])
    np.testing.assert_array_equal(np.isnan(inside), [True, True, False, True, True, False])
    assert len({*size[[0, 3]], *inside[[2, 5]]}) == 4
    np.testing.assert_allclose(output.losses["size"], size[0] + size[3], rtol=1e-6)
    np.testing.assert_allclose(output.losses["1.size"], inside[2] + inside[5], rtol=1e-6)
    for turn in (1, 2):
        model.write(model(x, train=True)[1].updates)
        states = by_layer(model)
        for i, value in ((0, size[0]), (3, size[3]), (2, inside[2]), (5, inside[5])):
            pattern = states[i]["attention"]["pattern"]
            buffer = pattern["groups"][1]["seen"] if i in (2, 5) else pattern["seen"]
            np.testing.assert_allclose(buffer[...], [turn, turn * value], rtol=1e-6)


class Shaped(Watched):
    """Layers differ by a shape alone."""

    def __init__(self, *, sizes, site, rngs):
        super().__init__(site=site, rngs=rngs)
        self.table = nnx.Param(jnp.zeros((site.pick("Shaped.sizes", sizes),)))


def windows(*sizes):
    return functools.partial(SlidingWindow, window=sizes)


@functools.cache
def six_apart():
    """The states of six layers of which no two are equal."""
    return by_layer(make(layers=6, pattern=windows(6, 5, 4, 3, 2, 1)))


@pytest.mark.parametrize(
    ("pattern", "period"),
    [
        (Full, 1),
        ((Full, Full, Full), 1),
        ((Full, window), 2),
        ((window, window, Full), 3),
        ((Full, window, Full, window, Full, window), 2),
        (windows(4, 4, 4, 4, 4, 4), 1),
        (windows(2, 4, 2, 4, 2, 4), 2),
        (windows(2, 2, 4, 2, 2, 4), 3),
        (windows(1, 2, 3, 4, 1, 2), 6),  # equal at a distance of 4, which does not divide 6
        (windows(2, 2, 2, 2, 2, 4), 6),
        (functools.partial(Shaped, sizes=(1, 2, 1, 2, 1, 2)), 2),
    ],
    ids=["one", "same", "two", "three", "cycle", "all-equal", "alternating", "thirds", "four", "last", "shapes"],
)
def test_storage_and_values_of_any_period(pattern, period):
    """p stacks of L/p; layer i has the values of layer i of every other stack of as many layers."""
    model = make(layers=6, pattern=pattern)
    assert [layer.attention.query.kernel.shape for layer in model.stack.layers] == [(6 // period, 6, 6)] * period
    layers = by_layer(model)
    for layer, other in zip(layers, six_apart(), strict=True):
        for name in ("query", "key", "value", "output"):
            equal(layer["attention"][name], other["attention"][name])
        equal(layer["feed_forward"], other["feed_forward"])
    kernels = np.stack([layer["feed_forward"]["inner"]["kernel"][...] for layer in layers])
    assert len(np.unique(kernels)) == kernels.size


def test_values_come_from_the_layer_number():
    """Layer i is what its factory makes of fold_in(init_key, i)."""

    def layer(i, *, norm, dropout, rngs):
        attention = Attention(pattern=Full, site=Site(i, 4, 2, 3, 6), rngs=rngs)
        parts = {"attention": attention, "feed_forward": FeedForward(width=6, rngs=rngs), "memory": None}
        return Layer(norm=norm, dropout=dropout, **parts, width=6, rngs=rngs)

    stack = Stack(num_layers=4, width=6, layer=layer, rngs=nnx.Rngs(5))
    key = nnx.Rngs(5).params()
    (state,) = (nnx.split(layer)[1] for layer in stack.layers)
    for i in range(4):
        alone = layer(i, norm="pre", dropout=0.0, rngs=nnx.Rngs(params=jax.random.fold_in(key, i)))
        mine = jax.tree.map(lambda x, i=i: x[i], state)
        # Made one by one and under vmap, which are other programs: the last bit may differ.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mine, nnx.split(alone)[1])


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_one_tree_whatever_the_options(norm):
    graph, want = nnx.split(make(norm=norm))
    for options in ({"scan": True}, {"remat": "full"}, {"scan": True, "remat": "dots"}):
        other, state = nnx.split(make(norm=norm, **options))
        assert jax.tree.structure(state) == jax.tree.structure(want)
        equal(state, want)
        assert other != graph


def lowered(*, layers, **options):
    """The program of a training step before XLA sees it."""
    model = make(layers=layers, pattern=Full, memory=3, **options)
    step, x = compiled_step(model), jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
    return step.func.lower(*step.args, model.initial_memory(BATCH, True), x, jax.random.key(0)).as_text()


def test_a_scan_of_more_layers_is_no_longer_program():
    """Its lines, which compile time follows."""
    short, long = (len(lowered(layers=layers, scan=True).splitlines()) for layers in (2, 8))
    assert long <= 1.3 * short
    assert len(lowered(layers=4).splitlines()) > 1.3 * len(lowered(layers=2).splitlines())


def test_remat_computes_again_what_it_does_not_save():
    """Products in the program: with "dots", those of attention are repeated; with "full", all of a layer."""
    none, dots, full = (lowered(layers=1, remat=remat).count("dot_general") for remat in ("none", "dots", "full"))
    assert none < dots < full
