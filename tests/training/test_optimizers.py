import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra.errors import UserError
from lra.training import Adafactor, Adam, AdamW, Constant, Cosine, Linear, Optimizer, Rsqrt

TOTAL = 20


def rates(schedule) -> np.ndarray:
    return np.array([schedule.rates(TOTAL)(step) for step in range(TOTAL)])


def test_schedules_have_their_closed_forms():
    n = np.arange(TOTAL)
    rise, after = (n[:5] + 1) / 5, n[5:] - 5
    np.testing.assert_allclose(rates(Constant(0.3)), 0.3, rtol=1e-6)
    linear = np.concatenate([0.3 * rise, 0.3 + (0.1 - 0.3) * after / 15])
    np.testing.assert_allclose(rates(Linear(0.3, 5, final=0.1)), linear, rtol=1e-5)
    cosine = np.concatenate([0.3 * rise, 0.3 * (0.1 + 0.9 * (1 + np.cos(np.pi * after / 15)) / 2)])
    np.testing.assert_allclose(rates(Cosine(0.3, 5, final_ratio=0.1)), cosine, rtol=1e-5)
    rsqrt = 0.3 * np.minimum((n + 1) / 5, np.sqrt(5 / (n + 1)))
    np.testing.assert_allclose(rates(Rsqrt(0.3, 5)), rsqrt, rtol=1e-5)


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_without_a_rise_the_first_rate_is_the_whole_one(warmup_steps):
    assert rates(Linear(0.3, warmup_steps))[0] == pytest.approx(0.3)
    assert (np.diff(rates(Linear(0.3, warmup_steps))[1:]) < 0).all()


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(UserError, match=r"Linear.warmup_steps is 21.*Training.steps = 20"):
        Linear(0.1, 21).rates(TOTAL)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Constant(0.0), "Constant.learning_rate"),
        (lambda: Constant(float("nan")), "Constant.learning_rate"),
        (lambda: Linear(0.1, -1), "Linear.warmup_steps"),
        (lambda: Linear(0.1, 1, final=-0.1), "Linear.final"),
        (lambda: Cosine(0.1, final_ratio=1.5), "Cosine.final_ratio"),
        (lambda: Rsqrt(0.1, 0), "Rsqrt.warmup_steps"),
        (lambda: Adam(b1=1.0), "Adam.b1"),
        (lambda: Adam(eps=0.0), "Adam.eps"),
        (lambda: AdamW(weight_decay=-1.0), "AdamW.weight_decay"),
        (lambda: Adafactor(clipping_threshold=0.5), "Adafactor.clipping_threshold"),
        (lambda: Adafactor(factored_from=0), "Adafactor.factored_from"),
        (lambda: Optimizer(update=Adam, schedule=lambda: Constant(0.1), clip_norm=0.0), "Optimizer.clip_norm"),
    ],
)
def test_ranges_are_checked_by_constructors(make, name):
    with pytest.raises(UserError, match=name):
        make()


@pytest.mark.parametrize("update", [Adam, AdamW, Adafactor])
def test_the_logged_rate_is_the_applied_one(update):
    """On a constant gradient Adam moves by the rate itself; Adafactor, without its relative steps, too."""
    options = {"relative": False} if update is Adafactor else {}
    optimizer = Optimizer(
        update=functools.partial(update, **options), schedule=functools.partial(Linear, 0.1, 3, final=0.02)
    )
    transformation = optimizer.transformation(7)
    parameters = {"w": jnp.zeros(5)}
    state = transformation.init(parameters)
    for step in range(7):
        updates, state = transformation.update({"w": jnp.full(5, 0.5)}, state, parameters)
        np.testing.assert_allclose(-updates["w"], optimizer.learning_rate(step, 7), rtol=1e-4)


def test_clipping_bounds_the_global_norm():
    optimizer = Optimizer(update=lambda: _Identity(), schedule=lambda: Constant(1.0), clip_norm=1.0)
    transformation = optimizer.transformation(1)
    gradients = {"a": jnp.full(3, 2.0), "b": jnp.full(1, 2.0)}
    updates, _ = transformation.update(gradients, transformation.init(gradients), gradients)
    np.testing.assert_allclose(jax.tree.leaves(updates)[0], 0.5, rtol=1e-6)


class _Identity:
    def transformation(self, rates):
        import optax

        return optax.identity()


def test_weight_decay_leaves_vectors_alone(tiny):
    experiment = tiny.experiment(
        model=tiny.model(memory=False), optimizer=tiny.optimizer(functools.partial(AdamW, weight_decay=0.5))
    )
    _, state = experiment.initial()
    transformation = experiment.optimizer.transformation(4)
    zeros = jax.tree.map(jnp.zeros_like, state.parameters)
    updates, _ = transformation.update(zeros, state.optimizer, state.parameters)
    leaves = jax.tree_util.tree_leaves_with_path((updates, state.parameters))
    decayed = {jax.tree_util.keystr(path): bool(x.any()) for path, x in leaves if path[0].idx == 0}
    assert sum(decayed.values()) == 7  # the embedding, q, k, v, o, and two of the feed-forward layer
    assert not any(moved for path, moved in decayed.items() if "bias" in path or "scale" in path)
    assert len(decayed) == 15
