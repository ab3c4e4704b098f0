"""Dynamic scaling of the loss, so that float16 holds the gradients (Micikevicius et al. 2018, arXiv:1710.03740)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lra.attention.visibility import Array

INITIAL, LARGEST = 2.0**15, 2.0**24
GROW_AFTER = 2000
"""Steps without overflow after which the scale doubles."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """A power of two that multiplies the loss and divides the gradients.

    Attributes:
        value: the scale, a float32 scalar of at least 1.
        good: steps without overflow since it last changed, an int32 scalar.
    """

    value: Array
    good: Array

    def overflowed(self, loss: Array, gradient_norm: Array) -> Array:
        """Whether a smaller scale may mend it: the loss itself is finite and its gradients are not."""
        return jnp.isfinite(loss) & ~jnp.isfinite(gradient_norm) & (self.value > 1)

    def after(self, overflowed: Array) -> LossScale:
        """The scale for the next step: half after an overflow, twice after `GROW_AFTER` steps without one."""
        good = jnp.where(overflowed, 0, self.good + 1)
        grows = good >= GROW_AFTER
        value = jnp.where(overflowed, self.value / 2, jnp.where(grows, self.value * 2, self.value))
        return LossScale(jnp.clip(value, 1, LARGEST), jnp.where(grows, 0, good))


def initial(compute_dtype: str) -> LossScale | None:
    """The scale at step 0; None for what has float32's range."""
    if compute_dtype != "float16":
        return None
    return LossScale(jnp.full((), INITIAL, jnp.float32), jnp.zeros((), jnp.int32))


def unscaled(gradients: Any, scale: LossScale | None) -> Any:
    """Gradients of the loss from those of the scaled one; exact, but for what underflows."""
    return gradients if scale is None else jax.tree.map(lambda x: x / scale.value, gradients)
