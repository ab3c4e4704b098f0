"""Which checkpoint a run goes on from, and which one a reader takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from lra.data import BatchIterator, Corpus
from lra.errors import UserError
from lra.training.checkpoints import Checkpoints, Whole
from lra.training.experiment import Experiment
from lra.training.state import TrainState


def resume(
    experiment: Experiment, workdir: Path, checkpoints: Checkpoints, batches: BatchIterator, console: Console
) -> tuple[int, TrainState]:
    """The step and the state to start from; moves the data there, and damaged checkpoints out of the way.

    Raises:
        UserError: there are checkpoints, but none is whole; the newest whole one is of another model or corpus.
    """
    whole = checkpoints.newest(experiment.abstract_state)
    if whole is None:
        return 0, experiment.initial()[1]
    data = checkpoints.data(whole.step)
    check_corpus(experiment.corpus, data, workdir)
    batches.set_state(data["iterator"])
    pass_over(checkpoints, whole, _saying(console))
    return whole.step, whole.state


def pass_over(checkpoints: Checkpoints, whole: Whole, say: Callable[[str], None]) -> None:
    """Names the damaged checkpoints and puts them out of the way of those that are saved from now on."""
    _name_damaged(whole, say)
    for step in whole.damaged:
        checkpoints.set_aside(step)


def select(checkpoints: Checkpoints, workdir: Path, abstract: Any, which: str, console: Console) -> tuple[int, Any]:
    """The step and the values of the checkpoint that a reader asks for.

    Args:
        checkpoints: of the run.
        workdir: the run's folder, for messages.
        abstract: the part of the state that is wanted.
        which: "newest" (that is whole), "best" or a step.
        console: where damaged checkpoints are named.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or it is of another model.
    """
    steps = checkpoints.steps
    if not steps:
        raise UserError(f"{workdir} holds no checkpoint: train first, with `lra train`")
    if which == "newest":
        whole = checkpoints.newest(abstract, partial=True)
        if whole is None:
            raise UserError(f"the checkpoints of {workdir} are gone: try again")
        _name_damaged(whole, _saying(console))
        return whole.step, whole.state
    there = f"{workdir} has checkpoints of steps {', '.join(map(str, steps))}"
    if which == "best" and checkpoints.best is None:
        raise UserError(f"no checkpoint was evaluated, so none is best, and {there}: give newest or one of these steps")
    step = checkpoints.best if which == "best" else int(which) if which.isdecimal() else None
    if step not in steps or step is None:
        raise UserError(f"there is no checkpoint {which!r}, but {there}: give newest, best or one of these steps")
    return step, checkpoints.restore(step, abstract, partial=True)


def identity(corpus: Corpus) -> dict[str, str]:
    """What a checkpoint and the record say of the corpus."""
    return {
        "corpus": corpus.name,
        "description": corpus.description,
        "digest": corpus.digest,
        "tokenisation": _tokenisation(corpus),
    }


def check_vocabulary(corpus: Corpus, known: Mapping[str, Any], workdir: Path) -> None:
    """Raises `UserError` where `known`, an `identity` or nothing, says that a run reads text as other tokens."""
    now = _tokenisation(corpus)
    if known.get("tokenisation", now) != now:
        raise UserError(
            f"{workdir} reads text as {known['tokenisation']}, but the corpus is now read as {now}: "
            "restore the former vocabulary"
        )


def check_corpus(corpus: Corpus, data: Mapping[str, Any], workdir: Path) -> None:
    """Raises `UserError` where `data`, which holds an `identity`, is of another text or vocabulary."""
    check_vocabulary(corpus, data, workdir)
    if (data["corpus"], data["digest"]) != (corpus.name, corpus.digest):
        raise UserError(
            f"{workdir} was trained on {data['description']}, but the corpus is now {corpus.description}: "
            "restore the former text or choose another folder"
        )


def _tokenisation(corpus: Corpus) -> str:
    return f"{corpus.vocabulary.description[:-1]}, digest {corpus.vocabulary.digest})"


def _name_damaged(whole: Whole, say: Callable[[str], None]) -> None:
    for sentence in whole.damaged.values():
        say(f"{sentence}: going on with step {whole.step}")


def _saying(console: Console) -> Callable[[str], None]:
    return functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
