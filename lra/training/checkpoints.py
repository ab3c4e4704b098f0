"""Checkpoints of a run: the training state, the position of its data and its configuration, by orbax.

A checkpoint is a folder that appears in one atomic step, with two items: `state`, arrays by the name of their leaf
("parameters.embedding.embedding"), and `meta`, one JSON object with the position and corpus of the data, the resolved
configuration, the validation score, and the shape, dtype and digest of every array. `digests.json` has a digest of
every file of the two and of itself.

orbax restores most flipped bits without an error and stumbles over others. So an item's files are compared with their
digests before orbax sees them, and the arrays with theirs, taken of what was in memory, before they are used.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import tree

from lra.errors import UserError
from lra.models.parameters import named
from lra.training import digests
from lra.training.quiet import quiet, quiet_for_good

FORMAT = 2
"""Version of the layout; a change of it needs a way to read the former one, once there has been a release."""
_REMEDY = "put back a copy of that folder, or delete it to use an earlier one"
_DELETED, _DAMAGED, _UNFINISHED = ".deleted", ".damaged", ".orbax-checkpoint-tmp"


class DamagedError(UserError):
    """A checkpoint that does not hold what was saved."""


class Whole(NamedTuple):
    """The newest whole checkpoint.

    Attributes:
        step: of the checkpoint.
        state: what was restored.
        damaged: newer checkpoints, which were passed over, with what is wrong.
    """

    step: int
    state: Any
    damaged: dict[int, str]


class Checkpoints:
    """The checkpoints in a folder, of which the newest and, apart from these, the best are kept.

    Saving goes on in the background; leaving the context waits until it is finished and raises if it failed.

    Args:
        folder: of the checkpoints, one subfolder a step; made by the first save.
        keep: how many of the newest to keep; None for reading only.
        keep_best: how many of the best to keep. A low score is good; a checkpoint without a score, or with one that is
            not finite, is never among the best.
    """

    def __init__(self, folder: Path, *, keep: int | None = None, keep_best: int = 0) -> None:
        self.folder = folder.absolute()
        self._keep, self._keep_best = keep, keep_best
        self._scores: dict[int, float | None] = {}
        self._pending: int | None = None
        self._quiet = quiet()
        self._orbax = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler(), meta=ocp.JsonCheckpointHandler()),
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_digests),
        )
        if keep is not None:  # a reader must leave alone what a run beside it is writing
            self._sweep()

    @property
    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, in order."""
        if not self.folder.is_dir():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal() and path.is_dir())

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint, after waiting for the one that is being written; None where there is none."""
        self.wait()
        return max(self.steps, default=None)

    @property
    def best(self) -> int | None:
        """Step of the checkpoint with the best score, or None.

        Raises:
            UserError: a reader asks, and the score of a checkpoint cannot be read.
        """
        return next(iter(self._ranking()), None)

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / str(step)

    def would_be_best(self, score: float) -> bool:
        """Whether a checkpoint of this score would be kept among the best."""
        if not (math.isfinite(score) and self._keep_best):
            return False
        self.wait()  # what is being written counts
        ranking = self._ranking()[: self._keep_best]
        return len(ranking) < self._keep_best or score < self._score(ranking[-1])

    def save(
        self, step: int, state: Any, *, data: Mapping[str, Any], config_text: str, score: float | None = None
    ) -> None:
        """Saves a state (any pytree of arrays); returns before it is on disk, but after it has been copied.

        Args:
            step: newer than all that were saved.
            state: the arrays.
            data: position and corpus of the data, as JSON.
            config_text: the resolved configuration.
            score: on held-out text, low is good; None where it was not measured.

        Raises:
            UserError: a leaf is not finite, or this save or the last one cannot be written.
            RuntimeError: the step is not newer.
        """
        self.wait()
        if (last := self.latest) is not None and last >= step:
            raise RuntimeError(f"step {step} cannot be saved: {self.folder} has step {last} already")
        leaves = named(state)
        _check_finite(leaves, step)
        score = score if score is not None and math.isfinite(score) else None
        meta = {
            "format": FORMAT,
            "step": step,
            "leaves": {name: digests.described(leaf) for name, leaf in leaves.items()},
            "data": dict(data),
            "config": config_text,
            "score": score,
        }
        self._scores[step], self._pending = score, step
        with self._written(step):
            self._orbax.save(
                self.path(step),
                args=ocp.args.Composite(state=ocp.args.PyTreeSave(leaves), meta=ocp.args.JsonSave(meta)),
            )

    def poll(self) -> None:
        """To be called now and then: raises what went wrong in the background, and deletes what is not to be kept."""
        if self._pending is None:
            return
        with self._written(self._pending):
            self._orbax.check_for_errors()
        if self.path(self._pending).is_dir():
            self._pending = None
            self._prune()

    def wait(self) -> None:
        """Returns when everything is on disk; raises what went wrong in the background."""
        if self._pending is not None:
            with self._written(self._pending):
                self._orbax.wait_until_finished()
            self.poll()

    def data(self, step: int) -> dict[str, Any]:
        """The position and corpus of the data at a step.

        Raises:
            UserError: as `restore`.
        """
        item: dict[str, Any] = self._meta(step)["data"]
        return item

    def restore(self, step: int, abstract: Any, *, partial: bool = False) -> Any:
        """Restores a state with the structure, shapes and dtypes of an abstract one, once all has been verified.

        Args:
            step: which checkpoint.
            abstract: a pytree of `jax.ShapeDtypeStruct` with shardings, which need not be those of the saved state.
            partial: whether the checkpoint may have leaves that are not asked for; these are not read.

        Raises:
            DamagedError: it is not what was saved.
            UserError: a leaf is missing, too many, or of another shape or dtype; or the format is another.
        """
        where, wanted = self.path(step), named(abstract)
        saved = self._meta(step)["leaves"]
        _compare(where, saved, wanted, partial)
        arguments = ocp.args.PyTreeRestore(
            item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=partial
        )
        leaves = self._read(step, "state", arguments)
        for name in wanted:
            if digests.described(leaves[name]) != saved[name]:
                raise DamagedError(f"checkpoint {where} is damaged at {name}: {_REMEDY}")
        return tree.unflatten(tree.structure(abstract), [leaves[name] for name in wanted])

    def newest(self, abstract: Any, *, partial: bool = False) -> Whole | None:
        """Restores the newest whole checkpoint; None where there are no checkpoints.

        Raises:
            UserError: as `restore`, but damage only when no checkpoint is whole.
        """
        damaged: dict[int, str] = {}
        deleted = False
        for step in reversed(self.steps):
            try:
                return Whole(step, self.restore(step, abstract, partial=partial), damaged)
            except DamagedError as error:
                if self.path(step).is_dir():
                    damaged[step] = str(error).removesuffix(f": {_REMEDY}")
                else:
                    deleted = True
        if deleted:  # by the run itself while it was read, so there are newer ones
            return self.newest(abstract, partial=partial)
        if damaged:
            raise UserError(
                f"{'; '.join(damaged.values())}: no checkpoint is whole, so put back a copy, or delete "
                f"{self.folder} to train anew"
            )
        return None

    def set_aside(self, step: int) -> None:
        """Renames a damaged checkpoint, so that its step can be saved again."""
        aside = self.folder / f"{step}{_DAMAGED}"
        shutil.rmtree(aside, ignore_errors=True)
        self.path(step).rename(aside)

    def _meta(self, step: int) -> dict[str, Any]:
        where = self.path(step)
        meta: dict[str, Any] = self._read(step, "meta", ocp.args.JsonRestore())
        if meta["format"] != FORMAT:
            raise UserError(
                f"checkpoint {where} has format {meta['format']}, but this version of lra reads format {FORMAT}: "
                "use the version that wrote it"
            )
        if meta["step"] != step:
            raise DamagedError(f"checkpoint {where} is a copy of step {meta['step']}: {_REMEDY}")
        return meta

    def _read(self, step: int, item: str, arguments: Any) -> Any:
        """One item, after its files have been verified."""
        where = self.path(step)
        if (name := digests.damage(where, item)) is not None:
            raise DamagedError(f"checkpoint {where} is damaged at {name}: {_REMEDY}")
        try:
            return self._orbax.restore(where, args=ocp.args.Composite(**{item: arguments}))[item]
        except Exception as error:  # what orbax adds to a folder afterwards has no digest
            raise DamagedError(
                f"checkpoint {where} is damaged and cannot be read ({type(error).__name__}): {_REMEDY}"
            ) from error

    def _write_digests(self) -> None:
        """Called in the background, when all files of the items are there and before they appear as a checkpoint."""
        (unfinished,) = self.folder.glob(f"{self._pending}{_UNFINISHED}*")
        digests.write(unfinished, ("state", "meta"))

    def _score(self, step: int) -> float:
        """The score of a checkpoint, infinity where it has none."""
        if step not in self._scores:
            try:
                self._scores[step] = self._meta(step)["score"]
            except UserError:
                if self._keep is None and self.path(step).is_dir():  # a reader is to know that it may be the best
                    raise
                self._scores[step] = None
        score = self._scores[step]
        return math.inf if score is None else score

    def _ranking(self) -> list[int]:
        """Steps that have a score, the best first."""
        return sorted((step for step in self.steps if self._score(step) < math.inf), key=self._score)

    def _prune(self) -> None:
        """Deletes what is not to be kept; a kill in the midst of it leaves no half of a checkpoint behind."""
        if self._keep is None:
            return
        kept = {*self.steps[-self._keep :], *(self._ranking()[: self._keep_best] if self._keep_best else [])}
        for step in self.steps:
            if step not in kept:
                self.path(step).rename(self.folder / f"{step}{_DELETED}")
        self._sweep()

    def _sweep(self) -> None:
        """Removes what was being deleted or written when a run ended."""
        for path in self.folder.glob("*") if self.folder.is_dir() else ():
            if path.name.endswith(_DELETED) or _UNFINISHED in path.name:
                shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def _written(self, step: int) -> Iterator[None]:
        """Turns what the disk refuses into a sentence; tensorstore has the system's error in its text only."""
        try:
            yield
        except Exception as error:
            self._pending = None
            number = re.search(r"os_error_code='(\d+)'", str(error))
            reason = os.strerror(int(number[1])) if number else getattr(error, "strerror", None)
            if reason is None:
                raise
            self._sweep()
            last = self.latest
            quiet_for_good()
            raise UserError(
                f"checkpoint {self.path(step)} cannot be written ({reason}): make room or mend the disk, then the same "
                f"command goes on from {'the start' if last is None else f'step {last}'}"
            ) from error

    def __enter__(self) -> Self:
        self._quiet.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._quiet.__exit__, None, None, None)
            if kind is not None:  # what went wrong first is what counts
                stack.enter_context(contextlib.suppress(Exception))
            self.wait()
            self._orbax.close()


def _check_finite(leaves: Mapping[str, Any], step: int) -> None:
    for name, leaf in leaves.items():
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.isfinite(leaf).all():
            raise UserError(
                f"the state of step {step} is not saved, since {name} is not finite: lower the learning rate or set "
                "Optimizer.clip_norm"
            )


def _compare(where: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any], partial: bool) -> None:
    """Raises for the first leaf that differs. orbax itself would cast dtypes without a word."""
    for name, leaf in wanted.items():
        if name not in saved:
            raise UserError(f"checkpoint {where} lacks {name}, which this model has: use the configuration of that run")
        old = f"{saved[name]['dtype']}{saved[name]['shape']}"
        new = f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"
        if old != new:
            raise UserError(
                f"checkpoint {where} has {name} as {old}, but this model needs {new}: use the configuration of that run"
            )
    for name in saved:
        if name not in wanted and not partial:
            raise UserError(f"checkpoint {where} has {name}, which this model lacks: use the configuration of that run")
