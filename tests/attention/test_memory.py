"""Recurrence: which tokens it holds, that segments equal one pass, how far it reaches, and what passes a gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import ALiBi, Full, Recurrence, Rotary, SlidingWindow, XLRelative
from lra.attention.memory import Remembered
from lra.models import Decoder, Stack
from tests.attention import oracle

VOCABULARY = 17


def recurrence(**options):
    return Recurrence(**options, width=1, rngs=nnx.Rngs(0))


@functools.cache
def make(pattern=Full, terms=(), norm="pre", layers=2, **memory):
    """A decoder whose parameters don't depend on its memory, with embeddings as large as what is added to them."""
    model = Decoder(
        num_layers=layers, width=8, num_heads=2, pattern=pattern, terms=terms,
        memory=functools.partial(Recurrence, **memory) if memory else None,
        stack=functools.partial(Stack, norm=norm), vocabulary_size=VOCABULARY, rngs=nnx.Rngs(3),
    )  # fmt: skip
    model.embedding.embedding[...] *= 30
    return model


@nnx.jit
def forward(model, tokens, memory=None, valid=None):
    logits, output = model(tokens, memory=memory, valid=valid)
    return logits, output.memory


def segments(model, tokens, size, memory=None):
    """Logits of all tokens, `size` at a time, and the memory at the end."""
    memory = model.initial_memory(len(tokens), True) if memory is None else memory
    logits = []
    for start in range(0, tokens.shape[1], size):
        part, memory = forward(model, tokens[:, start : start + size], memory)
        logits.append(part)
    return jnp.concatenate(logits, axis=1), memory


def draw(rng, rows, length):
    return rng.integers(0, VOCABULARY, (rows, length)).astype(np.int32)


@pytest.mark.parametrize(
    ("length", "size", "want"),
    [
        (5, 3, [[0, 1, 2], [1, 2, 3, 4, 5], [4, 5, 6, 7, 8]]),
        (2, 3, [[1, 2], [4, 5], [7, 8]]),
        (3, 3, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        (9, 3, [[*range(3)], [*range(6)], [*range(9)]]),
    ],
)
def test_what_is_held_after_each_segment(length, size, want):
    memory = recurrence(length=length)
    state = memory.initial(1, train=True)
    assert not memory.read(state).filled.any()
    for start, values in zip(range(0, 9, size), want, strict=True):
        x = jnp.arange(start, start + size, dtype=jnp.float32).reshape(1, size, 1)
        state, losses, metrics = memory.update(state, x, None, None, True)
        hidden, valid = memory.read(state).inputs, memory.read(state).filled
        assert hidden.shape == (1, length, 1)
        assert hidden[0, -len(values) :, 0].tolist() == values
        assert valid[0].tolist() == [False] * (length - len(values)) + [True] * len(values)
        assert (losses, metrics) == ({}, {})
        gradient = jax.grad(lambda x, state=state: memory.update(state, x, None, None, True)[0].hidden.sum())(x)
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize(
    ("window", "term", "norm"),
    [(None, Rotary, "pre"), (None, XLRelative, "post"), (5, ALiBi, "pre"), (5, Rotary, "post")],
)
def test_segments_with_enough_memory_equal_one_pass(window, term, norm, rng):
    pattern = Full if window is None else functools.partial(SlidingWindow, window=window)
    tokens = draw(rng, 2, 12)
    model = make(pattern, (term,), norm, length=8)
    want, _ = forward(make(pattern, (term,), norm), tokens)
    assert oracle.error(segments(model, tokens, 4)[0], want) < 1e-5
    assert oracle.error(segments(model, tokens[:, 4:8], 4)[0], want[:, 4:8]) > 1e-2


@pytest.mark.parametrize(
    ("size", "length", "layers", "reach", "norm", "terms"),
    [
        (1, 3, 2, 6, "pre", ()),
        (3, 3, 2, 6, "pre", ()),
        (2, 1, 3, 5, "pre", ()),  # what is remembered has read its own segment from its start
        (3, 3, 2, 6, "post", (XLRelative,)),  # Transformer-XL
    ],
)
def test_reach_is_layers_times_length(size, length, layers, reach, norm, terms, rng):
    """Row i of the batch has another token at i; of the last segment, the first token reads `reach` tokens back."""
    total = 12
    tokens = np.tile(draw(rng, 1, total), (total + 1, 1))
    tokens[np.arange(total), np.arange(total)] += 1
    tokens %= VOCABULARY
    model = make(terms=terms, norm=norm, layers=layers, length=length)
    logits = np.asarray(segments(model, tokens, size)[0])[:, total - size]
    moved = np.abs(logits[:-1] - logits[-1]).max(-1)
    inside = np.arange(total - size - reach, total - size + 1)
    assert moved[inside].min() > 1e-4
    assert np.delete(moved, inside).max() < 1e-6


@pytest.mark.parametrize("term", [ALiBi, XLRelative])
def test_no_gradient_into_the_memory_but_through_it(term, rng):
    """By memory: exactly 0. By parameters: the slope of the loss with what is remembered held fixed.

    The targets follow the segment's first token alone, so that all of a term but distance 0 comes from the memory.
    """
    tokens, targets = draw(rng, 2, 5), draw(rng, 2, 1)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        graph, state = nnx.split(make(terms=(term,), length=4))
        state = jax.tree.map(lambda x: x.astype(jnp.float64), state)

        @jax.jit
        def remember(state):
            model = nnx.merge(graph, state)
            return model(tokens[:, :4], memory=model.initial_memory(2, True))[1].memory

        @jax.jit
        def loss(state, hidden, memory):
            memory = jax.tree.map(lambda x: x if x.dtype == bool else hidden, memory)
            return nnx.merge(graph, state).score(tokens[:, 4:], targets, memory=memory).nats.mean()

        memory = remember(state)
        hidden = memory[0].hidden
        gradient, by_hidden = jax.grad(loss, argnums=(0, 1))(state, hidden, memory)
        np.testing.assert_array_equal(by_hidden, 0)
        assert abs(loss(state, hidden, memory) - loss(state, hidden[:, :, ::-1] * 2, memory)) > 1e-3
        both = jax.grad(lambda state: loss(state, *(lambda m: (m[0].hidden, m))(remember(state))))(state)
        jax.tree.map(np.testing.assert_array_equal, both, gradient)

        slopes = dict(jax.tree_util.tree_leaves_with_path(gradient))
        read = [path for path in slopes if {"key", "value", "terms"} & {getattr(one, "key", None) for one in path}]
        assert len(read) == (2 if term is ALiBi else 5)
        for path in read:
            direction = rng.normal(size=slopes[path].shape)

            def moved(step, path=path, direction=direction):
                other = jax.tree_util.tree_map_with_path(lambda at, x: x + step * direction if at == path else x, state)
                return loss(other, hidden, memory)

            slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
            assert abs(slope) > 1e-4
            np.testing.assert_allclose(np.vdot(slopes[path], direction), slope, rtol=1e-6)


def test_reset_rows_are_like_new(rng):
    model, tokens, more = make(terms=(Rotary,), length=5), draw(rng, 3, 7), draw(rng, 3, 4)
    _, memory = segments(model, tokens, 7)
    kept, new = forward(model, more, memory)[0], forward(model, more, model.initial_memory(3, True))[0]
    got = forward(model, more, model.reset_memory(memory, jnp.asarray([False, True, False])))[0]
    assert oracle.error(got[jnp.asarray([0, 2])], kept[jnp.asarray([0, 2])]) < 1e-6
    assert oracle.error(got[1], new[1]) < 1e-6
    assert oracle.error(kept[1], new[1]) > 1e-2
    assert make().reset_memory(None, jnp.ones(3, bool)) is None


def test_evaluation_has_its_own_length(rng):
    tokens = draw(rng, 2, 12)
    model = make(length=2, evaluation_length=7)
    for options, slots in (((True,), 2), ((False,), 7), ((True, 4), 4), ((False, 4), 4)):
        (state,) = model.initial_memory(3, *options)
        assert (state.hidden.shape, state.valid.shape) == ((2, 3, slots, 8), (2, 3, slots))
    assert make(length=2).initial_memory(3, False)[0].valid.shape == (2, 3, 2)
    assert make().initial_memory(3, False) is None
    got, _ = segments(model, tokens, 3, model.initial_memory(2, False))
    assert oracle.error(got, segments(make(length=7), tokens, 3)[0]) < 1e-6
    assert oracle.error(got, segments(model, tokens, 3)[0]) > 1e-2


def test_zeros_at_the_start_are_read(rng):
    """As released in TensorFlow: a memory of zeros counts as filled, also after a reset."""
    model, tokens = make(terms=(ALiBi,), norm="post", length=5, start="zeros"), draw(rng, 2, 4)
    start = model.initial_memory(2, True)
    assert start[0].valid.all()
    assert not start[0].hidden.any()
    want, memory = forward(model, tokens, start)
    assert oracle.error(want, forward(make(terms=(ALiBi,), norm="post"), tokens)[0]) > 1e-2
    rows = jnp.asarray([False, True])
    got = forward(model, tokens, model.reset_memory(memory, rows))[0]
    assert oracle.error(got[1], want[1]) < 1e-6
    assert oracle.error(got[0], want[0]) > 1e-2
    with pytest.raises(ValueError, match=r"Recurrence\.start needs to be 'empty' or 'zeros', got 'random'"):
        recurrence(length=2, start="random")


def test_a_memory_of_no_slots_stays_empty():
    memory = recurrence(length=3)
    state, _, _ = memory.update(memory.initial(1, False, length=0), jnp.ones((1, 4, 1)), None, None, False)
    assert state.hidden.shape == (1, 0, 1)
    assert state.valid.shape == (1, 0)


def test_padding_is_remembered_as_nothing(rng):
    """Without terms by distance, tokens after paddings at either end read the same."""
    tokens, more = draw(rng, 2, 5), draw(rng, 2, 3)
    model = make(length=7)
    want, _ = segments(model, np.concatenate([tokens, more], axis=1), 5)
    for before, after in ((0, 2), (2, 0), (1, 1)):
        wide = np.concatenate([draw(rng, 2, before), tokens, draw(rng, 2, after)], axis=1)
        valid = np.pad(np.ones((2, 5), bool), ((0, 0), (before, after)))
        logits, memory = forward(model, wide, model.initial_memory(2, True), valid)
        assert oracle.error(logits[:, before : before + 5], want[:, :5]) < 1e-5
        np.testing.assert_array_equal(memory[0].valid, np.broadcast_to(valid, (2, *valid.shape)))
        assert oracle.error(forward(model, more, memory)[0], want[:, 5:]) < 1e-5


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_nan_in_empty_slots_is_harmless(norm, rng):
    """For the scores and for every gradient."""
    model, tokens = make(Full, (ALiBi,), norm, length=6), draw(rng, 2, 4)
    _, memory = segments(model, tokens, 4)
    graph, state = nnx.split(model)

    @jax.jit
    def loss(state, memory):
        return nnx.merge(graph, state).score(tokens, tokens, memory=memory).nats.mean()

    def poisoned(x):
        return x if x.dtype == bool else jnp.where(memory[0].valid[..., None], x, jnp.nan)

    want, got = (jax.value_and_grad(loss)(state, m) for m in (memory, jax.tree.map(poisoned, memory)))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("options", [{"length": 0}, {"length": 3, "evaluation_length": 0}, {"length": -1}], ids=str)
def test_lengths_below_one(options):
    with pytest.raises(ValueError, match=r"Recurrence\.(evaluation_)?length needs to be at least 1 .*got (0|-1)"):
        recurrence(**options)


def test_nothing_is_left_of_slots_out_of_reach():
    """Slots with positions of their own, before a window of a single key."""
    past = Remembered(jnp.ones((1, 2, 1)), jnp.ones((1, 2), bool), (("memory", 2),), (-5, -2))
    assert past.newest(2).span == 2
    assert past.newest(0).span == 0
