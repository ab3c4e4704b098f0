"""The training state: arrays only, passed in and out of the pure step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from lra.attention.visibility import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a run carries from step to step, but the position of its data (an item of the same checkpoint).

    Attributes:
        step: updates done so far, an int32 scalar.
        parameters: `nnx.State` of the model's `nnx.Param`.
        buffers: `nnx.State` of the model's `lra.attention.pattern.Buffer`.
        optimizer: the optax state.
        memory: the model's memory for each row of the batch, or None.
    """

    step: Array
    parameters: Any
    buffers: Any
    optimizer: Any
    memory: Any
