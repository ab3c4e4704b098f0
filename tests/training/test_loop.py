import errno
import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from lra.attention import CompressiveMemory
from lra.data import Streams, Windows
from lra.errors import UserError
from lra.evaluation import Block
from lra.models import LearnedPositions
from lra.training import Checkpoints, Constant, Training, load_model, loop


@pytest.fixture
def small(tiny):
    """The cheapest experiment."""
    model = tiny.model(memory=False, dropout=0.0)
    return lambda **options: tiny.experiment(**{"model": model, **options})


def steps_of(workdir, split):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["split"] == split]


def test_a_run_leaves_configuration_metrics_and_checkpoints(small, run, tmp_path):
    training = {"steps": 5, "evaluate_every": 2, "checkpoint_every": 2, "log_every": 3, "keep_checkpoints": 2}
    outcome = run(small(training=training))
    workdir = tmp_path / "run"
    assert sorted(path.name for path in workdir.iterdir()) == [
        "checkpoints",
        "config.gin",
        "lock",
        "metrics.jsonl",
        "record.json",
    ]
    assert (workdir / "config.gin").read_text() == "a = 1"
    assert steps_of(workdir, "train") == [3, 5]
    assert steps_of(workdir, "valid") == [2, 4, 5]
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["4", "5"]
    assert (outcome.step, outcome.steps_done, outcome.checkpoint) == (5, 5, workdir / "checkpoints" / "5")
    assert outcome.checkpoint.is_dir()
    assert {"loss_nats", "bits_per_byte", "tokens_per_second", "learning_rate", "gradient_norm"} < set(outcome.metrics)
    assert (outcome.evaluation["tokens_scored"], outcome.evaluation["tokens_expected"]) == (40, 500)
    assert outcome.evaluation["partial"] is True


def test_a_finished_run_is_left_alone_and_says_so(small, run, tmp_path, capsys):
    run(small(), steps=1)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    outcome = run(small(), steps=1, console=Console(stderr=True))
    assert (outcome.step, outcome.steps_done) == (1, 0)
    printed = capsys.readouterr()
    assert "at step 1 already: nothing to do" in printed.err
    assert not printed.out
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_crash_costs_the_steps_since_the_last_checkpoint_only(small, run, tmp_path, monkeypatch):
    training = {"steps": 4, "checkpoint_every": 2}
    run(small(training=training), tmp_path / "whole")
    from lra.data import BatchIterator

    taken, former = [], BatchIterator.__next__

    def fails(self):
        taken.append(1)
        if len(taken) == 4:
            raise OSError("the disk is gone")
        return former(self)

    with monkeypatch.context() as patch:
        patch.setattr(BatchIterator, "__next__", fails)
        with pytest.raises(OSError, match="disk is gone"):
            run(small(training=training))
    assert run(small(training=training)).steps_done == 2
    losses = [
        [json.loads(line).get("loss_nats") for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "run")
    ]
    assert losses[0] == losses[1]


def test_the_best_is_saved_whenever_it_is_found(small, run, tmp_path):
    training = {"steps": 4, "evaluate_every": 1, "keep_checkpoints": 1, "keep_best": 1}
    experiment = small(training=training)
    scores = iter([3.0, 2.0, 4.0, float("nan")])
    with pytest.MonkeyPatch.context() as patch:
        from lra.training.loop import _Run

        patch.setattr(_Run, "_evaluate", lambda self, step, state: next(scores))
        run(experiment)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["2", "4"]
    for which, step in (("best", 2), ("newest", 4), ("2", 2)):
        assert load_model(experiment, tmp_path / "run", checkpoint=which)[1] == step


def test_a_score_that_is_not_finite_is_said_and_never_best(small, run, tmp_path, monkeypatch, capsys):
    former, calls = loop.evaluate, []

    def scores(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise FloatingPointError("the model's score of a valid is nan after 5 tokens")
        return former(*arguments, **options)

    monkeypatch.setattr(loop, "evaluate", scores)
    training = {"steps": 3, "evaluate_every": 1, "keep_checkpoints": 1, "keep_best": 3}
    run(small(training=training), console=Console(stderr=True))
    assert "step 2  the model's score of a valid is nan after 5 tokens\n" in capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["bits_per_byte"] is None for line in lines if line["split"] == "valid"] == [False, True, False]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["1", "3"]


def test_a_damaged_checkpoint_costs_the_steps_after_the_one_before(small, run, tmp_path, capsys):
    make = lambda: small(training={"checkpoint_every": 2, "steps": 6})  # noqa: E731
    whole = run(make(), tmp_path / "whole")
    run(make(), steps=4)
    (tmp_path / "run" / "checkpoints" / "4" / "digests.json").unlink()
    outcome = run(make(), console=Console(stderr=True))
    assert "checkpoints/4 is damaged at digests.json: going on with step 2\n" in capsys.readouterr().err
    assert (outcome.steps_done, outcome.metrics["loss_nats"]) == (4, whole.metrics["loss_nats"])
    assert steps_of(tmp_path / "run", "train") == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["4", "4.damaged", "6"]


def test_a_save_that_fails_stops_the_run_before_the_next_one(small, run, tmp_path, monkeypatch):
    def full(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Checkpoints, "_write_digests", full)
    with pytest.raises(UserError, match=r"checkpoints/100 cannot be written \(No space left on device\): make room"):
        run(small(training={"steps": 199, "checkpoint_every": 100}))
    assert steps_of(tmp_path / "run", "valid") == []
    assert steps_of(tmp_path / "run", "train")[-1] >= 100
    assert not list((tmp_path / "run" / "checkpoints").glob("199*"))  # the next one, which would fail likewise


def test_the_model_of_a_run_is_the_trained_one(small, run, tmp_path):
    run(small(), steps=2)
    experiment = small()
    model, step, data = load_model(experiment, tmp_path / "run")
    assert step == 2
    assert (data["corpus"], data["digest"]) == ("random_bytes", experiment.corpus.digest)
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        state = checkpoints.restore(2, experiment.abstract_state)
    np.testing.assert_array_equal(model.embedding.embedding[...], state.parameters["embedding"]["embedding"][...])
    _, initial = experiment.initial()
    assert (model.embedding.embedding[...] != initial.parameters["embedding"]["embedding"][...]).any()


def test_without_a_checkpoint_there_is_no_model(small, tmp_path):
    for workdir in (tmp_path / "missing", tmp_path):
        with pytest.raises(UserError, match="holds no checkpoint"):
            load_model(small(), workdir)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_model_names_the_leaf(tiny, small, run, tmp_path):
    run(small(), steps=1)
    wider = small(model=functools.partial(tiny.model(memory=False), width=32))
    with pytest.raises(UserError, match=r"embedding.*\[256, 16\].*\[256, 32\]"):
        load_model(wider, tmp_path / "run")


class Spike(Constant):
    """A schedule whose third rate is infinite."""

    def __init__(self):
        super().__init__(0.01)

    def rates(self, total_steps):
        return lambda step: jnp.where(step == 2, jnp.inf, 0.01)


def test_numbers_that_are_not_finite_stop_the_run(tiny, small, run, tmp_path):
    experiment = small(optimizer=tiny.optimizer(schedule=Spike), training={"steps": 9, "checkpoint_every": 1})
    with pytest.raises(UserError, match=r"parameter_norm is .* at step 3 .*step 2\); the first .* is parameters\.emb"):
        run(experiment)
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        state = checkpoints.restore(2, experiment.abstract_state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.parameters))


def test_folders_that_are_no_run_of_this_configuration_are_refused(small, run, tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match="is a file"):
        run(small(), file)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"holds thesis\.tex and no run"):
        run(small(), tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.gin").write_text("\n".join(f"a{n} = 1" for n in range(7)))
    with pytest.raises(UserError, match=r"a0 = 1 -> a0 = 2.*a4 = 1 -> a4 = 2; and 2 more"):
        run(small(), config_text="\n".join(f"a{n} = 2" for n in range(7)))


def test_a_corpus_that_changed_is_refused(tiny, small, run):
    run(small(), steps=1)
    with pytest.raises(UserError, match=r"was trained on random_bytes.*but the corpus is now"):
        run(small(corpus=functools.partial(tiny.Corpus, seed=1)))


@pytest.mark.parametrize("steps", [0, 5])
def test_a_stop_outside_the_run_is_refused(small, run, tmp_path, steps):
    with pytest.raises(UserError, match=f"stop after step {steps}"):
        run(small(), steps=steps)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_where_the_data_do_not_fit(tiny, run, tmp_path):
    positions = functools.partial(LearnedPositions, max_length=7)
    model = functools.partial(tiny.model(memory=False), position=positions, terms=())
    protocols = {"block": functools.partial(tiny.Block, segment=7)}
    with pytest.raises(UserError, match="7 positions, got 8 tokens"):
        run(tiny.experiment(model=model, protocols=protocols))
    with pytest.raises(UserError, match=r"Block\.segment is 8"):
        tiny.experiment(model=model).build()
    with pytest.raises(UserError, match="ids span 97 to 112"):
        run(tiny.experiment(corpus=functools.partial(_narrow, tiny)))
    assert not list(tmp_path.iterdir())


def _narrow(tiny):
    corpus = tiny.Corpus()
    corpus.vocabulary.size = 100
    return corpus


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"steps": 0}, "Training.steps"),
        ({"steps": 1e5}, "Training.steps"),
        ({"steps": 1, "evaluate_every": -1}, "Training.evaluate_every"),
        ({"steps": 1, "evaluate_tokens": 0}, "Training.evaluate_tokens"),
        ({"steps": 1, "keep_checkpoints": 0}, "Training.keep_checkpoints"),
        ({"steps": 1, "keep_best": -1}, "Training.keep_best"),
        ({"steps": 1, "log_every": 0}, "Training.log_every"),
    ],
)
def test_training_checks_its_ranges(options, name):
    with pytest.raises(UserError, match=name):
        Training(**options)


def test_experiments_check_theirs(tiny):
    with pytest.raises(UserError, match=r"Experiment.seed is 4294967296"):
        tiny.experiment(seed=2**32)
    with pytest.raises(UserError, match=r"Experiment.protocols"):
        tiny.experiment(protocols={})
    with pytest.raises(ValueError, match=r"Decoder.num_heads=3"):
        tiny.experiment(model=functools.partial(tiny.model(), num_heads=3)).build()
    windows = functools.partial(Windows, batch_size=3, segment=tiny.SEGMENT)
    with pytest.raises(UserError, match="Windows starts rows anew"):
        tiny.experiment(data=windows).build()
    tiny.experiment(data=windows, model=tiny.model(memory=False)).build()
    memory = functools.partial(CompressiveMemory, length=8, compressed_length=4, rate=4)
    model = functools.partial(tiny.model(), memory=memory)
    tiny.experiment(model=model).build()
    for segment, options in ((6, {"data": functools.partial(Streams, batch_size=3, segment=6)}),
                             (9, {"protocols": {"block": functools.partial(Block, segment=9)}})):  # fmt: skip
        with pytest.raises(UserError, match=f"rate is 4, which does not divide a segment of {segment} tokens: choose"):
            tiny.experiment(model=model, **options).build()
