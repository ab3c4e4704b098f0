"""The training state: arrays only, passed in and out of the pure step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lra.attention.visibility import Array
from lra.training.loss_scale import LossScale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Faults:
    """What did not go well so far, int32 scalars.

    Attributes:
        skipped: steps without an update, since loss or gradients were not finite.
        in_a_row: steps with values that are not finite up to now, without a finite one between.
        rewinds: returns to an earlier checkpoint.
    """

    skipped: Array
    in_a_row: Array
    rewinds: Array

    @classmethod
    def none(cls) -> Faults:
        """At step 0."""
        return cls(*(jnp.zeros((), jnp.int32) for _ in range(3)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a run carries from step to step, but the position of its data (an item of the same checkpoint).

    Attributes:
        step: steps done so far, skipped ones included, an int32 scalar.
        parameters: `nnx.State` of the model's `nnx.Param`.
        buffers: `nnx.State` of the model's `lra.attention.pattern.Buffer`.
        optimizer: the optax state.
        memory: the model's memory for each row of the batch, or None.
        average: moving average of the parameters, or None.
        scale: of the loss, for float16; or None.
        faults: counts of what was not finite.
    """

    step: Array
    parameters: Any
    buffers: Any
    optimizer: Any
    memory: Any
    average: Any
    scale: LossScale | None
    faults: Faults

    @property
    def updates(self) -> Array:
        """Updates done so far."""
        return self.step - self.faults.skipped
