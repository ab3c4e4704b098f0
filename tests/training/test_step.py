import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lra.attention import Full, SlidingWindow
from lra.attention.pattern import Buffer
from lra.data import Batch, Windows
from lra.training import make_step


def make_batch(rng, rows=3, segment=8, **fields) -> Batch:
    text = rng.integers(0, 256, (rows, segment + 1), np.int32)
    batch = Batch(text[:, :-1], text[:, 1:], np.ones((rows, segment), np.float32), np.zeros(rows, bool))
    return dataclasses.replace(batch, **({"valid": None} | fields))  # what is scored, unless given


def setup(experiment, **options):
    step = make_step(
        experiment.graph, experiment.optimizer, total_steps=experiment.training.steps, seed=experiment.seed, **options
    )
    return step, experiment.initial()[1]


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def differing(left, right) -> list[str]:
    """Names of leaves that are not equal bit for bit."""
    paired = zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True)
    return [jax.tree_util.keystr(path) for (path, x), y in paired if np.asarray(x).tobytes() != np.asarray(y).tobytes()]


def test_the_loss_is_the_weighted_mean_of_nats(tiny, rng):
    experiment = tiny.experiment(model=tiny.model(dropout=0.0, memory=False))
    step, state = setup(experiment, bytes_per_token=2.0)
    weights = np.ones((3, 8), np.float32)
    weights[0, 5:], weights[2, 2:] = 0, 0
    batch = make_batch(rng, weights=weights)

    def loss(parameters):
        model = nnx.merge(experiment.graph, parameters, state.buffers)
        logits, _ = model(batch.inputs)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        return (nats * weights).sum() / weights.sum()

    expected, gradients = jax.value_and_grad(loss)(state.parameters)
    norm = math.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradients)))
    _, metrics = step(state, batch)
    assert metrics["tokens"] == weights.sum() == 15
    np.testing.assert_allclose(metrics["loss_nats"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["bits_per_byte"], expected / math.log(2) / 2, rtol=1e-5)
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-4)
    assert norm > 1.0, "the norm is reported before clipping to 1"


@pytest.fixture(scope="module")
def usual(tiny):
    """The experiment with memory and dropout, and its step, compiled once."""
    experiment = tiny.experiment()
    return experiment, setup(experiment)[0]


def test_what_stands_under_padding_changes_nothing(usual, rng):
    experiment, step = usual
    _, state = experiment.initial()
    weights = np.ones((3, 8), np.float32)
    weights[:, 2:5] = 0
    batch = make_batch(rng, weights=weights)
    inputs, targets = batch.inputs.copy(), batch.targets.copy()
    inputs[:, 2:5], targets[:, 2:5] = 0, 0
    other = dataclasses.replace(batch, inputs=inputs, targets=targets)
    first, _ = step(copied(state), batch)
    second, _ = step(state, other)
    assert not differing(first.parameters, second.parameters)


def test_a_batch_of_padding_has_loss_zero(usual, rng):
    experiment, step = usual
    _, state = experiment.initial()
    before = copied(state.parameters)
    state, metrics = step(state, make_batch(rng, weights=np.zeros((3, 8), np.float32)))
    assert metrics["loss_nats"] == 0 == metrics["tokens"]
    assert metrics["gradient_norm"] == 0
    assert not differing(before, state.parameters)


def test_rows_that_begin_anew_have_no_memory(tiny, rng):
    step, state = setup(tiny.experiment(model=tiny.model(dropout=0.0)))
    state, _ = step(state, make_batch(rng))
    batch = make_batch(rng)
    row = np.array([False, True, False])
    empty = jax.tree.map(lambda x: x.at[:, 1].set(jnp.zeros((), x.dtype)), state.memory)
    emptied = dataclasses.replace(state, memory=empty)
    kept, kept_metrics = step(copied(state), batch)
    by_hand, _ = step(copied(emptied), batch)
    reset, metrics = step(state, dataclasses.replace(batch, reset=row))
    assert not differing(reset, by_hand)
    assert metrics["loss_nats"] != kept_metrics["loss_nats"]
    assert differing(reset.parameters, kept.parameters)


def test_dropout_follows_seed_and_step(tiny, usual, rng):
    experiment, step = usual
    _, state = experiment.initial()
    batch = make_batch(rng)

    def loss(**fields):
        return float(step(dataclasses.replace(copied(state), **fields), batch)[1]["loss_nats"])

    assert loss() == loss()
    assert loss() != loss(step=jnp.int32(1))
    other, _ = setup(tiny.experiment(seed=1))
    assert loss() != float(other(copied(state), batch)[1]["loss_nats"])


class Counting(Full):
    """Full attention with everything that a pattern may hand to the step."""

    def __init__(self, *, site, rngs):
        super().__init__(site=site, rngs=rngs)
        self.count = Buffer(jnp.zeros((), jnp.int32))
        self.gain = nnx.Param(jnp.ones(()))

    def __call__(self, *args, train=False, **options):
        attended = super().__call__(*args, train=train, **options)
        gain = self.gain[...]
        return dataclasses.replace(
            attended, losses={"gain": 0.1 * gain}, metrics={"gain": gain}, updates={"count": self.count[...] + 1}
        )

    def project(self):
        self.gain[...] = jnp.maximum(self.gain[...], 0.985)


def test_losses_metrics_buffers_and_projections_of_patterns_take_part(tiny, rng):
    experiment = tiny.experiment(model=tiny.model(pattern=Counting, memory=False))
    step, state = setup(experiment)
    state, metrics = step(state, make_batch(rng))
    np.testing.assert_allclose(metrics["loss/gain"], 0.2, rtol=1e-6)
    np.testing.assert_array_equal(metrics["layer/gain"], [1, 1])
    pattern = experiment.model(state).stack.layers[0].attention.pattern
    np.testing.assert_allclose(pattern.gain[...], 0.99, rtol=1e-5)  # one step of Adam at 0.01 against the loss
    state, _ = step(state, make_batch(rng))
    pattern = experiment.model(state).stack.layers[0].attention.pattern
    np.testing.assert_array_equal(pattern.gain[...], np.float32([0.985, 0.985]))
    np.testing.assert_array_equal(pattern.count[...], [2, 2])
    assert state.step == 2


def test_no_two_leaves_of_the_state_share_memory(usual, rng):
    """The step donates all of them; with a tied embedding, too."""
    experiment, step = usual
    _, state = experiment.initial()
    leaves = jax.tree.leaves(state)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    step(state, make_batch(rng))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.parameters))


@pytest.mark.parametrize("pattern", [Full, functools.partial(SlidingWindow, window=5)], ids=["full", "sliding_window"])
def test_random_tokens_cannot_be_predicted(tiny, rng, pattern):
    """A model that saw its targets would: the control, whose targets are its inputs, does."""
    experiment = tiny.experiment(
        model=tiny.model(pattern=pattern, memory=False, dropout=0.0), training={"steps": 60}, corpus=_Vocabulary32
    )
    tokens = rng.integers(0, 32, 40_000)

    step, _ = setup(experiment)

    def last_losses(leak: bool) -> float:
        _, state = experiment.initial()
        batches = Windows(batch_size=24, segment=24).batches(tokens, start=0, seed=0, prefetch=0)
        losses = []
        for _ in range(60):
            batch = next(batches)
            targets = batch.inputs if leak else batch.targets
            state, metrics = step(state, dataclasses.replace(batch, targets=targets))
            losses.append(metrics["loss_nats"])
        return float(np.mean(losses[-5:]))

    bound = math.log(32) - 0.05
    assert last_losses(leak=False) >= bound
    assert last_losses(leak=True) < bound - 1


class _Vocabulary32:
    class vocabulary:  # noqa: N801
        size = 32
