"""The training step as a compiled program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from lra.attention.visibility import Array
from lra.data import Batch
from lra.training.state import TrainState


class Step:
    """`step(state, batch) -> (state, metrics)`. It donates the state: only the new one may be used afterwards.

    Sizes that are static and depend on parameters, such as windows of learned spans, are fitted to the state before
    every step, so that they are right for it, and depend on nothing that a resumed run would not know. Each size is
    compiled once; where there is such a size, the host waits for the step before. Other models are not looked at.

    Args:
        graph: the model's graph definition.
        update: the pure step, of a graph, a state, the fields of a batch by name, and `padded`.
    """

    def __init__(
        self,
        graph: Any,
        update: Callable[[Any, TrainState, dict[str, Any], bool], tuple[TrainState, dict[str, Array]]],
    ) -> None:
        self._graph, self._fits = graph, True
        self._jitted = jax.jit(update, static_argnames=("graph", "padded"), donate_argnames="state")

    def compile(self, state: Any, batch: Batch, values: TrainState | None = None) -> jax.stages.Compiled:
        """Compiles the step for full batches; calls with arguments like these will find the program.

        Args:
            state: the training state, or its shapes with their shardings: without these a call would compile again.
            batch: any full batch of the run's shape.
            values: to which sizes are fitted; None for the largest ones.
        """
        graph = self._graph if values is None else self._fitted(values)
        return self._jitted.lower(graph, state, arrays(batch), padded=False).compile()

    def trace(self, state: Any, batch: Batch) -> None:
        """Traces the step for a state's shapes, which raises where a model does not take those of the batch."""
        self._jitted.eval_shape(self._graph, state, arrays(batch), padded=False)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        return self._jitted(self._fitted(state), state, arrays(batch), padded=padded(batch))

    def _fitted(self, state: TrainState) -> Any:
        """The graph with sizes for this state."""
        if not self._fits:
            return self._graph
        model = nnx.merge(self._graph, state.parameters, state.buffers)
        self._fits = model.stack.fit()
        return nnx.graphdef(model) if self._fits else self._graph


def arrays(batch: Batch) -> dict[str, Any]:
    """The batch as a pytree."""
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


def padded(batch: Batch) -> bool:
    """Whether masks are needed: they cost time, and not every pattern takes them. Full batches are the usual ones."""
    return not bool(batch.valid.all())
