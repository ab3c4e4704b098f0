"""Signals, kills at any moment, a full disk, two processes on one folder."""

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from lra.errors import Interrupted, UserError
from lra.training import Checkpoints
from lra.training.clock import MACHINE
from lra.training.interruption import Interruption

CHILD = """
import sys
from pathlib import Path
from rich.console import Console
import tiny
from lra.data import BatchIterator
from lra.errors import Interrupted, UserError
from lra.training import train

experiment = tiny.experiment(training=eval(sys.argv[2]))
former, taken = BatchIterator.__next__, []


def batch(self):
    taken.append(1)
    {on_batch}
    return former(self)


BatchIterator.__next__ = batch
print("ready", flush=True)
try:
    train(experiment, Path(sys.argv[1]), config_text="a = 1", difference=tiny.difference, console=Console(quiet=True))
except Interrupted as stop:
    print(stop, file=sys.stderr)
    sys.exit(128 + stop.signal)
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts processes that train the tiny experiment, each after it has said that it is about to."""
    started = []

    def start(workdir: Path, training: dict, on_batch: str = "pass") -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD.replace("{on_batch}", on_batch), workdir, repr(training)],
            env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{Path(__file__).parent}"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def lines(workdir: Path) -> list[dict]:
    found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{**line, **dict.fromkeys(MACHINE)} for line in found]


def same(tiny, first: Path, second: Path, step: int) -> None:
    """Fails unless two runs have the same metrics, the same last state bit for bit and the same place in the data."""
    assert lines(first) == lines(second)
    states, data = [], []
    for workdir in (first, second):
        with Checkpoints(workdir / "checkpoints") as checkpoints:
            states.append(checkpoints.restore(step, tiny.experiment().abstract_state))
            data.append(checkpoints.data(step))
    assert data[0] == data[1]
    for x, y in zip(*map(jax.tree.leaves, states), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# kill -9


def newest(workdir: Path) -> int:
    return max((int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdecimal()), default=0)


def kill_and_resume(tiny, run, child, tmp_path, *, kills: int, steps: int, seed: int) -> int:
    """Kills a run at random moments until it may finish; gives how many kills came in the midst of a save."""
    training = {"steps": steps, "checkpoint_every": 2, "evaluate_every": 10, "keep_best": 1, "log_every": 1}
    run(tiny.experiment(training=training), tmp_path / "whole")
    workdir, moments, in_save = tmp_path / "run", random.Random(seed), 0
    for n in range(kills):
        before, process = newest(workdir), child(workdir, training)
        # Half of the moments are in the beginning, where the folder is made, restored and rewound.
        while n % 2 == 0 and newest(workdir) == before and process.poll() is None:
            time.sleep(0.02)
        time.sleep(moments.uniform(0, 1.5 if n % 2 else 0.3))
        assert process.poll() is None, f"the run ended before kill {n}: give it more steps"
        process.kill()
        process.communicate()
        in_save += any("tmp" in path.name for path in (workdir / "checkpoints").glob("*"))
        logged = (workdir / "metrics.jsonl").read_text() if (workdir / "metrics.jsonl").exists() else ""
        done = max((json.loads(line)["step"] for line in logged.split("\n")[:-1]), default=0)
        assert done - newest(workdir) <= 2 * 2, "more is lost than the steps since the last save and those during it"
    process = child(workdir, training)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 0, errors
    same(tiny, workdir, tmp_path / "whole", steps)
    starts = json.loads((workdir / "record.json").read_text())["starts"]
    resumed = [start["step"] for start in starts]
    assert resumed == sorted(resumed)
    assert resumed[-1] > 0
    return in_save


def test_two_kills(tiny, run, child, tmp_path):
    kill_and_resume(tiny, run, child, tmp_path, kills=2, steps=24, seed=3)


@pytest.mark.slow
def test_twenty_kills(tiny, run, child, tmp_path, capsys):
    in_save = kill_and_resume(tiny, run, child, tmp_path, kills=20, steps=400, seed=0)
    with capsys.disabled():
        print(f"\n20 kills, {in_save} of them in the midst of a save: equal to the unbroken run bit for bit")
    assert in_save >= 3


# signals


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_the_step_and_saves(tiny, run, child, tmp_path, number):
    training = {"steps": 5, "log_every": 1}
    run(tiny.experiment(training=training), tmp_path / "whole")
    process = child(
        tmp_path / "run", training, f"len(taken) == 3 and __import__('os').kill(__import__('os').getpid(), {number:d})"
    )
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    where = tmp_path / "run" / "checkpoints" / "3"
    assert errors == f"{number.name}: stopped after step 3, saved in {where}; run again to go on\n"
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert (record["status"], record["reason"]) == ("interrupted", errors.strip())
    assert run(tiny.experiment(training=training)).steps_done == 2
    same(tiny, tmp_path / "run", tmp_path / "whole", 5)


def test_a_second_interrupt_kills_at_once(child, tmp_path):
    process = child(tmp_path / "run", {}, "len(taken) == 2 and __import__('time').sleep(99)")
    while not (tmp_path / "run" / "record.json").exists():
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # so soon it is the same wish, sent to a process and to its group
    time.sleep(0.6)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)  # nor does another wish to stop properly
    time.sleep(0.2)
    assert process.poll() is None
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert time.monotonic() - begin < 2
    process.communicate()


def test_handlers_are_put_back(monkeypatch):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interruption() as interruption:
        assert interruption.signal is None
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 5
        while interruption.signal is None and time.monotonic() < end:
            time.sleep(0.01)
    assert interruption.signal is signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_after_the_last_step_changes_nothing(tiny, run, monkeypatch):
    from lra.training import loop

    class Asked(Interruption):
        def __enter__(self):
            self.signal = signal.SIGTERM
            return self

    monkeypatch.setattr(loop, "Interruption", Asked)
    with pytest.raises(Interrupted, match="after step 1, "):
        run(tiny.experiment(training={"steps": 2}))
    assert run(tiny.experiment(training={"steps": 2})).step == 2


# a disk that is full


@pytest.mark.parametrize(
    ("limit_bytes", "sentence"),
    [
        (8000, r"checkpoint .*/checkpoints/4 cannot be written \(File too large\): make room .* goes on from step 2"),
        pytest.param(10, r"cannot write to .*/metrics.jsonl \(File too large\): make room", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_so(tiny, run, child, tmp_path, limit_bytes, sentence):
    training = {"steps": 6, "checkpoint_every": 2, "log_every": 1}
    limit = f"(lambda r: r.setrlimit(r.RLIMIT_FSIZE, ({limit_bytes}, -1)))(__import__('resource'))"
    process = child(tmp_path / "run", training, f"len(taken) == 4 and ({WAIT}, {limit})")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2, errors
    assert re.fullmatch(sentence + r".*\n", errors), errors
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == ("failed" if limit_bytes > 1000 else "running")
    run(tiny.experiment(training=training), tmp_path / "whole")
    assert run(tiny.experiment(training=training)).steps_done == 4
    same(tiny, tmp_path / "run", tmp_path / "whole", 6)


WAIT = "[__import__('time').sleep(0.1) for _ in range(50) if not (Path(sys.argv[1]) / 'checkpoints' / '2').exists()]"
"""For the checkpoint of step 2."""


# two processes


def test_the_second_process_is_refused_until_the_first_is_dead(tiny, run, child, tmp_path):
    first = child(tmp_path / "run", {}, "len(taken) == 2 and __import__('time').sleep(99)")
    while not (tmp_path / "run" / "record.json").exists():
        time.sleep(0.05)
    with pytest.raises(UserError, match=r"another process is training in .*/run: wait until it ends"):
        run(tiny.experiment())
    first.kill()
    first.communicate()
    assert run(tiny.experiment()).steps_done == 4


def test_two_runs_that_begin_together_do_not_mix(tiny, run, tmp_path):
    """Whoever gets the folder second is checked against what the first has put there."""
    from lra.training import folder

    with folder.claim(tmp_path / "run", "a = 1", tiny.difference):
        pass
    with (
        pytest.raises(UserError, match="another configuration"),
        folder.claim(tmp_path / "run", "a = 2", tiny.difference),
    ):
        pass


def test_a_disk_without_locks_is_said(tiny, tmp_path, monkeypatch):
    from lra.training import folder

    def fails(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folder.fcntl, "flock", fails)
    with (
        pytest.raises(UserError, match=r"cannot write to .*/run/lock \(No locks available\): .* --workdir"),
        folder.claim(tmp_path / "run", "a = 1", tiny.difference),
    ):
        pass
    assert not folder.in_use(tmp_path / "run")
