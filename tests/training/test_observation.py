"""What a run says about itself: TensorBoard, memory, traces, throughput, compilations."""

import functools
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console

from lra.errors import UserError
from lra.models.parameters import count
from lra.training import clock, memory
from lra.training.compiled import Step
from lra.training.loop import _full_batch
from lra.training.step import make_step
from lra.training.tensorboard import TensorBoard


@pytest.fixture
def small(tiny):
    """The cheapest experiment."""
    model = tiny.model(memory=False, dropout=0.0)
    return lambda **options: tiny.experiment(**{"model": model, **options})


def lines(workdir: Path, *splits: str) -> list[dict]:
    found = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["split"] in splits]


# TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by name, as TensorBoard's own reader sees them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def numbers(workdir: Path) -> dict[str, list[tuple[int, float]]]:
    """The same from `metrics.jsonl`."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines(workdir, "train", "valid", "memory"):
        for name, value in line.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
                found.setdefault(f"{line['split']}/{name}", []).append((line["step"], value))
    return found


def test_tensorboard_reads_what_the_metrics_file_holds_across_a_crash(small, run, tmp_path):
    training = {"steps": 6, "checkpoint_every": 2, "evaluate_every": 3, "tensorboard": True}
    run(small(training=training), steps=4)
    workdir = tmp_path / "run"
    # As if killed after step 3: a torn event, and events of steps that will be done again.
    (events,) = (workdir / "tensorboard").iterdir()
    events.write_bytes(events.read_bytes()[:-5])
    (workdir / "checkpoints" / "4").rename(tmp_path / "gone")
    run(small(training=training))
    assert len(list((workdir / "tensorboard").iterdir())) == 2
    found, expected = scalars(workdir / "tensorboard"), numbers(workdir)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in values], name
        np.testing.assert_allclose(*[[value for _, value in each] for each in (found[name], values)], rtol=1e-6)
    assert [step for step, _ in found["train/loss_nats"]] == [1, 2, 3, 4, 5, 6]
    assert {"valid/bits_per_byte", "train/data_wait_share", "memory/temporary_bytes"} < found.keys()


def test_layers_have_a_curve_each_and_what_is_no_number_has_none(tmp_path):
    with TensorBoard(tmp_path, 0) as board:
        board.write({"step": 3, "split": "train", "layer/x": [0.5, None, 2.5], "name": "a", "partial": True, "y": None})
        board.write({"step": 4, "split": "train", "layer/x": [1.5, 1.0, 3.5]})
    assert scalars(tmp_path) == {
        "train/layer/x/0": [(3, 0.5), (4, 1.5)], "train/layer/x/1": [(4, 1.0)], "train/layer/x/2": [(3, 2.5), (4, 3.5)],
    }  # fmt: skip


def test_a_full_disk_is_said_and_not_waited_for(tmp_path):
    code = (
        "import resource, sys; from pathlib import Path; from lra.training.tensorboard import TensorBoard\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "with TensorBoard(Path(sys.argv[1]), 0) as board:\n"
        "    for step in range(400):\n"
        "        board.write({'step': step, 'split': 'train', 'x': 1.0})\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "x"], capture_output=True, text=True, timeout=60)
    assert f"UserError: cannot write to {tmp_path / 'x'} (File too large): make room" in done.stderr
    (tmp_path / "y").touch()
    with pytest.raises(UserError, match=r"cannot write to .*/y \(File exists\)"):
        TensorBoard(tmp_path / "y", 0)


def test_without_the_option_tensorboard_is_not_even_imported(tiny):
    code = "import lra.training, sys; print('tensorboardX' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# memory


def test_the_report_counts_the_state_and_asks_xla_for_the_rest(tiny):
    experiment = tiny.experiment()
    state = experiment.abstract_state
    batch = _full_batch(experiment)
    step = make_step(experiment.graph, experiment.optimizer, total_steps=4, seed=0)
    report = memory.report(state, step.compile(state, batch))
    parameters = 4 * sum(count(state.parameters).values())
    remembered = 2 * 3 * tiny.SEGMENT * 16 * 4  # L, B, slots, C of float32
    assert report.state["parameters"] == parameters
    assert 2 * parameters <= report.state["optimizer"] <= 2 * parameters + 16  # two moments, and counters
    assert remembered <= report.state["memory"] <= remembered * 1.1
    held = sum(report.state.values())
    batch_bytes = sum(np.asarray(x).nbytes for x in vars(batch).values())
    assert held + batch_bytes + report.temporary <= report.peak <= held + batch_bytes + report.temporary + 1000
    assert report.activations == max(report.temporary - parameters, 0)
    assert report.limit is None  # CPUs don't say


def test_temporaries_grow_with_the_batch(tiny, small):
    def temporary(rows):
        experiment = small(data=functools.partial(tiny.Streams, batch_size=rows, segment=tiny.SEGMENT))
        step = make_step(experiment.graph, experiment.optimizer, total_steps=4, seed=0)
        return memory.report(
            experiment.abstract_state, step.compile(experiment.abstract_state, _full_batch(experiment))
        ).temporary

    assert 1.5 < temporary(34) / temporary(17) < 2.5


def test_the_report_is_shown_and_kept_before_the_first_step(small, run, tmp_path):
    out = io.StringIO()
    run(small(), steps=1, console=Console(file=out, width=400))
    assert out.getvalue().startswith("memory: parameters 0.0 MB")
    (line,) = lines(tmp_path / "run", "memory")
    assert (line["step"], line["device_limit_bytes"]) == (0, None)
    assert line["temporary_bytes"] > 0
    run(small())
    assert len(lines(tmp_path / "run", "memory")) == 1
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # as if killed before the first one
    run(small())
    assert [line["step"] for line in lines(tmp_path / "run", "memory", "train")] == [0, 1, 2, 3, 4]


def test_a_report_where_the_backend_is_silent_or_says_all():
    silent = memory.MemoryReport({"parameters": 2_000_000, "memory": 0}, None, None, None)
    assert str(silent) == "memory: parameters 2.0 MB; this backend does not say what a step needs beside it"
    full = memory.MemoryReport({"parameters": 2_000_000}, 7_500_000, 10_000_000, 16_000_000_000)
    assert str(full) == (
        "memory: parameters 2.0 MB; a step's temporaries 7.5 MB (activations about 5.5 MB); "
        "together 10.0 MB of 16,000.0 MB"
    )


# compilations


@pytest.fixture
def no_cache():
    """Programs that earlier sessions left on disk, and earlier tests in memory, are compiled anew."""
    jax.clear_caches()
    former = jax.config.jax_enable_compilation_cache
    for enabled in (False, former):
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()  # jax looks at the setting once
        if not enabled:
            yield


def test_compilations_are_counted_while_the_clock_runs(no_cache):
    triple = jax.jit(lambda x: 3 * x)
    with clock.Clock() as watch:
        for size in (5, 7, 5, 7, 11):
            triple(np.ones(size, np.float32))
        assert watch.take()[0]["compilations"] == 3
    triple(np.ones(13, np.float32))
    assert watch.take()[0]["compilations"] == 3


def test_the_step_is_compiled_once_in_a_run(no_cache, small, run, tmp_path):
    run(small(training={"evaluate_every": 2}))
    counts = [line["compilations"] for line in lines(tmp_path / "run", "train")]
    assert counts[:2] == [1, 1]  # the step
    assert counts[2] == counts[3] > 1  # and the evaluation
    run(small(training={"evaluate_every": 2, "steps": 5}), tmp_path / "other", steps=2)
    resumed = run(small(training={"evaluate_every": 2, "steps": 5}), tmp_path / "other", steps=3)
    assert resumed.metrics["compilations"] == 1


# throughput


def test_the_clock_counts_steps_and_waiting_but_no_pauses(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    def batches():
        while True:
            now[0] += 0.25
            yield "batch"

    source, watch = batches(), clock.Clock()

    def step(seconds):
        watch.next(source)
        now[0] += seconds - 0.25
        watch.add(10)

    step(100)  # the first one compiles
    assert watch.take() == ({"tokens_per_second": None, "data_wait_share": None, "compilations": 0}, None)
    step(1)
    step(3)
    assert watch.take() == ({"tokens_per_second": 5.0, "data_wait_share": 0.125, "compilations": 0}, 2.0)
    watch.pause()
    now[0] += 1000  # an evaluation
    step(1)
    step(1)
    assert watch.take() == ({"tokens_per_second": 10.0, "data_wait_share": 0.25, "compilations": 0}, 1.0)


# traces


def events(folder: Path) -> list[dict]:
    (path,) = folder.rglob("perfetto_trace.json.gz")
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def test_a_trace_holds_the_steps_that_were_asked_for(small, run, tmp_path):
    out = io.StringIO()
    run(small(), profile=(2, 3), console=Console(file=out, width=400))
    found = events(tmp_path / "run" / "profile")
    steps = [event for event in found if event.get("name") == "train" and "step_num" in event.get("args", {})]
    assert [int(event["args"]["step_num"]) for event in steps] == [2, 3]
    assert all(event["dur"] > 0 for event in steps)
    assert any("execute" in event.get("name", "").lower() for event in found)  # what the device did
    assert "perfetto_trace.json.gz" in out.getvalue()
    assert len(lines(tmp_path / "run", "train")) == 4


def test_a_run_that_breaks_leaves_no_trace_running(tiny, small, run, tmp_path, monkeypatch):
    from lra.data import BatchIterator

    taken, former = [], BatchIterator.__next__

    def fails(self):
        taken.append(1)
        if len(taken) == 2:
            raise OSError("the disk is gone")
        return former(self)

    with monkeypatch.context() as patch:
        patch.setattr(BatchIterator, "__next__", fails)
        with pytest.raises(OSError, match="disk is gone"):
            run(small(), profile=(1, 3))
    assert events(tmp_path / "run" / "profile")
    run(small(), tmp_path / "other", profile=(1, 1))  # jax refuses a second trace beside a running one


@pytest.mark.parametrize("steps", [(0, 1), (3, 2), (4, 5)])
def test_a_trace_of_steps_that_are_not_done_is_refused(small, run, tmp_path, steps):
    with pytest.raises(UserError, match=f"steps {steps[0]} to {steps[1]}, but steps 1 to 4"):
        run(small(), profile=steps)
    assert not list(tmp_path.iterdir())


# cost


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_host_memory_stays_flat_over_five_thousand_steps(small, run, monkeypatch):
    sizes, former = [], Step.__call__

    def measured(self, state, batch):
        sizes.append(resident())
        return former(self, state, batch)

    monkeypatch.setattr(Step, "__call__", measured)
    training = {"steps": 5000, "checkpoint_every": 1000, "evaluate_every": 1000, "log_every": 1, "tensorboard": True}
    run(small(training=training))
    tenths = [np.median(part) for part in np.array_split(sizes[-5000:], 10)]
    print(f"resident megabytes by tenth of the run: {[round(x / 1e6, 1) for x in tenths]}")
    assert tenths[-1] - tenths[2] < 20e6


@pytest.mark.slow
def test_observation_costs_at_most_three_percent_at_a_tenth_of_a_second(small, run, monkeypatch, tmp_path):
    """Each step sleeps on the host, where nothing overlaps with it: what remains is what the loop adds."""
    steps, began, former = 150, [], Step.__call__

    def slow(self, state, batch):
        began.append(time.perf_counter())
        result = former(self, state, batch)
        time.sleep(0.1)
        return result

    monkeypatch.setattr(Step, "__call__", slow)

    def seconds_a_step(workdir, **training):
        run(small(training={"steps": steps, **training}), tmp_path / workdir, console=Console(file=io.StringIO()))
        taken = began[-steps:]
        began.clear()
        return (taken[-1] - taken[10]) / (steps - 11)

    def bare():
        experiment = small()
        step, state = (
            make_step(experiment.graph, experiment.optimizer, total_steps=steps, seed=0),
            experiment.initial()[1],
        )
        batches = experiment.data.batches(experiment.corpus.tokens("train"), start=0, seed=0)
        for _ in range(steps):
            state, _ = step(state, next(batches))
        taken = began[-steps:]
        began.clear()
        return (taken[-1] - taken[10]) / (steps - 11)

    without = bare()
    observed = seconds_a_step("observed", log_every=10, checkpoint_every=50, tensorboard=True)
    print(f"steps a second: {1 / without:.3f} bare, {1 / observed:.3f} observed")
    assert observed / without < 1.03
