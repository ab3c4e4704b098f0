"""Optimizers: an update rule, a schedule of the learning rate, groups of parameters and clipping, built on optax."""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax

from lra.attention.visibility import Array
from lra.training import groups as names
from lra.training.checks import require, whole
from lra.training.schedules import Schedule


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

    Norms and biases don't decay (see `lra.training.groups.decays`). As in optax, unlike in the paper, the learning rate
    scales the decay too.

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
        return optax.adamw(
            rates, b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay, mask=names.decays
        )  # fmt: skip


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


class Adagrad(Update):
    """Adagrad (Duchi et al. 2011, JMLR 12:2121-2159).

    Args:
        initial: what the sum of squared gradients starts from.
        eps: added to the sum before its root.
        clip_array_norm: bound of the norm of each array's gradient, in each layer: where it is above, the array's step
            is scaled down by their ratio, while the sum takes the gradient as it is, as in the released code of
            Sukhbaatar et al. 2019 (arXiv:1905.07799), which has initial = 0; None for none.
    """

    def __init__(self, initial: float = 0.1, eps: float = 1e-7, clip_array_norm: float | None = None) -> None:
        require(self, "initial", initial, 0 <= initial < math.inf, "at least 0 and finite")
        require(self, "eps", eps, 0 < eps < math.inf, "above 0 and finite")
        clips = clip_array_norm is None or 0 < clip_array_norm < math.inf
        require(self, "clip_array_norm", clip_array_norm, clips, "above 0 and finite, or None")
        self.initial, self.eps, self.clip_array_norm = initial, eps, clip_array_norm

    def transformation(self, rates: optax.Schedule) -> optax.GradientTransformation:
        adagrad, bound = (
            optax.adagrad(rates, initial_accumulator_value=self.initial, eps=self.eps),
            self.clip_array_norm,
        )
        if bound is None:
            return adagrad

        def update(gradients: Any, state: Any, parameters: Any = None) -> tuple[Any, Any]:
            updates, state = adagrad.update(gradients, state, parameters)
            norms = names.norms(gradients)
            return jax.tree.map(lambda x, norm: x * jnp.minimum(1, bound / (norm + 1e-10)), updates, norms), state

        return optax.GradientTransformation(adagrad.init, update)


class SGD(Update):
    """Stochastic gradient descent.

    Args:
        momentum: decay of the sum of gradients; None for none.
        nesterov: whether the gradient is taken ahead of the momentum (Sutskever et al. 2013).
    """

    def __init__(self, momentum: float | None = None, nesterov: bool = False) -> None:
        require(self, "momentum", momentum, momentum is None or 0 < momentum < 1, "between 0 and 1, or None")
        require(self, "nesterov", nesterov, not nesterov or momentum is not None, "False without SGD.momentum")
        self.momentum, self.nesterov = momentum, nesterov

    def transformation(self, rates: optax.Schedule) -> optax.GradientTransformation:
        return optax.sgd(rates, momentum=self.momentum, nesterov=self.nesterov)


class Lion(Update):
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2): the sign of a momentum, at a small learning rate.

    Norms and biases don't decay (see `lra.training.groups.decays`).

    Args:
        b1: weight of the momentum in the update. b2: decay of the momentum.
        weight_decay: share of a weight that is taken away at a learning rate of 1.
    """

    def __init__(self, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0) -> None:
        _check_decays(self, b1=b1, b2=b2)
        require(self, "weight_decay", weight_decay, 0 <= weight_decay < math.inf, "at least 0 and finite")
        self.b1, self.b2, self.weight_decay = b1, b2, weight_decay

    def transformation(self, rates: optax.Schedule) -> optax.GradientTransformation:
        return optax.lion(rates, b1=self.b1, b2=self.b2, weight_decay=self.weight_decay, mask=names.decays)


class Group:
    """Parameters with an update rule or a learning rate of their own, in `Optimizer.groups`.

    Args:
        pattern: of names as `lra params` prints them, with * and ?, such as "*.memory.*"; at least one must match.
        update: class of the update rule; None for the optimizer's.
        rate: multiplies the learning rate.
        clip_norm: bound of the norm of the group's own gradients, which then don't count in the optimizer's; None: they
            count there.
    """

    def __init__(
        self,
        *,
        pattern: str,
        update: Callable[[], Update] | None = None,
        rate: float = 1.0,
        clip_norm: float | None = None,
    ) -> None:
        require(self, "rate", rate, 0 < rate < math.inf, "above 0 and finite")
        _check_clip(self, clip_norm)
        self.pattern, self.rate, self.clip_norm = pattern, rate, clip_norm
        self.update = None if update is None else update()


class Optimizer:
    """An update rule with its schedule.

    Args:
        update: class of the update rule.
        schedule: class of the schedule.
        clip_norm: bound of the global norm of the gradients; None for none.
        groups: classes of groups of parameters with an update rule or a rate of their own; the first that matches.
        ema_decay: decay of the exponential moving average of the parameters that the run keeps; None for none. After n
            updates the decay is at most (1 + n) / (10 + n), so that initial values are soon forgotten.
        update_every: steps whose mean gradient makes one update, after the first `update_every_after` steps, each of
            which makes one: 4 after 60,000 in Rae et al. 2019 (arXiv:1911.05507, section 5). The schedule counts steps.
        update_every_after: see `update_every`.
    """

    def __init__(
        self,
        *,
        update: Callable[[], Update],
        schedule: Callable[[], Schedule],
        clip_norm: float | None = None,
        groups: tuple[Callable[[], Group], ...] = (),
        ema_decay: float | None = None,
        update_every: int = 1,
        update_every_after: int = 0,
    ) -> None:
        _check_clip(self, clip_norm)
        require(self, "update_every", update_every, whole(update_every, 1), "an integer of at least 1")
        require(self, "update_every_after", update_every_after, whole(update_every_after, 0), "an integer from 0 on")
        after = update_every > 1 or not update_every_after
        require(self, "update_every_after", update_every_after, after, "0 where Optimizer.update_every is 1")
        require(self, "ema_decay", ema_decay, ema_decay is None or 0 < ema_decay < 1, "between 0 and 1, or None")
        self.update, self.schedule, self.clip_norm, self.ema_decay = update(), schedule(), clip_norm, ema_decay
        self.groups = tuple(group() for group in groups)
        self.update_every, self.update_every_after = update_every, update_every_after

    def in_steps(self, steps_per: Callable[[str], float]) -> Self:
        """The same optimizer with the schedule's lengths in steps (see `Schedule.in_steps`)."""
        converted = copy.copy(self)
        converted.schedule = self.schedule.in_steps(steps_per)
        return converted

    def transformation(self, total_steps: int) -> optax.GradientTransformation:
        """From gradients to what is added to the parameters, in a run of `total_steps` (the configured total)."""
        rates = self.schedule.rates(total_steps)
        if self.update_every > 1:
            rates = self._by_update(rates)
        update = self.update.transformation(rates)
        if self.groups:
            own = {
                i: (group.update or self.update).transformation(lambda step, rate=group.rate: rate * rates(step))
                for i, group in enumerate(self.groups)
            }
            update = optax.partition({-1: update, **own}, self._labels)
        apart = {i: optax.clip_by_global_norm(g.clip_norm) for i, g in enumerate(self.groups) if g.clip_norm}
        clip = optax.identity() if self.clip_norm is None else optax.clip_by_global_norm(self.clip_norm)
        if apart:
            clip = optax.partition({-1: clip, **apart}, self._clipped_apart)
        if apart or self.clip_norm is not None:
            update = optax.chain(clip, update)
        if self.update_every == 1:
            return update
        every = lambda done: jnp.where(done < self.update_every_after, 1, self.update_every)  # noqa: E731
        return optax.MultiSteps(update, every).gradient_transformation()

    def _by_update(self, rates: optax.Schedule) -> optax.Schedule:
        """The rates of the steps at whose end updates come, by the number of updates before."""
        first, every = self.update_every_after, self.update_every
        return lambda done: rates(jnp.where(done < first, done, first + (done - first + 1) * every - 1))

    def _labels(self, parameters: Any) -> Any:
        """The number of each array's group; -1 for none."""
        return names.labels(parameters, [group.pattern for group in self.groups])

    def _clipped_apart(self, parameters: Any) -> Any:
        """The number of each array's group where that clips its own gradients; else -1."""
        return jax.tree.map(lambda i: i if i >= 0 and self.groups[i].clip_norm else -1, self._labels(parameters))

    def learning_rate(self, step: int | Array, total_steps: int) -> Array:
        """The rate of the update that follows `step` done ones, a float32 scalar."""
        return jnp.asarray(self.schedule.rates(total_steps)(step), jnp.float32)

    def clip_ratio(self, gradients: Any) -> Array:
        """What `clip_norm` multiplies gradients by, but those of groups with their own: 1 where it leaves them."""
        apart = self._clipped_apart(gradients)
        norm = optax.tree.norm(jax.tree.map(lambda x, i: x if i < 0 else jnp.zeros((), x.dtype), gradients, apart))
        if self.clip_norm is None:
            return jnp.ones_like(norm)
        return jnp.minimum(1, self.clip_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))

    def average(self, average: Any, parameters: Any, done: Array) -> Any:
        """The moving average after an update, the `done`-th of the run; None without one."""
        if self.ema_decay is None:
            return None
        decay = jnp.minimum(self.ema_decay, (1 + done) / (10 + done)).astype(jnp.float32)
        return jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, average, parameters)


def _check_clip(owner: Any, norm: float | None) -> None:
    require(owner, "clip_norm", norm, norm is None or 0 < norm < math.inf, "above 0 and finite, or None")


def _check_moments(owner: Update, b1: float, b2: float, eps: float) -> None:
    _check_decays(owner, b1=b1, b2=b2)
    require(owner, "eps", eps, 0 < eps < math.inf, "above 0 and finite")


def _check_decays(owner: Update, **decays: float) -> None:
    for name, value in decays.items():
        require(owner, name, value, 0 <= value < 1, "at least 0 and below 1")
