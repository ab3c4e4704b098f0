"""Optimizers: an update rule, a schedule of the learning rate, and clipping, built on optax."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lra.attention.visibility import Array
from lra.errors import UserError
from lra.training.checks import require, whole


class Schedule(abc.ABC):
    """The learning rate as a function of the updates done, for a run of `total_steps`. Subclasses are final."""

    def __init__(self, learning_rate: float) -> None:
        require(self, "learning_rate", learning_rate, 0 < learning_rate < math.inf, "above 0 and finite")
        self.learning_rate = learning_rate

    @abc.abstractmethod
    def rates(self, total_steps: int) -> optax.Schedule:
        """The rate of the update that follows n done ones, n = 0..total_steps - 1.

        Raises:
            UserError: the warm-up is longer than the run.
        """


class Constant(Schedule):
    """The same rate at every step.

    Args:
        learning_rate: of every update.
    """

    def rates(self, total_steps: int) -> optax.Schedule:
        return optax.constant_schedule(self.learning_rate)


class _WarmUp(Schedule):
    """A linear rise whose last update, number `warmup_steps`, has the whole rate; then what `_after` says."""

    def __init__(self, learning_rate: float, warmup_steps: int) -> None:
        super().__init__(learning_rate)
        require(self, "warmup_steps", warmup_steps, whole(warmup_steps, 0), "an integer of at least 0")
        self.warmup_steps = warmup_steps

    def rates(self, total_steps: int) -> optax.Schedule:
        if self.warmup_steps > total_steps:
            raise UserError(
                f"{type(self).__name__}.warmup_steps is {self.warmup_steps}, but the run has Training.steps = "
                f"{total_steps}: lower the one or raise the other"
            )
        after = self._after(max(total_steps - self.warmup_steps, 1))
        if self.warmup_steps <= 1:  # a rise of one update is the whole rate
            return optax.join_schedules([optax.constant_schedule(self.learning_rate), after], [self.warmup_steps])
        rise = optax.linear_schedule(self.learning_rate / self.warmup_steps, self.learning_rate, self.warmup_steps - 1)
        return optax.join_schedules([rise, after], [self.warmup_steps])

    @abc.abstractmethod
    def _after(self, steps: int) -> optax.Schedule:
        """The rates of the remaining steps, counted from the end of the warm-up."""


class Linear(_WarmUp):
    """Linear warm-up, then a linear fall that reaches `final` with the end of the run.

    Args:
        learning_rate: at the peak.
        warmup_steps: updates of the rise.
        final: rate at the end.
    """

    def __init__(self, learning_rate: float, warmup_steps: int, final: float = 0.0) -> None:
        super().__init__(learning_rate, warmup_steps)
        require(self, "final", final, 0 <= final < math.inf, "at least 0 and finite")
        self.final = final

    def _after(self, steps: int) -> optax.Schedule:
        return optax.linear_schedule(self.learning_rate, self.final, steps)


class Cosine(_WarmUp):
    """Linear warm-up, then half a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts).

    Args:
        learning_rate: at the peak.
        warmup_steps: updates of the rise.
        final_ratio: rate at the end of the run as a share of `learning_rate`.
    """

    def __init__(self, learning_rate: float, warmup_steps: int = 0, final_ratio: float = 0.0) -> None:
        super().__init__(learning_rate, warmup_steps)
        require(self, "final_ratio", final_ratio, 0 <= final_ratio <= 1, "between 0 and 1")
        self.final_ratio = final_ratio

    def _after(self, steps: int) -> optax.Schedule:
        return optax.cosine_decay_schedule(self.learning_rate, steps, alpha=self.final_ratio)


class Rsqrt(_WarmUp):
    """Linear warm-up, then the inverse square root of the step (Vaswani et al. 2017, arXiv:1706.03762, equation 3).

    The paper's rate at the peak is width^-0.5 warmup_steps^-0.5.

    Args:
        learning_rate: at the peak.
        warmup_steps: updates of the rise, at least 1.
    """

    def __init__(self, learning_rate: float, warmup_steps: int) -> None:
        super().__init__(learning_rate, warmup_steps)
        require(self, "warmup_steps", warmup_steps, warmup_steps >= 1, "an integer of at least 1")

    def _after(self, steps: int) -> optax.Schedule:
        return lambda count: self.learning_rate * jnp.sqrt(self.warmup_steps / (self.warmup_steps + 1.0 + count))


class Update(abc.ABC):
    """An update rule. Subclasses are final."""

    @abc.abstractmethod
    def transformation(self, rates: optax.Schedule) -> optax.GradientTransformation:
        """From gradients to what is added to the parameters, at these learning rates."""


class Adam(Update):
    """Adam (Kingma and Ba 2015, arXiv:1412.6980, algorithm 1).

    Args:
        b1: decay of the first moment. b2: decay of the second moment.
        eps: added to the root of the second moment.
    """

    def __init__(self, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> None:
        _check_moments(self, b1, b2, eps)
        self.b1, self.b2, self.eps = b1, b2, eps

    def transformation(self, rates: optax.Schedule) -> optax.GradientTransformation:
        return optax.adam(rates, b1=self.b1, b2=self.b2, eps=self.eps)


class AdamW(Update):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101).

    Vectors (norms, biases) don't decay. As in optax, unlike in the paper, the learning rate scales the decay too.

    Args:
        b1: decay of the first moment. b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: share of a weight that is taken away at a learning rate of 1.
    """

    def __init__(self, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01) -> None:
        _check_moments(self, b1, b2, eps)
        require(self, "weight_decay", weight_decay, 0 <= weight_decay < math.inf, "at least 0 and finite")
        self.b1, self.b2, self.eps, self.weight_decay = b1, b2, eps, weight_decay

    def transformation(self, rates: optax.Schedule) -> optax.GradientTransformation:
        return optax.adamw(rates, b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay, mask=_matrices)


class Adafactor(Update):
    """Adafactor (Shazeer and Stern 2018, arXiv:1804.04235): second moments take far less memory than the weights.

    Unlike the paper's, root mean squares are taken over a stack of equal layers, as it is stored, not layer by layer.

    Args:
        decay_rate: exponent of the second moment's decay, 1 - t^-decay_rate.
        relative: whether a weight's step is proportional to the root mean square of its array.
        clipping_threshold: bound of an update's root mean square, at least 1; None for none.
        momentum: decay of the first moment; None for none.
        factored_from: arrays with two axes of at least this size have factored second moments.
    """

    def __init__(
        self,
        decay_rate: float = 0.8,
        relative: bool = True,
        clipping_threshold: float | None = 1.0,
        momentum: float | None = None,
        factored_from: int = 128,
    ) -> None:
        require(self, "decay_rate", decay_rate, 0 < decay_rate <= 1, "above 0 and at most 1")
        clips = clipping_threshold is None or 1 <= clipping_threshold < math.inf
        require(self, "clipping_threshold", clipping_threshold, clips, "at least 1 and finite, or None")
        require(self, "momentum", momentum, momentum is None or 0 < momentum < 1, "between 0 and 1, or None")
        require(self, "factored_from", factored_from, whole(factored_from, 1), "an integer of at least 1")
        self.decay_rate, self.relative, self.factored_from = decay_rate, relative, factored_from
        self.clipping_threshold, self.momentum = clipping_threshold, momentum

    def transformation(self, rates: optax.Schedule) -> optax.GradientTransformation:
        return optax.adafactor(
            rates, min_dim_size_to_factor=self.factored_from, decay_rate=self.decay_rate, momentum=self.momentum,
            multiply_by_parameter_scale=self.relative, clipping_threshold=self.clipping_threshold,
        )  # fmt: skip


class Optimizer:
    """An update rule with its schedule.

    Args:
        update: class of the update rule.
        schedule: class of the schedule.
        clip_norm: bound of the global norm of the gradients; None for none.
    """

    def __init__(
        self,
        *,
        update: Callable[[], Update],
        schedule: Callable[[], Schedule],
        clip_norm: float | None = None,
    ) -> None:
        clips = clip_norm is None or 0 < clip_norm < math.inf
        require(self, "clip_norm", clip_norm, clips, "above 0 and finite, or None")
        self.update, self.schedule, self.clip_norm = update(), schedule(), clip_norm

    def transformation(self, total_steps: int) -> optax.GradientTransformation:
        """From gradients to what is added to the parameters, in a run of `total_steps` (the configured total)."""
        update = self.update.transformation(self.schedule.rates(total_steps))
        return update if self.clip_norm is None else optax.chain(optax.clip_by_global_norm(self.clip_norm), update)

    def learning_rate(self, step: int | Array, total_steps: int) -> Array:
        """The rate of the update that follows `step` done ones, a float32 scalar."""
        return jnp.asarray(self.schedule.rates(total_steps)(step), jnp.float32)


def _check_moments(owner: Update, b1: float, b2: float, eps: float) -> None:
    for name, value in (("b1", b1), ("b2", b2)):
        require(owner, name, value, 0 <= value < 1, "at least 0 and below 1")
    require(owner, "eps", eps, 0 < eps < math.inf, "above 0 and finite")


def _matrices(parameters: Any) -> Any:
    """True for every array that has two axes or more in its own layer."""

    def matrix(path: tuple[Any, ...], x: Array) -> bool:
        stacked = any(getattr(entry, "key", None) == "layers" for entry in path)  # a leading axis that counts layers
        return bool(x.ndim - stacked >= 2)

    return jax.tree_util.tree_map_with_path(matrix, parameters)
