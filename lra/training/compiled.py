"""The training step as a compiled program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from lra.attention.visibility import Array
from lra.data import Batch
from lra.training.state import TrainState


class Step:
    """`step(state, batch) -> (state, metrics)`. It donates the state: only the new one may be used afterwards.

    Args:
        update: the pure step, of a state, the fields of a batch by name, and `padded`.
    """

    def __init__(
        self, update: Callable[[TrainState, dict[str, Any], bool], tuple[TrainState, dict[str, Array]]]
    ) -> None:
        self._jitted = jax.jit(update, static_argnames="padded", donate_argnums=0)

    def compile(self, state: Any, batch: Batch) -> jax.stages.Compiled:
        """Compiles the step for full batches; calls with arguments like these will find the program.

        Args:
            state: the training state, or its shapes with their shardings: without these a call would compile again.
            batch: any full batch of the run's shape.
        """
        return self._jitted.lower(state, arrays(batch), padded=False).compile()

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        return self._jitted(state, arrays(batch), padded=padded(batch))


def arrays(batch: Batch) -> dict[str, Any]:
    """The batch as a pytree."""
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


def padded(batch: Batch) -> bool:
    """Whether masks are needed: they cost time, and not every pattern takes them. Full batches are the usual ones."""
    return not bool(batch.valid.all())
