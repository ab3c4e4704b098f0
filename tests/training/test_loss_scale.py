"""float16: the loss is scaled so that gradients neither vanish nor overflow."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra.data import Batch
from lra.models.parameters import named
from lra.training import loss_scale, make_step
from lra.training.gradients import make_gradients
from lra.training.loss_scale import LossScale


def scale(value, good=0):
    return LossScale(jnp.float32(value), jnp.int32(good))


def test_the_scale_halves_on_overflow_and_doubles_after_a_while(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROW_AFTER", 3)
    seen, now = [], scale(8)
    for overflowed in (0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1):
        now = now.after(jnp.bool_(overflowed))
        seen.append(float(now.value))
    assert seen == [8, 8, 4, 4, 4, 8, 8, 4, 2, 1, 1, 1]
    assert float(scale(loss_scale.LARGEST, 2).after(jnp.bool_(False)).value) == loss_scale.LARGEST


@pytest.mark.parametrize(
    ("value", "loss", "norm", "expected"),
    [
        (2, 1.0, np.inf, True),
        (2, 1.0, np.nan, True),
        (2, 1.0, 1.0, False),
        (2, np.nan, np.nan, False),
        (1, 1.0, np.inf, False),
    ],
)
def test_what_a_smaller_scale_cannot_mend_is_no_overflow(value, loss, norm, expected):
    assert bool(scale(value).overflowed(jnp.float32(loss), jnp.float32(norm))) is expected


def make_batch(rng):
    text = rng.integers(0, 256, (3, 9), np.int32)
    return Batch(text[:, :-1], text[:, 1:], np.ones((3, 8), np.float32), np.zeros(3, bool))


@pytest.fixture(scope="module")
def half(tiny):
    return tiny.experiment(model=functools.partial(tiny.model(dropout=0.0), compute_dtype="float16"))


def test_scaled_gradients_are_those_of_float32(tiny, half, rng):
    full = tiny.experiment(model=tiny.model(dropout=0.0))
    batch = dataclasses.asdict(make_batch(rng))
    (gradients, summed), (expected, _) = (
        jax.jit(make_gradients(experiment.graph, seed=0), static_argnums=2)(experiment.initial()[1], batch, False)
        for experiment in (half, full)
    )
    assert summed.nats.dtype == jnp.float32
    for name, x in named(gradients).items():
        assert x.dtype == jnp.float32
        y = named(expected)[name]
        assert jnp.linalg.norm(x - y) < 1e-2 * jnp.linalg.norm(y), name


def test_an_overflow_is_skipped_and_counted(half, rng):
    step = make_step(half.graph, half.optimizer, total_steps=9, seed=0)
    _, state = half.initial()
    state = dataclasses.replace(state, scale=scale(2.0**24))
    halved = 0
    for n in range(1, 9):
        before = jax.tree.map(jnp.copy, state)
        state, metrics = step(state, make_batch(rng))
        assert int(state.step) == n
        assert int(metrics["non_finite"]) == 0
        assert float(metrics["loss_scale"]) == float(before.scale.value)
        if np.isfinite(metrics["gradient_norm"]):
            break
        halved += 1
        assert float(state.scale.value) == 2.0 ** (24 - halved)
        assert int(metrics["skipped_steps"]) == halved == int(state.step) - int(state.updates)
        for name in ("parameters", "optimizer", "memory"):
            for x, y in zip(jax.tree.leaves(getattr(state, name)), jax.tree.leaves(getattr(before, name)), strict=True):
                np.testing.assert_array_equal(x, y)
    assert 0 < halved < 8
    assert int(state.scale.good) == 1
