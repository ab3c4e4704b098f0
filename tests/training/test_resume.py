import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from lra.attention import SlidingWindow
from lra.data import Streams, Windows
from lra.training import Adafactor, Adam, Checkpoints, Linear
from lra.training.clock import MACHINE

STREAMS = functools.partial(Streams, batch_size=3, segment=8)
WINDOWS = functools.partial(Windows, batch_size=3, segment=8)


def build(tiny, data, update):
    windows = data is WINDOWS
    pattern = functools.partial(SlidingWindow, window=5) if windows else tiny.Full
    return tiny.experiment(
        data=data,
        optimizer=tiny.optimizer(update, clip_norm=1.0),
        model=tiny.model(pattern=pattern, memory=not windows),
    )


def saved(experiment, workdir, step=4):
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        return checkpoints.restore(step, experiment.abstract_state), checkpoints.data(step)


def lines(workdir: Path, split="train") -> list[dict]:
    found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{**line, **dict.fromkeys(MACHINE)} for line in found if line["split"] == split]


@pytest.mark.parametrize("update", [Adam, Adafactor])
@pytest.mark.parametrize("data", [STREAMS, WINDOWS], ids=["streams", "windows"])
def test_two_and_two_steps_are_four(tiny, run, tmp_path, data, update):
    make = functools.partial(build, tiny, data, functools.partial(update))
    whole = run(make(), tmp_path / "whole")
    first = run(make(), steps=2)
    second = run(make())
    assert (whole.step, whole.steps_done) == (4, 4)
    assert (first.step, first.steps_done, second.step, second.steps_done) == (2, 2, 4, 2)
    (expected, position), (state, same_position) = saved(make(), tmp_path / "whole"), saved(make(), tmp_path / "run")
    assert position == same_position
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(state), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), jax.tree_util.keystr(path)
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert [line["step"] for line in lines(tmp_path / "run", "valid")] == [2, 4]
    assert lines(tmp_path / "run", "valid")[1] == lines(tmp_path / "whole", "valid")[0]


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


def test_the_rate_goes_on_where_it_was(tiny, run, tmp_path):
    """The schedule is of the configured total: neither the stop nor the resumption changes it."""
    schedule = functools.partial(Linear, 0.01, 2)
    options = {"optimizer": tiny.optimizer(schedule=schedule), "model": tiny.model(memory=False, dropout=0.0)}
    for steps in (1, 3, 4):
        run(tiny.experiment(**options), steps=steps)
    rates = [line["learning_rate"] for line in lines(tmp_path / "run")]
    np.testing.assert_allclose(rates, [0.005, 0.01, 0.01, 0.005], rtol=1e-6)
