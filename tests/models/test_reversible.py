"""Reversible layers: the gradient of the same function by ordinary differentiation, memory, storage, mistakes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import Attention, CompressiveMemory, Full, Heads, Recurrence, Rotary, SlidingWindow
from lra.attention.terms import ALiBiTerm, TermModule
from lra.attention.visibility import Visibility
from lra.models import Decoder, FeedForward, Reversible, Softmax, Stack
from tests.attention import oracle
from tests.attention.test_selection import Sides
from tests.models.test_stack import Watched, by_layer, equal, mixed

VOCABULARY, BATCH, LENGTH, WIDTH = 11, 2, 5, 6
window = functools.partial(SlidingWindow, window=3)
recurrence = functools.partial(Recurrence, length=3)
compressive = functools.partial(CompressiveMemory, length=5, compressed_length=2, rate=5)


class Learned(TermModule):
    """ALiBi with slopes that are parameters, shared by all layers."""

    distances = True

    def __init__(self, *, num_heads, **_):
        self.slopes = nnx.Param(jnp.linspace(0.2, 0.5, num_heads))

    def __call__(self):
        return ALiBiTerm(self.slopes[...])


def make(layers=4, pattern=Full, dropout=0.0, memory=None, terms=(), stack=Reversible, **options):
    return Decoder(
        num_layers=layers, width=WIDTH, num_heads=2, pattern=pattern, terms=terms,
        attention=functools.partial(Attention, dropout=dropout),
        feed_forward=functools.partial(FeedForward, hidden=7, dropout=dropout, **options),
        stack=functools.partial(stack, dropout=dropout), head=functools.partial(Softmax, tied=False),
        memory=memory, vocabulary_size=VOCABULARY, rngs=nnx.Rngs(2),
    )  # fmt: skip


def layers_of(model, memory):
    """Each layer with its own values, and its memory."""
    period = len(model.stack.layers)
    graphs = [nnx.split(layer)[0] for layer in model.stack.layers]
    for i, state in enumerate(by_layer(model)):
        own = None if memory is None else jax.tree.map(lambda a, i=i: a[i // period], memory[i % period])
        yield nnx.merge(graphs[i % period], state), own


def ordinary(model, x, *, memory, visibility, terms, key):
    """Equations 9 of the paper in a loop, for JAX to differentiate; the output, and effects of each layer."""
    x1 = x2 = x
    effects = []
    for i, (layer, own) in enumerate(layers_of(model, memory)):
        layer_key = jax.random.fold_in(key, i)
        mine = tuple(term.layer(i) for term in terms)
        added, effect, _ = layer.attend(x2, own, visibility, mine, layer_key, True)
        x1 = x1 + added
        x2 = x2 + layer.feed(x1, layer_key, True)
        effects.append(effect)
    return model.stack.final_norm(jnp.concatenate([x1, x2], axis=-1)), effects


CASES = {
    "effects": {"pattern": (Watched, mixed), "dropout": 0.3, "memory": recurrence, "terms": (Learned,)},
    "content": {"pattern": (Sides, functools.partial(Heads, groups=((1, window), (1, Sides))))},
    "one-kind": {"layers": 3, "pattern": window, "terms": (Rotary, Learned), "chunk": 2, "memory": compressive},
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_ordinary_differentiation(case, rng):
    """Of parameters, terms, input and memory, from output, losses, metrics and the memory handed on; and all values."""
    model = make(**CASES[case])
    graph, parameters, buffers = nnx.split(model, nnx.Param, ...)
    memory = model.initial_memory(BATCH, True)
    memory = jax.tree.map(
        lambda a: jnp.asarray(rng.random(a.shape) < 0.7 if a.dtype == bool else rng.normal(size=a.shape), a.dtype),
        memory,
    )
    x = jnp.asarray(rng.normal(size=(BATCH, LENGTH, WIDTH)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(BATCH, LENGTH, 2 * WIDTH)), jnp.float32)
    visibility = Visibility.tokens(
        valid=jnp.asarray(np.arange(LENGTH)[None] < [[LENGTH], [3]]), token=jnp.ones((BATCH, LENGTH), jnp.int32)
    )
    given = {"visibility": visibility if model.stack.layers[0].attention.pattern.promise.padding else None}
    given["key"] = jax.random.key(7)

    def loss(parameters, x, memory, own):
        model = nnx.merge(graph, parameters, buffers)
        terms = tuple(term() for term in model.terms)
        if own:
            output = model.stack(x, memory=memory, terms=terms, train=True, **given)
            y, losses, metrics, updates = output.x, output.losses, output.metrics, output.updates
            hidden = output.memory
        else:
            y, effects = ordinary(model, x, memory=memory, terms=terms, **given)
            period = len(model.stack.layers)
            names, known = ({name for effect in effects for name in effect[n]} for n in (1, 2))
            losses = {name: sum(effect[1].get(name, jnp.zeros(())) for effect in effects) for name in names}
            metrics = {n: jnp.stack([e[2].get(n, jnp.full((), jnp.nan)) for e in effects]) for n in known}
            stacked = [jax.tree.map(lambda *a: jnp.stack(a), *effects[r::period]) for r in range(period)]
            updates, hidden = tuple(each[3] for each in stacked), [each[0] for each in stacked]
        hidden = [leaf for leaf in jax.tree.leaves(hidden) if leaf.dtype == jnp.float32]
        value = (y * weights).sum() + sum(losses.values())
        value += sum(jnp.nansum(metric[:2] ** 2) for metric in metrics.values()) + sum(h.sum() for h in hidden)
        return value, (y, losses, metrics, updates, hidden)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True, allow_int=True), static_argnames="own")
    got, want = (run(parameters, x, memory, own=own) for own in (True, False))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    (value, likeness) = (got[0], want[0])
    for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(likeness), strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        assert oracle.error(np.nan_to_num(a), np.nan_to_num(b)) < 1e-5
    pairs = [
        (a, b) for a, b in zip(*map(jax.tree.leaves, (got[1], want[1])), strict=True) if a.dtype != jax.dtypes.float0
    ]
    assert all(oracle.error(a, b) < 1e-4 for a, b in pairs if np.abs(b).max() > 0)
    nothing = [a for a, b in pairs if not np.abs(b).max()]
    assert all(not np.abs(a).max() for a in nothing)
    assert len(pairs) - len(nothing) > 12


class Counted(Sides):
    """Selects by an operation that nothing else uses."""

    def select(self, q, k, *, visibility=None, key=None, train=False):
        return jax.lax.population_count((k[..., 0] > 0).astype(jnp.int32))


def test_nothing_is_selected_again(rng):
    """Inputs that come back differ in their last bits, which can change what is selected."""
    graph, state = nnx.split(make(layers=6, pattern=Counted))
    x = jnp.zeros((1, LENGTH), jnp.int32)
    loss = lambda state: nnx.merge(graph, state).score(x, x, train=True).nats.sum()  # noqa: E731
    assert [str(jax.make_jaxpr(each)(state)).count("= population_count") for each in (loss, jax.grad(loss))] == [1, 1]


def test_two_calls_are_one_and_another_key_is_another(rng):
    """With dropout: the recomputation draws what the forward pass drew, or gradients would not be those above."""
    model = make(layers=2, pattern=window, dropout=0.5)
    graph, state = nnx.split(model)
    x = jnp.asarray(rng.integers(0, VOCABULARY, (BATCH, LENGTH)), jnp.int32)
    run = jax.jit(jax.grad(lambda state, key: nnx.merge(graph, state).score(x, x, key=key, train=True).nats.sum()))
    first, again, other = (run(state, jax.random.key(seed)) for seed in (0, 0, 1))
    equal(first, again)
    kernels = [gradient["stack"]["layers"][0]["attention"]["value"]["kernel"][...] for gradient in (first, other)]
    assert oracle.error(*kernels) > 1e-2


def temporary(layers):
    """Bytes of a training step of so many layers, beside its arguments and its gradients."""
    model = Decoder(
        num_layers=layers, width=16, num_heads=2, pattern=window, stack=Reversible, vocabulary_size=VOCABULARY,
        head=functools.partial(Softmax, tied=False), memory=functools.partial(Recurrence, length=64), rngs=nnx.Rngs(0),
    )  # fmt: skip
    graph, state = nnx.split(model)
    x, memory = jnp.zeros((1, 512), jnp.int32), model.initial_memory(1, True)

    def loss(state, memory):
        scored = nnx.merge(graph, state).score(x, x, memory=memory, train=True)
        return scored.nats.sum(), scored.memory

    return jax.jit(jax.grad(loss, has_aux=True)).lower(state, memory).compile().memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_depth():
    assert temporary(12) <= 1.3 * temporary(3)


def test_inputs_come_back(rng):
    """Through 12 layers, in float32: the inverse in a loop of its own."""
    model = make(layers=12)
    x = jnp.asarray(rng.normal(size=(BATCH, LENGTH, WIDTH)), jnp.float32)

    @jax.jit
    def back(x):
        x1 = x2 = x
        layers = [layer for layer, _ in layers_of(model, None)]
        for layer in layers:
            x1 = x1 + layer.attend(x2, None, None, (), None, False)[0]
            x2 = x2 + layer.feed(x1, None, False)
        for layer in layers[::-1]:
            x2 = x2 - layer.feed(x1, None, False)
            x1 = x1 - layer.attend(x2, None, None, (), None, False)[0]
        return x1, x2

    assert all(oracle.error(each, x) < 3e-6 for each in back(x))


def test_segments_with_enough_memory_equal_one_pass(rng):
    """What is remembered is what attention reads, X2."""
    tokens = rng.integers(0, VOCABULARY, (BATCH, 12)).astype(np.int32)
    run = nnx.jit(lambda model, x, memory: (lambda y: (y[0], y[1].memory))(model(x, memory=memory)))
    want, _ = run(make(terms=(Rotary,)), tokens, None)
    model, parts = make(terms=(Rotary,), memory=functools.partial(Recurrence, length=8)), []
    memory = model.initial_memory(BATCH, False)
    for start in range(0, 12, 4):
        logits, memory = run(model, tokens[:, start : start + 4], memory)
        parts.append(logits)
    assert oracle.error(jnp.concatenate(parts, axis=1), want) < 1e-5
    assert oracle.error(parts[1], run(model, tokens[:, 4:8], model.initial_memory(BATCH, False))[0]) > 1e-2


def test_layers_are_those_of_any_stack():
    """Stored alike, from the same values; the output has both streams."""
    model, other = make(pattern=(Full, window)), make(pattern=(Full, window), stack=Stack)
    equal(nnx.state(model.stack.layers), nnx.state(other.stack.layers))
    assert model.stack.final_norm.scale.shape == (2 * WIDTH,)
    assert model.head.projection.shape == (2 * WIDTH, VOCABULARY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stack": Reversible}, "the stack gives vectors of 12, but .* has 6, .*: set Softmax.tied = False"),
        ({"stack": functools.partial(Reversible, dropout=1.0)}, "Reversible.dropout needs to be .* below 1, got 1.0"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        Decoder(num_layers=1, width=6, num_heads=2, pattern=Full, vocabulary_size=3, **options, rngs=nnx.Rngs(0))
