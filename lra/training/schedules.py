"""Schedules of the learning rate, in steps, tokens or epochs."""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable
from typing import Literal, Self

import jax.numpy as jnp
import optax

from lra.errors import UserError
from lra.training.checks import require, whole

Unit = Literal["steps", "tokens", "epochs"]
UNITS = ("steps", "tokens", "epochs")


class Schedule(abc.ABC):
    """The learning rate as a function of the updates done, for a run of `total_steps`. Subclasses are final."""

    def __init__(self, learning_rate: float) -> None:
        require(self, "learning_rate", learning_rate, 0 < learning_rate < math.inf, "above 0 and finite")
        self.learning_rate = learning_rate

    @abc.abstractmethod
    def rates(self, total_steps: int) -> optax.Schedule:
        """The rate of the update that follows n done ones, n = 0..total_steps - 1.

        Raises:
            UserError: the warm-up is longer than the run, or than the schedule's own total.
        """

    def in_steps(self, steps_per: Callable[[str], float]) -> Self:
        """The same schedule with its lengths in steps; `steps_per("tokens")` is the steps of one token, a fraction."""
        return self


class Constant(Schedule):
    """The same rate at every step.

    Args:
        learning_rate: of every update.
    """

    def rates(self, total_steps: int) -> optax.Schedule:
        return optax.constant_schedule(self.learning_rate)


class _WarmUp(Schedule):
    """A linear rise whose last update, the last of `warmup`, has the whole rate; then what `_after` says."""

    def __init__(self, learning_rate: float, warmup: float, total: float | None, unit: Unit) -> None:
        super().__init__(learning_rate)
        require(self, "unit", unit, unit in UNITS, f"one of {', '.join(map(repr, UNITS))}")
        fits = _real(warmup) if unit == "epochs" else whole(warmup, 0)
        needed = "a number" if unit == "epochs" else "an integer"
        require(self, "warmup", warmup, fits, f"{needed} of at least 0, since the unit is {unit}")
        fits = total is None or ((_real(total) and total > 0) if unit == "epochs" else whole(total, 1))
        require(self, "total", total, fits, f"{needed} above 0, since the unit is {unit}, or None for the run's end")
        self.warmup, self.total, self.unit = warmup, total, unit

    def in_steps(self, steps_per: Callable[[str], float]) -> Self:
        if self.unit == "steps":
            return self
        converted = copy.copy(self)
        converted.unit = "steps"
        for name in ("warmup", "total"):
            if length := getattr(self, name):
                steps = length * steps_per(self.unit)
                enough = f"as much as one step, which is {1 / steps_per(self.unit):.6g} {self.unit}"
                require(self, name, length, steps >= 1, enough)
                setattr(converted, name, round(steps))
        return converted

    def rates(self, total_steps: int) -> optax.Schedule:
        name = type(self).__name__
        if self.unit != "steps":
            raise ValueError(f"{name} has its lengths in {self.unit}: convert it by `in_steps` first")
        warmup = int(self.warmup)
        if self.total is None and warmup > total_steps:
            raise UserError(
                f"{name}.warmup is {warmup} steps, but the run has Training.steps = {total_steps}: "
                "lower the one or raise the other"
            )
        total = total_steps if self.total is None else int(self.total)
        if warmup > total:
            raise UserError(
                f"{name}.warmup is {warmup} steps, but {name}.total is {total}: lower the one or raise the other"
            )
        after = self._after(max(total - warmup, 1), max(warmup, 1))
        if warmup <= 1:  # a rise of one update is the whole rate
            return optax.join_schedules([optax.constant_schedule(self.learning_rate), after], [warmup])
        rise = optax.linear_schedule(self.learning_rate / warmup, self.learning_rate, warmup - 1)
        return optax.join_schedules([rise, after], [warmup])

    @abc.abstractmethod
    def _after(self, steps: int, warmup: int) -> optax.Schedule:
        """The rates of the remaining steps, counted from the end of the warm-up."""


class Linear(_WarmUp):
    """Linear warm-up, then a linear fall to `final`, where the rate stays.

    Args:
        learning_rate: at the peak.
        warmup: length of the rise, in `unit`.
        final: rate at the end.
        total: where the fall ends, in `unit`; None for the end of the run.
        unit: of `warmup` and `total`: steps, tokens of training batches, or epochs of the corpus.
    """

    def __init__(
        self, learning_rate: float, warmup: float, final: float = 0.0, total: float | None = None, unit: Unit = "steps"
    ) -> None:
        super().__init__(learning_rate, warmup, total, unit)
        require(self, "final", final, 0 <= final < math.inf, "at least 0 and finite")
        self.final = final

    def _after(self, steps: int, warmup: int) -> optax.Schedule:
        return optax.linear_schedule(self.learning_rate, self.final, steps)


class Cosine(_WarmUp):
    """Linear warm-up, then half a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts).

    Args:
        learning_rate: at the peak.
        warmup: length of the rise, in `unit`.
        final_ratio: rate at the end as a share of `learning_rate`; the rate stays there.
        total: where the cosine ends, in `unit`; None for the end of the run.
        unit: of `warmup` and `total`: steps, tokens of training batches, or epochs of the corpus.
    """

    def __init__(
        self,
        learning_rate: float,
        warmup: float = 0,
        final_ratio: float = 0.0,
        total: float | None = None,
        unit: Unit = "steps",
    ) -> None:
        super().__init__(learning_rate, warmup, total, unit)
        require(self, "final_ratio", final_ratio, 0 <= final_ratio <= 1, "between 0 and 1")
        self.final_ratio = final_ratio

    def _after(self, steps: int, warmup: int) -> optax.Schedule:
        return optax.cosine_decay_schedule(self.learning_rate, steps, alpha=self.final_ratio)


class Rsqrt(_WarmUp):
    """Linear warm-up, then the inverse square root of the step (Vaswani et al. 2017, arXiv:1706.03762, equation 3).

    The paper's rate at the peak is width^-0.5 warmup^-0.5.

    Args:
        learning_rate: at the peak.
        warmup: length of the rise, above 0, in `unit`.
        unit: steps, tokens of training batches, or epochs of the corpus.
    """

    def __init__(self, learning_rate: float, warmup: float, unit: Unit = "steps") -> None:
        super().__init__(learning_rate, warmup, None, unit)
        require(self, "warmup", warmup, warmup > 0, "above 0")

    def _after(self, steps: int, warmup: int) -> optax.Schedule:
        return lambda count: self.learning_rate * jnp.sqrt(warmup / (warmup + 1.0 + count))


def _real(value: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
