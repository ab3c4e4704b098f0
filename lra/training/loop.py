"""The training loop: creates or resumes a run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Console

from lra.data import Batch, BatchIterator
from lra.errors import Interrupted, UserError
from lra.evaluation import evaluate
from lra.models import Decoder
from lra.training import folder, memory, non_finite
from lra.training.checkpoints import Checkpoints
from lra.training.clock import Clock
from lra.training.compiled import Step
from lra.training.experiment import Experiment, Weights
from lra.training.interruption import Interruption
from lra.training.metrics import MetricsFile
from lra.training.profile import Profile
from lra.training.progress import Progress
from lra.training.record import read, recorded
from lra.training.resume import check_vocabulary, identity, pass_over, resume, select
from lra.training.state import TrainState
from lra.training.step import make_step
from lra.training.tensorboard import TensorBoard


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
    profile: tuple[int, int] | None = None,
    console: Console | None = None,
    about: Mapping[str, Any] | None = None,
) -> Outcome:
    """Trains until the configured step, or continues what is in the folder from its newest whole checkpoint.

    Args:
        experiment: the run's configuration, constructed.
        workdir: folder of the run: `config.gin`, `record.json`, `metrics.jsonl`, `checkpoints/`, maybe `tensorboard/`.
        config_text: the resolved configuration.
        difference: says what differs between two resolved configurations, a line each.
        steps: step after which to stop, at most `Training.steps`; changes neither schedule nor configuration.
        profile: first and last step of which a trace is written to `profile/`; None for none.
        console: where progress is shown; None for stderr.
        about: facts of this start for the record, such as the command line.

    Raises:
        UserError: the folder is of another run or of none or in use, the corpus changed, the loss is not finite, a
            setting that shows only with the data does not fit, no checkpoint is whole, the disk is full. Nothing is
            written before everything has been checked.
        Interrupted: SIGTERM or Ctrl-C came; the state after the step that was running has been saved.
    """
    begin = time.perf_counter()
    target = _target(experiment, steps)
    _check_profile(profile, 0, target)
    folder.check(workdir, config_text, difference)
    batches, step_function = _prepare(experiment)
    console = console or Console(stderr=True)
    training, corpus = experiment.training, identity(experiment.corpus)
    with (
        folder.claim(workdir, config_text, difference),
        Interruption() as interruption,
        Checkpoints(
            workdir / folder.CHECKPOINTS, keep=training.keep_checkpoints, keep_best=training.keep_best
        ) as checkpoints,
    ):
        start, state = resume(experiment, workdir, checkpoints, batches, console)
        if start >= target:
            Progress(console, target, start).say(f"{workdir} is at step {start} already: nothing to do")
            return Outcome(start, 0, time.perf_counter() - begin, checkpoints.path(start), {}, {})
        _check_profile(profile, start, target)
        shown = training.tensorboard
        logged = start or -1  # a run that starts from nothing once more says anew what it needs in memory
        with (
            recorded(workdir, step=start, target=target, total=training.steps, corpus=corpus, about=about or {}),
            TensorBoard(workdir / folder.TENSORBOARD, logged) if shown else contextlib.nullcontext() as board,
            MetricsFile(workdir / folder.METRICS, logged, board) as metrics,
            Progress(console, target, start) as progress,
            Clock() as clock,
            Profile(workdir / folder.PROFILE, profile, progress.say) as tracing,
        ):
            if start:
                progress.say(f"resuming {workdir} from step {start}")
            _report_memory(experiment, step_function, state, metrics, progress, start)
            run = _Run(experiment, config_text, checkpoints, metrics, progress, target, interruption, clock, tracing)
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


def load_model(
    experiment: Experiment,
    workdir: Path,
    weights: Weights = "last",
    *,
    checkpoint: str = "newest",
    console: Console | None = None,
) -> tuple[Decoder, int, dict[str, Any]]:
    """Restores the model of one of a run's checkpoints.

    Args:
        experiment: the run's configuration, constructed.
        workdir: folder of the run.
        weights: its "last" parameters, or their moving average "ema".
        checkpoint: "newest" (that is whole), "best" (by the score while training) or a step.
        console: where damaged checkpoints are named; None for stderr.

    Returns:
        The model, the step, and the data item: "iterator" (position), "corpus" (name), "description", "digest",
        "tokenisation".

    Raises:
        UserError: there is no such checkpoint, it is damaged or of another model or vocabulary, or the run keeps no
            average.
    """
    check_vocabulary(experiment.corpus, read(workdir).get("corpus", {}), workdir)  # else another model would be blamed
    with Checkpoints(workdir / folder.CHECKPOINTS) as checkpoints:
        name = "average" if weights == "ema" else "parameters"
        abstract = experiment.abstract_state
        if weights == "ema":
            experiment.averaged(abstract)
        wanted = {name: getattr(abstract, name), "buffers": abstract.buffers}
        step, values = select(checkpoints, workdir, wanted, checkpoint, console or Console(stderr=True))
        data = checkpoints.data(step)
        check_vocabulary(experiment.corpus, data, workdir)
        return nnx.merge(experiment.graph, values[name], values["buffers"]), step, data


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
        interruption: Interruption,
        clock: Clock,
        profile: Profile,
    ) -> None:
        self._experiment, self._config_text, self._target = experiment, config_text, target
        self._interruption = interruption
        self._checkpoints, self._metrics, self._progress = checkpoints, metrics, progress
        self._clock, self._profile = clock, profile
        self.last_metrics: dict[str, Any] = {}
        self.last_evaluation: dict[str, Any] = {}

    def loop(self, state: TrainState, start: int, batches: BatchIterator, step_function: Step) -> None:
        training = self._experiment.training
        pending: _Done | None = None
        for step in range(start + 1, self._target + 1):
            batch = self._clock.next(batches)
            with self._profile.step(step):
                state, metrics = step_function(state, batch)
            if self._profile.after(step, metrics):
                self._clock.pause()
            # Only now that the device has work again does the host wait for the step before.
            if pending is not None:
                self._finish(pending, state)
            pending = _Done(step, metrics, batch, batches.get_state())
            self._checkpoints.poll()
            asked = self._interruption.signal
            evaluates = step == self._target or _due(step, training.evaluate_every)
            saves = step == self._target or _due(step, training.checkpoint_every) or asked is not None
            if evaluates or saves:
                self._finish(pending, state)
                pending = None
                self._clock.pause()
            score = self._evaluate(step, state) if evaluates else None
            if saves or (score is not None and self._checkpoints.would_be_best(score)):
                data = {"iterator": batches.get_state(), **identity(self._experiment.corpus)}
                self._checkpoints.save(step, state, data=data, config_text=self._config_text, score=score)
            if asked is not None and step < self._target:
                self._checkpoints.wait()
                where = self._checkpoints.path(step)
                raise Interrupted(
                    f"{asked.name}: stopped after step {step}, saved in {where}; run again to go on", asked
                )
        self._checkpoints.wait()

    def rewind(self, fault: non_finite.NotFiniteError) -> tuple[TrainState, int]:
        """The state of the last checkpoint, or the initial one, and its step; for the data behind the fault."""
        experiment = self._experiment
        self._checkpoints.wait()
        whole = self._checkpoints.newest(experiment.abstract_state)
        step, state = (0, experiment.initial()[1]) if whole is None else (whole.step, whole.state)
        if whole is not None:
            pass_over(self._checkpoints, whole, self._progress.say)
        self._progress.say(f"{fault}: going on from step {step} with the data behind step {fault.step}")
        self._metrics.rewind(step)
        self._clock.pause()
        return non_finite.rewound(experiment, state, fault.rewinds), step

    def _finish(self, done: _Done, state: TrainState) -> None:
        """Fetches the metrics of a step, checks and logs them; `state` is the newest one."""
        step, metrics = done.step, jax.device_get(done.metrics)
        in_a_row = int(metrics.pop("non_finite"))
        if in_a_row or not math.isfinite(metrics["parameter_norm"]):
            self._not_finite(done, metrics, in_a_row, state)
        self._clock.add(float(metrics.pop("tokens")))
        self._progress.advance(step)
        if step == self._target or _due(step, self._experiment.training.log_every):
            machine, seconds_a_step = self._clock.take()
            line = {"step": step, "split": "train", **machine, **metrics}
            self.last_metrics = self._metrics.write(line)
            left = None if seconds_a_step is None else (self._target - step) * seconds_a_step
            self._progress.report(step, float(metrics["bits_per_byte"]), machine["tokens_per_second"], left)

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

    def _evaluate(self, step: int, state: TrainState) -> float:
        """Scores "valid" and gives its bits per byte; NaN where the score is not finite, as it may be in float16."""
        experiment = self._experiment
        weights = experiment.training.evaluate_weights
        line = {"step": step, "split": "valid", "protocol": next(iter(experiment.protocols)), "weights": weights}
        try:
            report = evaluate(
                experiment.model(experiment.averaged(state) if weights == "ema" else state), experiment.corpus, "valid",
                experiment.protocol,
                key=jax.random.key(experiment.seed), limit=experiment.training.evaluate_tokens,
            )  # fmt: skip
        except FloatingPointError as error:
            self.last_evaluation = self._metrics.write(line | {"loss_nats": None, "bits_per_byte": None})
            self._progress.say(f"step {step}  {error}")
            return math.nan
        line |= {
            "loss_nats": report.nats_per_token,
            "bits_per_byte": report.bits_per_byte,
            "accuracy": report.accuracy,
            "tokens_scored": report.tokens_scored,
            "tokens_expected": report.tokens_expected,
            "partial": report.partial,
        }
        self.last_evaluation = self._metrics.write(line)
        scored = f"{report.tokens_scored:,} of {report.tokens_expected:,} tokens"
        self._progress.say(f"step {step}  valid: {report.bits_per_byte:.4f} bits per byte ({scored})")
        return report.bits_per_byte


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


def _check_profile(steps: tuple[int, int] | None, start: int, target: int) -> None:
    if steps is not None and not start < steps[0] <= steps[1] <= target:
        raise UserError(
            f"the profile is of steps {steps[0]} to {steps[1]}, but steps {start + 1} to {target} are to be done: "
            "give a first and a last one of these"
        )


def _prepare(experiment: Experiment) -> tuple[BatchIterator, Step]:
    """The data and the step, after all checks that need the data."""
    corpus, data, training = experiment.corpus, experiment.data, experiment.training
    tokens, held_out = corpus.tokens("train"), corpus.tokens("valid")
    for ids in (tokens, held_out):
        corpus.vocabulary.check(ids)
    protocol = experiment.protocol
    held_out_documents = corpus.document_starts("valid") if protocol.documents else None
    protocol.rows(held_out[: training.evaluate_tokens].size, held_out_documents)
    batches = data.batches(
        tokens, start=corpus.vocabulary.start, seed=experiment.seed, scored=corpus.scored("train"),
        documents=corpus.document_starts("train") if data.documents else None,
    )  # fmt: skip
    step = make_step(
        experiment.graph, experiment.optimizer, total_steps=training.steps, seed=experiment.seed,
        bytes_per_token=corpus.num_bytes("train") / len(tokens),
        accumulate=training.accumulate, non_finite=training.non_finite, non_finite_limit=training.non_finite_limit,
    )  # fmt: skip
    _check_shapes(experiment, step)
    return batches, step


def _full_batch(experiment: Experiment) -> Batch:
    """A batch of the run's shape."""
    shape = (experiment.data.batch_size, experiment.data.segment)
    tokens, weights = np.zeros(shape, np.int32), np.ones(shape, np.float32)
    return Batch(inputs=tokens, targets=tokens, weights=weights, reset=np.zeros(shape[0], bool))


def _report_memory(
    experiment: Experiment, step: Step, state: TrainState, metrics: MetricsFile, progress: Progress, start: int
) -> None:
    """Compiles the step and says what it needs; into the metrics once a run, which may go on on another machine."""
    compiled = step.compile(experiment.abstract_state, _full_batch(experiment), state)
    report = memory.report(experiment.abstract_state, compiled)
    progress.say(str(report))
    if not start:
        metrics.write({"step": 0, "split": "memory", **report.as_dict()})


def _check_shapes(experiment: Experiment, step: Step) -> None:
    """Traces the step, so that a model that does not take the data's shapes shows before anything is written."""
    batch = _full_batch(experiment)
    try:
        step.trace(experiment.abstract_state, batch)
    except ValueError as error:
        raise UserError(str(error)) from error
