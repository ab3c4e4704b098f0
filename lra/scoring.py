"""What `lra eval` scores, and what stands beside the score."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from lra.attention import draw
from lra.bar import Show, bar
from lra.errors import UserError
from lra.evaluation import BREAKDOWNS, Breakdown, ByContext, Protocol, Report, evaluate, reach
from lra.models import Decoder
from lra.training import Experiment

CONTEXTS = 8
"""Context lengths, unless others are asked for."""


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A run's model with what it is scored on.

    Attributes:
        run: its folder.
        experiment: of the run.
        protocol_name: of the protocol, among the experiment's.
        model: with the chosen weights.
        step: of the checkpoint.
    """

    run: Path
    experiment: Experiment
    protocol_name: str
    model: Decoder
    step: int

    @property
    def protocol(self) -> Protocol:
        """The chosen one."""
        return self.experiment.protocols[self.protocol_name]


def check(options: argparse.Namespace) -> None:
    """Refuses what does not go together, before anything is loaded."""
    if options.by is None and options.png is not None:
        raise UserError(f"--png draws what --by shows: add --by, which knows {', '.join(BREAKDOWNS)}")
    if options.by is not None and options.by not in BREAKDOWNS:
        raise UserError(f"there is no --by {options.by!r}: there is {', '.join(BREAKDOWNS)}")
    for name in ("group", "contexts"):
        if getattr(options, name) and options.by != ByContext.name:
            raise UserError(f"--{name} is for the score by context: add --by {ByContext.name}, or leave it out")
    if options.contexts is not None:
        _lengths(options.contexts)
    if options.png is not None:
        draw.check(Path(options.png))


def score(scorers: Sequence[Scorer], options: argparse.Namespace) -> tuple[Report, Breakdown | None]:
    """The report of the first run, and what was asked for beside it.

    Raises:
        UserError: the runs of a group differ in what they were trained on, or a model cannot be scored so.
    """
    try:
        with bar() as show:
            if options.by == ByContext.name:
                return _by_context(scorers, options, show)
            breakdown = None if options.by is None else BREAKDOWNS[options.by]()
            (scorer,) = scorers
            report = evaluate(
                scorer.model, scorer.experiment.corpus, options.split, scorer.protocol,
                key=jax.random.key(scorer.experiment.seed), limit=options.partial, step=scorer.step,
                weights=options.weights, breakdown=breakdown, progress=functools.partial(show, "scoring"),
            )  # fmt: skip
    except FloatingPointError as error:
        raise UserError(f"{error}: choose other weights with --checkpoint or --weights") from error
    return report, breakdown


def _by_context(scorers: Sequence[Scorer], options: argparse.Namespace, show: Show) -> tuple[Report, ByContext]:
    first, *others = scorers
    corpus = first.experiment.corpus
    for other in others:
        _same_text(first, other)
    lengths = _default_lengths(scorers) if options.contexts is None else _lengths(options.contexts)
    breakdown = ByContext(lengths) if options.partial is None else ByContext(lengths, options.partial)
    for scorer in scorers:
        breakdown.check(str(scorer.run), scorer.model)
    reports = [
        breakdown.measure(
            str(scorer.run), scorer.model, corpus, options.split,
            batch_tokens=scorer.protocol.batch_size * scorer.protocol.segment,
            progress=functools.partial(show, f"scoring {scorer.run} from each length"),
            key=jax.random.key(scorer.experiment.seed), step=scorer.step, weights=options.weights,
        )
        for scorer in scorers
    ]  # fmt: skip
    return reports[0], breakdown


def _same_text(first: Scorer, other: Scorer) -> None:
    """Refuses a run whose losses are not of the same tokens, or that is there twice."""
    if first.run.resolve() == other.run.resolve():
        raise UserError(f"{other.run} is in the group twice: name each run once")
    ours, theirs = first.experiment.corpus, other.experiment.corpus
    for what, one, two in (("corpus", ours, theirs), ("vocabulary", ours.vocabulary, theirs.vocabulary)):
        if (one.name, one.digest) != (two.name, two.digest):
            raise UserError(
                f"{first.run} has {what} {one.name} (digest {one.digest}), but {other.run} has {two.name} (digest "
                f"{two.digest}): put runs into a group that score the same tokens"
            )


def _default_lengths(scorers: Sequence[Scorer]) -> list[int]:
    """Equal steps up to the longest context that a protocol of the group gives, as far as all models have positions."""
    longest = max(reach(scorer.model, scorer.protocol) for scorer in scorers)
    positions = (scorer.model.position for scorer in scorers)
    longest = min([longest, *(each.max_length for each in positions if each is not None and each.max_length)])
    step = longest // CONTEXTS or 1
    return list(range(step, min(longest, CONTEXTS * step) + 1, step))


def _lengths(text: str) -> list[int]:
    """Reads STEP:LONGEST."""
    step, _, longest = text.partition(":")
    if not (step.isdecimal() and longest.isdecimal() and 0 < int(step) < int(longest)) or int(longest) % int(step):
        raise UserError(
            f"--contexts is {text!r}, but needs a step in tokens and a longest context that is a multiple of it: "
            "write --contexts 32:256"
        )
    return np.arange(int(step), int(longest) + 1, int(step)).tolist()
