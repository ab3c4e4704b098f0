import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from lra.attention import CompressiveMemory, SlidingWindow
from lra.data import Streams, Windows
from lra.training import SGD, Adafactor, Adagrad, Adam, AdamW, Checkpoints, Group, Linear, Lion, make_step
from lra.training.clock import MACHINE

STREAMS = functools.partial(Streams, batch_size=3, segment=8)
WINDOWS = functools.partial(Windows, batch_size=3, segment=8)


ACCUMULATE = functools.partial(Streams, batch_size=4, segment=8)
"""15 batches an epoch."""
SHORT = functools.partial(Windows, batch_size=20, segment=8)
"""62 windows: an epoch ends within the fourth batch."""

CASES = {
    "memory": {},
    "windows across epochs": {"data": SHORT},
    "adafactor": {"update": functools.partial(Adafactor, factored_from=8, momentum=0.9)},
    "adamw": {"update": AdamW},
    "adagrad": {"update": Adagrad, "data": WINDOWS},
    "sgd with momentum": {"update": functools.partial(SGD, momentum=0.9), "data": WINDOWS},
    "lion": {"update": Lion, "data": WINDOWS},
    "groups": {"groups": (functools.partial(Group, pattern="*.kernel", update=Lion, rate=0.1),)},
    "updates every second step": {"update_every": 2, "update_every_after": 1},
    "compressive memory": {"memory": functools.partial(CompressiveMemory, length=8, compressed_length=4, rate=2)},
    "accumulation": {"data": ACCUMULATE, "training": {"accumulate": 2}},
    "average": {"ema_decay": 0.5, "training": {"evaluate_weights": "ema"}},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "float16": {"compute_dtype": "float16"},
    "loop": {"stack": {"scan": False}},
    "remat": {"stack": {"remat": "full"}},
    "remat of products": {"stack": {"remat": "dots", "scan": False}},
    "post-norm": {"stack": {"norm": "post"}},
    "everything": {
        "data": ACCUMULATE, "training": {"accumulate": 2, "non_finite": "skip", "evaluate_weights": "ema"},
        "ema_decay": 0.5, "compute_dtype": "float16", "stack": {"remat": "full"}, "update": Adafactor,
    },
}  # fmt: skip
"""Every option that carries state or that changes the compiled step. Dropout is on in all."""
QUICK = ("memory", "windows across epochs", "everything")


def build(
    tiny, data=STREAMS, update=Adam, training=None, stack=None, compute_dtype="float32", memory=None, **optimizer
):
    windows = data in (WINDOWS, SHORT)
    pattern = functools.partial(SlidingWindow, window=5) if windows else tiny.Full
    stack = functools.partial(tiny.Stack, **{"dropout": 0.1, "scan": True, **(stack or {})})
    model = functools.partial(tiny.model(pattern=pattern, memory=not windows), stack=stack, compute_dtype=compute_dtype)
    model = model if memory is None else functools.partial(model, memory=memory)
    schedule = functools.partial(Linear, 0.01, 2)
    optimizer = tiny.optimizer(functools.partial(update), schedule, clip_norm=1.0, **optimizer)
    return tiny.experiment(data=data, optimizer=optimizer, model=model, training={"steps": 5, **(training or {})})


def saved(experiment, workdir, step=5):
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        return checkpoints.restore(step, experiment.abstract_state), checkpoints.data(step)


def lines(workdir: Path, split="train") -> list[dict]:
    found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{**line, **dict.fromkeys(MACHINE)} for line in found if line["split"] == split]


def same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_two_and_three_steps_are_five(tiny, run, tmp_path, case):
    make = functools.partial(build, tiny, **CASES[case])
    make().build()
    whole = run(make(), tmp_path / "whole")
    first = run(make(), steps=2)
    second = run(make())
    assert (whole.step, whole.steps_done) == (5, 5)
    assert (first.step, first.steps_done, second.step, second.steps_done) == (2, 2, 5, 3)
    (expected, position), (state, same_position) = saved(make(), tmp_path / "whole"), saved(make(), tmp_path / "run")
    assert position == same_position
    same(expected, state)
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert [line["step"] for line in lines(tmp_path / "run", "valid")] == [2, 5]
    assert lines(tmp_path / "run", "valid")[1] == lines(tmp_path / "whole", "valid")[0]
    # The schedule is of the configured total: neither the stop nor the resumption changes it.
    rates = [line["learning_rate"] for line in lines(tmp_path / "run")]
    np.testing.assert_allclose(rates, [0.005, 0.01, 0.01, 0.02 / 3, 0.01 / 3], rtol=1e-6)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_one_another(tiny, run, tmp_path):
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        run(tiny.experiment(seed=seed, data=WINDOWS, model=tiny.model(memory=False)), tmp_path / name)
    make = functools.partial(tiny.experiment, data=WINDOWS, model=tiny.model(memory=False))
    same(saved(make(), tmp_path / "one", 4)[0], saved(make(), tmp_path / "two", 4)[0])
    assert lines(tmp_path / "one") == lines(tmp_path / "two")
    for one, other in zip(lines(tmp_path / "one"), lines(tmp_path / "other"), strict=True):
        assert one["loss_nats"] != other["loss_nats"]


def test_the_first_step_after_a_resumption_donates_what_was_restored(tiny, run, tmp_path):
    """A restored state that could not be donated would take twice its memory, silently."""
    run(tiny.experiment(), steps=1)
    experiment = tiny.experiment()
    state, _ = saved(experiment, tmp_path / "run", 1)
    step = make_step(experiment.graph, experiment.optimizer, total_steps=4, seed=0)
    batches = experiment.data.batches(experiment.corpus.tokens("train"), start=0, seed=0, prefetch=0)
    step(state, next(batches))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.parameters, state.optimizer, state.memory)))


def test_a_new_process_goes_on_likewise(tiny, run, tmp_path):
    whole = run(tiny.experiment(), tmp_path / "whole")
    run(tiny.experiment(), steps=2)
    script = (
        "import sys; from pathlib import Path; import tiny; from lra.training import train\n"
        "train(tiny.experiment(), Path(sys.argv[1]), config_text='a = 1', difference=tiny.difference)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "run"],
        env={**os.environ, "PYTHONPATH": f"{root}:{Path(__file__).parent}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "resuming" in done.stderr
    assert not done.stdout
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert lines(tmp_path / "run")[-1]["loss_nats"] == whole.metrics["loss_nats"]
