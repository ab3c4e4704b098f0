"""Micro-batches are the whole batch: in gradients, auxiliary losses, buffers and memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import Full
from lra.attention.pattern import Buffer
from lra.data import Batch, Streams
from lra.errors import UserError
from lra.models.parameters import named
from lra.training.compiled import padded
from lra.training.gradients import make_gradients

ROWS, SEGMENT = 6, 8


class Watching(Full):
    """Full attention with an auxiliary loss and buffers that depend on what is read."""

    def __init__(self, *, site, rngs):
        super().__init__(site=site, rngs=rngs)
        self.count, self.mean = Buffer(jnp.zeros((), jnp.int32)), Buffer(jnp.ones(site.head_dim))

    def __call__(self, q, k, v, *, visibility=None, train=False, **options):
        attended = super().__call__(q, k, v, visibility=visibility, train=train, **options)
        valid = None if visibility is None else visibility.q_valid
        weight = jnp.ones(q.shape[:2]) if valid is None else valid
        mean = (q * weight[..., None, None]).sum((0, 1, 2)) / weight.sum() / q.shape[2]
        return dataclasses.replace(
            attended,
            losses={"size": 0.1 * mean.sum()},
            metrics={"mean": mean.sum()},
            updates={"count": self.count[...] + 1, "mean": 0.75 * self.mean[...] + 0.25 * mean},
        )


def make_batches(rng, weights):
    for reset in (True, False):
        text = rng.integers(0, 256, (ROWS, SEGMENT + 1), np.int32)
        yield Batch(text[:, :-1], text[:, 1:], weights, np.full(ROWS, reset))


def weights_of(kind):
    weights = np.ones((ROWS, SEGMENT), np.float32)
    if kind == "uneven":  # 2 to 13 targets a micro-batch of two rows
        weights[0, 1:], weights[1, 1:], weights[2, 6:], weights[3, 7:], weights[5, 4:] = 0, 0, 0, 0, 0
    elif kind == "one micro-batch of padding":
        weights[2:4] = 0
    return weights


@pytest.fixture(scope="module")
def experiment(tiny):
    return tiny.experiment(
        model=tiny.model(pattern=Watching, dropout=0.0),
        data=functools.partial(Streams, batch_size=ROWS, segment=SEGMENT),
    )


def close(left, right):
    assert named(left).keys() == named(right).keys()
    for name, x in named(left).items():
        y = np.asarray(named(right)[name], np.float64)
        scale = np.sqrt((y**2).mean()) + 1e-30
        assert np.sqrt(((np.asarray(x, np.float64) - y) ** 2).mean()) <= 3e-6 * scale, name


@pytest.fixture(scope="module")
def gradients(experiment):
    """Compiled gradients by the number of micro-batches."""
    make = functools.partial(make_gradients, experiment.graph, seed=0)
    return functools.cache(lambda accumulate: jax.jit(make(accumulate=accumulate), static_argnums=2))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "accumulate"),
    [("full", 3), ("uneven", 2), pytest.param("full", 2, marks=SLOW), pytest.param("uneven", 3, marks=SLOW)],
)
def test_micro_batches_are_the_whole_batch(experiment, gradients, rng, accumulate, kind):
    """Two batches one after the other, so that memory is carried; gradients are compared before any update."""
    _, state = experiment.initial()
    weights = weights_of(kind)
    whole, parts = gradients(1), gradients(accumulate)
    other = state
    for batch in make_batches(rng, weights):
        arrays = dataclasses.asdict(batch)
        expected, summed = whole(state, arrays, kind != "full")
        other_gradients, other_summed = parts(other, arrays, kind != "full")
        close(other_gradients, expected)
        close(other_summed, summed)
        state, other = (dataclasses.replace(state, memory=x.memory) for x in (summed, other_summed))
    assert int(summed.updates[0]["count"][0]) == 1
    assert jax.tree.leaves(state.memory)[1].all() == (kind == "full")  # the second segment's validity, row by row


def test_padding_alone_in_a_micro_batch_counts_for_nothing(tiny, rng):
    experiment = tiny.experiment(
        model=tiny.model(dropout=0.0, memory=False), data=functools.partial(Streams, batch_size=ROWS, segment=SEGMENT)
    )
    _, state = experiment.initial()
    batch = dataclasses.asdict(next(make_batches(rng, weights_of("one micro-batch of padding"))))
    (gradients, summed), (other, other_summed) = (
        jax.jit(make_gradients(experiment.graph, seed=0, accumulate=n), static_argnums=2)(state, batch, True)
        for n in (1, 3)
    )
    close(other, gradients)
    close(other_summed.nats, summed.nats)


def test_what_is_not_scored_is_read_all_the_same(tiny, rng):
    """Targets of weight 0 that are no padding: the nats of the others are those of the whole batch."""
    experiment = tiny.experiment(model=tiny.model(dropout=0.0, memory=False))
    _, state = experiment.initial()
    whole = next(make_batches(rng, weights_of("full")))
    weights = np.where(np.arange(SEGMENT) < SEGMENT // 2, 0, 1).astype(np.float32) * np.ones((ROWS, 1), np.float32)
    batch = dataclasses.replace(whole, weights=weights)
    assert batch.valid.all()
    _, summed = jax.jit(make_gradients(experiment.graph, seed=0), static_argnums=2)(
        state, dataclasses.asdict(batch), padded(batch)
    )
    nats = experiment.model(state).score(whole.inputs, whole.targets).nats
    np.testing.assert_allclose(summed.nats, nats[weights > 0].mean(), rtol=1e-5)


def test_dropout_differs_between_micro_batches(tiny, rng):
    """Equal rows in two micro-batches have different losses under dropout, and equal ones without."""
    text = np.tile(rng.integers(0, 256, (1, SEGMENT + 1), np.int32), (2, 1))
    batch = dataclasses.asdict(Batch(text[:, :-1], text[:, 1:], np.ones((2, SEGMENT), np.float32), np.ones(2, bool)))
    for rate in (0.0, 0.5):
        experiment = tiny.experiment(
            model=tiny.model(dropout=rate), data=functools.partial(Streams, batch_size=2, segment=SEGMENT)
        )
        _, state = experiment.initial()
        gradients = jax.jit(make_gradients(experiment.graph, seed=0, accumulate=2), static_argnums=2)
        _, summed = gradients(state, batch, False)
        hidden = summed.memory[0].hidden[1]  # the inputs of the second layer [B, M, C]
        assert bool((hidden[0] == hidden[1]).all()) == (rate == 0.0)


def test_micro_batches_that_do_not_divide_the_batch_are_refused(tiny):
    with pytest.raises(UserError, match=r"Training.accumulate is 2, which does not divide the 3 rows"):
        tiny.experiment(training={"accumulate": 2}).build()
    with pytest.raises(UserError, match=r"Training.accumulate is 0"):
        tiny.experiment(training={"accumulate": 0})


def test_buffers_are_written_once_a_step(experiment, rng):
    from lra.training import make_step

    step = make_step(experiment.graph, experiment.optimizer, total_steps=4, seed=0, accumulate=3)
    _, state = experiment.initial()
    for batch in make_batches(rng, weights_of("full")):
        state, metrics = step(state, batch)
    pattern = nnx.merge(experiment.graph, state.parameters, state.buffers).stack.layers[0].attention.pattern
    np.testing.assert_array_equal(pattern.count[...], [2, 2])
    assert metrics["layer/mean"].shape == (2,)
    assert int(state.step) == 2
