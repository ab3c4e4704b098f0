"""What follows a step that is not finite."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from lra.attention import Recurrence
from lra.data import Streams
from lra.errors import UserError
from lra.models import FeedForward
from lra.models.parameters import named
from lra.training import Checkpoints, Linear, loop, make_step, non_finite
from lra.training.clock import MACHINE

ROWS, SEGMENT = 3, 8


class Poisoned(Streams):
    """Streams whose batches `bad`, counted from 1, have weights that overflow the sum of the loss."""

    bad = (3,)

    def _dataset(self, *args):
        def poison(index, row):
            factor = 3e37 if index // ROWS + 1 in self.bad and index % ROWS == 0 else 1
            return {**row, "weights": row["weights"] * np.float32(factor)}

        return super()._dataset(*args).map_with_index(poison)


class Poisoned5(Poisoned):
    bad = (5,)


class Poisoned345(Poisoned):
    bad = (3, 4, 5)


@pytest.fixture
def make(tiny):
    def make(data=Poisoned, **training):
        training = {"steps": 6, "checkpoint_every": 2, **training}
        return tiny.experiment(
            data=functools.partial(data, batch_size=ROWS, segment=SEGMENT),
            optimizer=tiny.optimizer(schedule=functools.partial(Linear, 0.06, 6), clip_norm=1.0),
            training=training,
        )

    return make


def by_hand(experiment):
    """The step, the initial state, and ten batches."""
    data, corpus = experiment.data, experiment.corpus
    batches = data.batches(corpus.tokens("train"), start=corpus.vocabulary.start, seed=0, prefetch=0)
    step = make_step(
        experiment.graph, experiment.optimizer, total_steps=6, seed=0, bytes_per_token=1.0,
        non_finite=experiment.training.non_finite, non_finite_limit=experiment.training.non_finite_limit,
    )  # fmt: skip
    return step, experiment.initial()[1], [next(batches) for _ in range(10)]


def saved(experiment, workdir, step=6):
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        return checkpoints.restore(step, experiment.abstract_state), checkpoints.data(step)["iterator"]["position"]


def lines(workdir):
    found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{**line, **dict.fromkeys(MACHINE)} for line in found if line["split"] == "train"]


def same(left, right, but=()):
    for name, x in named(left).items():
        if not name.startswith(but):
            assert np.asarray(x).tobytes() == np.asarray(named(right)[name]).tobytes(), name


def copied(state):
    return jax.tree.map(jnp.copy, state)


def test_a_step_that_is_not_finite_leaves_the_state_for_doing_it_again(make):
    step, state, batches = by_hand(make())
    for batch in batches[:2]:
        state, _ = step(state, batch)
    before = copied(state)
    state, metrics = step(state, batches[2])
    assert (int(metrics["non_finite"]), float(metrics["loss_nats"])) == (1, np.inf)
    same(state, before, but=("faults",))
    state, _ = step(state, batches[5])  # dispatched before the host knew: harmless
    same(state, before, but=("faults",))


def test_stop_names_step_and_tensor(make, run, tmp_path):
    with pytest.raises(UserError) as error:
        run(make())
    message = str(error.value)
    assert "loss_nats is inf at step 3 (the last checkpoint is of step 2); the first tensor that is not" in message
    assert "of reduce_sum in the forward pass (lra/training/gradients.py:" in message
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2]


def test_skip_leaves_out_the_step_and_counts_it(make, run, tmp_path):
    experiment = make(non_finite="skip")
    run(experiment)
    step, state, batches = by_hand(experiment)
    for i, batch in enumerate(batches[:6]):
        before = copied(state)
        state, _ = step(state, batch)
        if i == 2:
            same(state, before, but=("step", "faults"))
            assert int(state.step) == 3
    final, position = saved(experiment, tmp_path / "run")
    same(final, state)
    assert (int(final.step), int(final.faults.skipped), int(final.updates)) == (6, 1, 5)
    assert position["next_index"] == 6
    assert [line["skipped_steps"] for line in lines(tmp_path / "run")] == [0, 0, 1, 1, 1, 1]
    rates = [line["learning_rate"] for line in lines(tmp_path / "run")]
    np.testing.assert_allclose(rates, [0.01, 0.02, 0.03, 0.03, 0.04, 0.05], rtol=1e-6)  # the skipped step used none
    assert [line["loss_nats"] is None for line in lines(tmp_path / "run")] == [n == 3 for n in range(1, 7)]


def test_skips_in_a_row_are_bounded(make, run):
    with pytest.raises(UserError, match=r"loss_nats is inf at step 5"):  # the third in a row
        run(make(Poisoned345, non_finite="skip", non_finite_limit=2))


def test_the_skip_that_is_too_many_is_done_again_from_its_own_state(make):
    step, state, batches = by_hand(make(Poisoned345, non_finite="skip", non_finite_limit=2))
    for batch in batches[:4]:
        state, _ = step(state, batch)
    before = copied(state)
    for batch in batches[4:6]:  # the third in a row, and the finite one that is dispatched before the host knows
        state, metrics = step(state, batch)
        same(state, before, but=("faults",))
    assert (int(metrics["non_finite"]), int(state.step), int(state.faults.skipped)) == (4, 4, 2)


def test_rewind_goes_on_with_the_data_behind(make, run, tmp_path):
    experiment = make(non_finite="rewind")
    run(experiment)
    final, position = saved(experiment, tmp_path / "run")
    step, state, batches = by_hand(experiment)
    for batch in batches[:2]:
        state, _ = step(state, batch)
    state = dataclasses.replace(
        state,
        memory=jax.tree.map(jnp.zeros_like, state.memory),
        faults=dataclasses.replace(state.faults, rewinds=jnp.int32(1)),
    )
    for batch in batches[3:7]:
        state, _ = step(state, batch)
    same(final, state)
    assert position["next_index"] == 7
    assert [(line["step"], line["rewinds"]) for line in lines(tmp_path / "run")] == [
        (n, int(n > 2)) for n in range(1, 7)
    ]


def test_rewinds_resume_and_are_bounded(make, run, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(make(Poisoned345, non_finite="rewind"), whole)
    for steps in (4, 6):
        run(make(Poisoned345, non_finite="rewind"), parts, steps=steps)
    assert int(saved(make(), whole)[0].faults.rewinds) == 3
    same(saved(make(), whole)[0], saved(make(), parts)[0])
    assert saved(make(), whole)[1] == saved(make(), parts)[1]
    assert lines(whole) == lines(parts)
    with pytest.raises(UserError, match=r"loss_nats is inf at step 3"):
        run(make(Poisoned345, non_finite="rewind", non_finite_limit=2))


def test_rewind_without_a_checkpoint_starts_again(make, run, tmp_path):
    experiment = make(non_finite="rewind", checkpoint_every=0)
    run(experiment)
    final, position = saved(experiment, tmp_path / "run")
    assert (int(final.step), int(final.faults.rewinds), position["next_index"]) == (6, 1, 9)


def test_a_rewind_names_the_damaged_checkpoint_that_it_passes_over(make, run, tmp_path, monkeypatch, capsys):
    """Damaged while the run goes on."""
    former = loop._Run.rewind

    def rewind(self, fault):
        self._checkpoints.wait()
        (tmp_path / "run" / "checkpoints" / "4" / "digests.json").write_text("{}")
        return former(self, fault)

    monkeypatch.setattr(loop._Run, "rewind", rewind)
    run(make(Poisoned5, non_finite="rewind"), console=Console(stderr=True, width=400))
    said = capsys.readouterr().err
    assert "checkpoints/4 is damaged at digests.json: going on with step 2\n" in said
    assert "loss_nats is inf at step 5: going on from step 2 with the data behind step 5\n" in said
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["4", "4.damaged", "6"]


@pytest.fixture(scope="module")
def sound(tiny):
    """An experiment with a state and a batch, all finite."""
    experiment = tiny.experiment()
    batches = experiment.data.batches(experiment.corpus.tokens("train"), start=0, seed=0, prefetch=0)
    return experiment, experiment.initial()[1], next(batches)


def spoiled(state, name, index, value):
    flat = nnx.to_flat_state(state.parameters)
    leaves = [
        (path, x.replace(x[...].at[index].set(value)) if ".".join(map(str, path)) == name else x) for path, x in flat
    ]
    return dataclasses.replace(state, parameters=nnx.from_flat_state(leaves))


@pytest.mark.parametrize(
    ("name", "index", "value", "found"),
    [
        ("stack.layers.0.feed_forward.outer.kernel", (1, 0, 0), np.nan, "parameters.stack.layers.0.feed_forward.outer"),
        ("stack.layers.0.feed_forward.outer.kernel", (1,), 3e38, "of dot_general in the forward pass of layer1/feed_f"),
        ("stack.layers.0.attention.query.kernel", (0,), 3e38, "of dot_general in the forward pass of layer0/attention"),
        ("stack.final_norm.scale", (0,), 1.0, None),
    ],
)
def test_the_first_tensor_is_named(sound, name, index, value, found):
    experiment, state, batch = sound
    first = non_finite.first(experiment.model(state), spoiled(state, name, index, value), batch, seed=0)
    assert (found in first) if found else first is None, first


class Rooted(FeedForward):
    """Adds the root of 0, whose derivative is infinite."""

    def __call__(self, x, **options):
        y = super().__call__(x, **options)
        return y + jnp.sqrt(jnp.abs(y - jax.lax.stop_gradient(y)))


@pytest.mark.parametrize(
    ("remat", "found"),
    [("none", "of div in the forward pass of layer0/feed_f"), ("full", "of div in the backward pass of layer1/feed_f")],
)
def test_derivatives_are_searched_too(tiny, sound, remat, found):
    """Without rematerialisation the forward pass computes them."""
    _, _, batch = sound
    stack = functools.partial(tiny.Stack, remat=remat)
    experiment = tiny.experiment(model=functools.partial(tiny.model(), feed_forward=Rooted, stack=stack))
    _, state = experiment.initial()
    first = non_finite.first(experiment.model(state), state, batch, seed=0)
    assert found in first, first


def test_memory_starts_anew_after_a_rewind(tiny):
    """Zeros that are read are no empty slots."""
    model = functools.partial(tiny.model(), memory=functools.partial(Recurrence, length=SEGMENT, start="zeros"))
    experiment = tiny.experiment(model=model)
    state = experiment.initial()[1]
    used = dataclasses.replace(state, memory=jax.tree.map(jnp.ones_like, state.memory))
    same(non_finite.rewound(experiment, used, 1).memory, state.memory)
