"""The training loop: creates or resumes a run folder."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Console

from lra.data import Batch, BatchIterator, Corpus
from lra.errors import UserError
from lra.evaluation import evaluate
from lra.models import Decoder
from lra.training import folder, non_finite
from lra.training.checkpoints import Checkpoints
from lra.training.experiment import Experiment, Weights
from lra.training.metrics import MetricsFile
from lra.training.progress import Progress
from lra.training.state import TrainState
from lra.training.step import Step, make_step


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call of `train` did.

    Attributes:
        step: updates done in all.
        steps_done: updates done by this call.
        seconds: that it took.
        checkpoint: folder of the newest checkpoint.
        metrics: last line of training metrics; empty when there was nothing to do.
        evaluation: last line of evaluation metrics; empty likewise.
    """

    step: int
    steps_done: int
    seconds: float
    checkpoint: Path
    metrics: dict[str, Any]
    evaluation: dict[str, Any]


def train(
    experiment: Experiment,
    workdir: Path,
    *,
    config_text: str,
    difference: Callable[[str, str], list[str]],
    steps: int | None = None,
    console: Console | None = None,
) -> Outcome:
    """Trains until the configured step, or continues what is in the folder.

    Args:
        experiment: the run's configuration, constructed.
        workdir: folder of the run: `config.gin`, `metrics.jsonl`, `checkpoints/`.
        config_text: the resolved configuration.
        difference: says what differs between two resolved configurations, a line each.
        steps: step after which to stop, at most `Training.steps`; changes neither schedule nor configuration.
        console: where progress is shown; None for stderr.

    Raises:
        UserError: the folder is of another run or of none, the corpus changed, the loss is not finite, a setting that
            shows only with the data does not fit. Nothing is written before everything has been checked.
    """
    begin = time.perf_counter()
    target = _target(experiment, steps)
    folder.check(workdir, config_text, difference)
    batches, step_function = _prepare(experiment)
    folder.create(workdir, config_text)
    console = console or Console(stderr=True)
    with Checkpoints(workdir / folder.CHECKPOINTS, keep=experiment.training.keep_checkpoints) as checkpoints:
        start = checkpoints.latest or 0
        if start:
            _check_corpus(experiment.corpus, checkpoints.data(start), workdir)
        if start >= target:
            Progress(console, target, start).say(f"{workdir} is at step {start} already: nothing to do")
            return Outcome(start, 0, time.perf_counter() - begin, checkpoints.path(start), {}, {})
        if start:
            state = checkpoints.restore(start, experiment.abstract_state)
            batches.set_state(checkpoints.data(start)["iterator"])
        else:
            _, state = experiment.initial()
        with (
            MetricsFile(workdir / folder.METRICS, start) as metrics,
            Progress(console, target, start) as progress,
        ):
            if start:
                progress.say(f"resuming {workdir} from step {start}")
            run = _Run(experiment, config_text, checkpoints, metrics, progress, target)
            at = start
            while True:
                try:
                    run.loop(state, at, batches, step_function)
                    break
                except non_finite.NotFiniteError as fault:
                    state, at = run.rewind(fault)
                    batches.set_state(fault.position)
    seconds = time.perf_counter() - begin
    return Outcome(target, target - start, seconds, checkpoints.path(target), run.last_metrics, run.last_evaluation)


def load_model(experiment: Experiment, workdir: Path, weights: Weights = "last") -> tuple[Decoder, int, dict[str, Any]]:
    """Restores the model of a run's newest checkpoint, with its last parameters or with their moving average "ema".

    Returns:
        The model, the step, and the data item: "iterator" (position), "corpus" (name), "description", "digest".

    Raises:
        UserError: there is no checkpoint, it is of another model, or the run keeps no average.
    """
    path = workdir / folder.CHECKPOINTS
    missing = f"{workdir} holds no checkpoint: train first, with `lra train`"
    if not path.is_dir():
        raise UserError(missing)
    with Checkpoints(path) as checkpoints:
        step = checkpoints.latest
        if step is None:
            raise UserError(missing)
        name = "average" if weights == "ema" else "parameters"
        abstract = experiment.abstract_state
        if weights == "ema":
            experiment.averaged(abstract)
        values = checkpoints.restore(step, {name: getattr(abstract, name), "buffers": abstract.buffers}, partial=True)
        return nnx.merge(experiment.graph, values[name], values["buffers"]), step, checkpoints.data(step)


@dataclasses.dataclass(frozen=True)
class _Done:
    """A step that the device was given: its metrics, its batch, and the position of the data behind it."""

    step: int
    metrics: dict[str, Any]
    batch: Batch
    position: dict[str, Any]


class _Run:
    """One call's way from a state to the target step."""

    def __init__(
        self,
        experiment: Experiment,
        config_text: str,
        checkpoints: Checkpoints,
        metrics: MetricsFile,
        progress: Progress,
        target: int,
    ) -> None:
        self._experiment, self._config_text, self._target = experiment, config_text, target
        self._checkpoints, self._metrics, self._progress = checkpoints, metrics, progress
        self._speed = _Speed()
        self.last_metrics: dict[str, Any] = {}
        self.last_evaluation: dict[str, Any] = {}

    def loop(self, state: TrainState, start: int, batches: BatchIterator, step_function: Step) -> None:
        training = self._experiment.training
        pending: _Done | None = None
        for step in range(start + 1, self._target + 1):
            batch = next(batches)
            state, metrics = step_function(state, batch)
            # Only now that the device has work again does the host wait for the step before.
            if pending is not None:
                self._finish(pending, state)
            pending = _Done(step, metrics, batch, batches.get_state())
            evaluates = step == self._target or _due(step, training.evaluate_every)
            saves = step == self._target or _due(step, training.checkpoint_every)
            if evaluates or saves:
                self._finish(pending, state)
                pending = None
                self._speed.pause()
            if evaluates:
                self._evaluate(step, state)
            if saves:
                data = {"iterator": batches.get_state(), **_identity(self._experiment.corpus)}
                self._checkpoints.save(step, state, data=data, config_text=self._config_text)

    def rewind(self, fault: non_finite.NotFiniteError) -> tuple[TrainState, int]:
        """The state of the last checkpoint, or the initial one, and its step; for the data behind the fault."""
        self._checkpoints.wait()
        step = self._checkpoints.latest or 0
        self._progress.say(f"{fault}: going on from step {step} with the data behind step {fault.step}")
        experiment = self._experiment
        state = self._checkpoints.restore(step, experiment.abstract_state) if step else experiment.initial()[1]
        self._metrics.rewind(step)
        self._speed.pause()
        return non_finite.rewound(state, fault.rewinds), step

    def _finish(self, done: _Done, state: TrainState) -> None:
        """Fetches the metrics of a step, checks and logs them; `state` is the newest one."""
        step, metrics = done.step, jax.device_get(done.metrics)
        in_a_row = int(metrics.pop("non_finite"))
        if in_a_row or not math.isfinite(metrics["parameter_norm"]):
            self._not_finite(done, metrics, in_a_row, state)
        self._speed.add(float(metrics.pop("tokens")))
        self._progress.advance(step)
        if step == self._target or _due(step, self._experiment.training.log_every):
            tokens_per_second, seconds_a_step = self._speed.take()
            line = {"step": step, "split": "train", "tokens_per_second": tokens_per_second, **metrics}
            self.last_metrics = self._metrics.write(line)
            left = None if seconds_a_step is None else (self._target - step) * seconds_a_step
            self._progress.report(step, float(metrics["bits_per_byte"]), tokens_per_second, left)

    def _not_finite(self, done: _Done, metrics: dict[str, Any], in_a_row: int, state: TrainState) -> None:
        """Goes on, raises `NotFiniteError` or stops, as `Training.non_finite` says."""
        training = self._experiment.training
        name = non_finite.name(metrics)
        sentence = f"{name} is {metrics.get(name)} at step {done.step}"
        if training.non_finite == "skip" and 0 < in_a_row <= training.non_finite_limit:
            self._progress.say(f"{sentence}: skipped")
            return
        rewinds = int(state.faults.rewinds) + 1
        if training.non_finite == "rewind" and rewinds <= training.non_finite_limit:
            raise non_finite.NotFiniteError(done.step, done.position, rewinds, sentence)
        last = self._checkpoints.latest
        kept = "no checkpoint was saved" if last is None else f"the last checkpoint is of step {last}"
        first = non_finite.explain(self._experiment, done.step, state, done.batch, guarded=in_a_row > 0)
        raise UserError(
            f"{sentence} ({kept}); {first}: "
            "lower the learning rate or set Optimizer.clip_norm, and train in a new folder"
        )

    def _evaluate(self, step: int, state: TrainState) -> None:
        experiment = self._experiment
        weights = experiment.training.evaluate_weights
        report = evaluate(
            experiment.model(experiment.averaged(state) if weights == "ema" else state), experiment.corpus, "valid",
            experiment.protocol,
            key=jax.random.key(experiment.seed), limit=experiment.training.evaluate_tokens,
        )  # fmt: skip
        line = {
            "step": step,
            "split": "valid",
            "protocol": next(iter(experiment.protocols)),
            "weights": weights,
            "loss_nats": report.nats_per_token,
            "bits_per_byte": report.bits_per_byte,
            "tokens_scored": report.tokens_scored,
            "tokens_expected": report.tokens_expected,
            "partial": report.partial,
        }
        self.last_evaluation = self._metrics.write(line)
        scored = f"{report.tokens_scored:,} of {report.tokens_expected:,} tokens"
        self._progress.say(f"step {step}  valid: {report.bits_per_byte:.4f} bits per byte ({scored})")


class _Speed:
    """Tokens a second between fetches of metrics; compilation, evaluation and saving don't count."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._tokens = self._seconds = 0.0
        self._steps = 0

    def pause(self) -> None:
        self._last = None

    def add(self, tokens: float) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._tokens += tokens
            self._seconds += now - self._last
            self._steps += 1
        self._last = now

    def take(self) -> tuple[float | None, float | None]:
        """Tokens a second and seconds a step since the last call, None where nothing was measured."""
        rates = (self._tokens / self._seconds, self._seconds / self._steps) if self._steps else (None, None)
        self._tokens, self._seconds, self._steps = 0.0, 0.0, 0
        return rates


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _target(experiment: Experiment, steps: int | None) -> int:
    total = experiment.training.steps
    if steps is None:
        return total
    if not 1 <= steps <= total:
        raise UserError(
            f"the run is to stop after step {steps}, but it has steps 1 to {total}: "
            "give one of them, or raise Training.steps in a new folder"
        )
    return steps


def _prepare(experiment: Experiment) -> tuple[BatchIterator, Step]:
    """The data and the step, after all checks that need the data."""
    corpus, data, training = experiment.corpus, experiment.data, experiment.training
    tokens, held_out = corpus.tokens("train"), corpus.tokens("valid")
    for ids in (tokens, held_out):
        corpus.vocabulary.check(ids)
    experiment.protocol.bounds(held_out[: training.evaluate_tokens].size)
    batches = data.batches(tokens, start=corpus.vocabulary.start, seed=experiment.seed)
    step = make_step(
        experiment.graph, experiment.optimizer, total_steps=training.steps, seed=experiment.seed,
        bytes_per_token=corpus.num_bytes("train") / len(tokens),
        accumulate=training.accumulate, non_finite=training.non_finite,
    )  # fmt: skip
    _check_shapes(experiment, step)
    return batches, step


def _check_shapes(experiment: Experiment, step: Step) -> None:
    """Traces the step, so that a model that does not take the data's shapes shows before anything is written."""
    shape = (experiment.data.batch_size, experiment.data.segment)
    tokens, weights = np.zeros(shape, np.int32), np.ones(shape, np.float32)
    batch = Batch(inputs=tokens, targets=tokens, weights=weights, reset=np.zeros(shape[0], bool))
    try:
        jax.eval_shape(lambda state: step(state, batch), experiment.abstract_state)
    except ValueError as error:
        raise UserError(str(error)) from error


def _identity(corpus: Corpus) -> dict[str, str]:
    return {"corpus": corpus.name, "description": corpus.description, "digest": corpus.digest}


def _check_corpus(corpus: Corpus, data: dict[str, Any], workdir: Path) -> None:
    if (data["corpus"], data["digest"]) != (corpus.name, corpus.digest):
        raise UserError(
            f"{workdir} was trained on {data['description']}, but the corpus is now {corpus.description}: "
            "restore the former text or choose another folder"
        )
