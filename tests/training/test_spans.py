"""Training with static sizes that follow learned values: compiled once each, right at every step, resumable."""

import contextlib
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra.attention import AdaptiveSpan
from lra.attention.memory import Recurrence
from lra.training import SGD, Checkpoints, Constant, make_step
from lra.training.clock import MACHINE


@pytest.fixture
def falling(tiny):
    """Spans of 84 + 16 keys that fall by 8 a step: below 64 before step 6, which is where the window shrinks."""

    def make(dropout=0.1, **training):
        pattern = functools.partial(AdaptiveSpan, max_span=160, ramp=16, loss_coefficient=1.0, initial=0.52)
        model = functools.partial(
            tiny.model(pattern=pattern, dropout=dropout), memory=functools.partial(Recurrence, length=160)
        )
        rate = 8 / 160 * 2 / 160  # the gradient of z is 160 / 2 heads, beside that of the text
        optimizer = tiny.optimizer(SGD, schedule=lambda: Constant(rate))
        return tiny.experiment(model=model, optimizer=optimizer, training={"steps": 7, **training})

    return make


@contextlib.contextmanager
def compilations():
    """Counts the programs made inside the block, those from a cache on disk too."""
    events = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lambda: len(events)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def lines(workdir):
    found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["split"] == "train"]


def test_windows_shrink_and_runs_resume(tiny, falling, run, tmp_path):
    run(falling(), tmp_path / "whole")
    whole = lines(tmp_path / "whole")
    assert [line["layer/span_window"] for line in whole] == [[128.0] * 2] * 5 + [[64.0] * 2] * 2
    spans = np.asarray([line["layer/span_largest"] for line in whole])
    assert (np.diff(spans, axis=0) < 0).all()
    run(falling(), steps=4)
    run(falling())
    assert [{**line, **dict.fromkeys(MACHINE)} for line in lines(tmp_path / "run")] == [
        {**line, **dict.fromkeys(MACHINE)} for line in whole
    ]
    states = []
    for name in ("whole", "run"):
        with Checkpoints(tmp_path / name / "checkpoints") as checkpoints:
            states.append(checkpoints.restore(7, falling().abstract_state))
    for x, y in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_span_that_grew_is_read_whole(tiny, falling, monkeypatch):
    """Values that jump across windows between two steps, against a step with the largest window."""
    experiment = falling(dropout=0.0)  # whose masks are drawn by block
    step = make_step(experiment.graph, experiment.optimizer, total_steps=7, seed=0)
    batches = experiment.data.batches(experiment.corpus.tokens("train"), start=0, seed=0)
    batch = [next(batches) for _ in range(5)][-1]
    _, start = experiment.initial()
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=start.memory[0].hidden.shape), jnp.float32)

    def state(z):
        fresh = jax.tree.map(jnp.copy, start)
        fresh.parameters["stack"]["layers"][0]["attention"]["pattern"]["spans"][...] = jnp.full((2, 2), z)
        filled = jax.tree.map(lambda x: jnp.ones_like(x) if x.dtype == bool else hidden + 0, fresh.memory)
        return dataclasses.replace(fresh, memory=filled)

    losses, windows, programs = [], [], []
    for z in (0.0, 0.9, 0.2):
        before = state(z)
        with compilations() as count:
            _, metrics = step(before, batch)
        programs.append(count())
        losses.append(float(metrics["loss_nats"]))
        windows.append(metrics["layer/span_window"].tolist())
    assert windows == [[64] * 2, [160] * 2, [64] * 2]
    assert programs == [1, 1, 0]
    monkeypatch.setattr(AdaptiveSpan, "fit", lambda self: False)
    unfitted = make_step(experiment.graph, experiment.optimizer, total_steps=7, seed=0)
    for z, loss in zip((0.0, 0.9, 0.2), losses, strict=True):
        _, metrics = unfitted(state(z), batch)
        assert metrics["layer/span_window"].tolist() == [160] * 2
        np.testing.assert_allclose(metrics["loss_nats"], loss, rtol=1e-5)
