"""The pure training step: from a state and a batch to the next state and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lra.attention.pattern import Buffer
from lra.attention.visibility import Array
from lra.models import Decoder, Scored
from lra.training.compiled import Step
from lra.training.optimizers import Optimizer
from lra.training.state import TrainState

_INITIAL = 2**32 - 1  # no step has this number, so initial values share no random bits with dropout


def initial_state(
    make_model: Callable[..., Decoder], optimizer: Optimizer, *, total_steps: int, seed: int, batch_size: int
) -> Callable[[], tuple[Any, TrainState]]:
    """Makes the function that gives the model's graph and the state at step 0, to be called under jit or `eval_shape`.

    Args:
        make_model: called with `rngs`.
        optimizer: whose state is part of it.
        total_steps: of the configured run.
        seed: of the run.
        batch_size: rows B of the memory.
    """
    transformation = optimizer.transformation(total_steps)

    def initial() -> tuple[Any, TrainState]:
        model = make_model(rngs=nnx.Rngs(params=jax.random.fold_in(jax.random.key(seed), _INITIAL)))
        graph, parameters, buffers = _split(model)
        memory = model.initial_memory(batch_size, True)
        step = jnp.zeros((), jnp.int32)
        return graph, TrainState(step, parameters, buffers, transformation.init(parameters), memory)

    return initial


def make_step(graph: Any, optimizer: Optimizer, *, total_steps: int, seed: int, bytes_per_token: float = 1.0) -> Step:
    """Makes the training step.

    The loss is sum(nats * weights) / sum(weights), 0 without weights, plus the auxiliary losses. A target of weight 0
    is padding: its position is invisible. Rows that begin anew (`batch.reset`) start from an empty memory.

    Args:
        graph: the model's graph definition.
        optimizer: see `Optimizer`.
        total_steps: of the configured run, for the schedule.
        seed: of the run; dropout of step n has `fold_in(key(seed), n)`.
        bytes_per_token: of the training text, for bits per byte.

    Returns:
        `step(state, batch) -> (state, metrics)`. Metrics are scalars: loss_nats, bits_per_byte, gradient_norm (before
        clipping), parameter_norm (after the update), learning_rate, tokens (sum of weights), loss/NAME for each
        auxiliary loss; and layer/NAME, [L], for what layers report.
    """
    transformation = optimizer.transformation(total_steps)

    def loss(parameters: Any, state: TrainState, batch: dict[str, Array], padded: bool) -> tuple[Array, Any]:
        model = nnx.merge(graph, parameters, state.buffers)
        weights = batch["weights"]
        scored = model.score(
            batch["inputs"], batch["targets"],
            valid=weights > 0 if padded else None,
            memory=model.reset_memory(state.memory, batch["reset"]),
            key=jax.random.fold_in(jax.random.key(seed), state.step),
            train=True,
        )  # fmt: skip
        tokens = weights.sum()
        nats = jnp.where(weights > 0, scored.nats * weights, 0).sum() / jnp.where(tokens > 0, tokens, 1)
        return nats + sum(scored.losses.values()), (nats, tokens, scored)

    def update(state: TrainState, batch: dict[str, Array], padded: bool) -> tuple[TrainState, dict[str, Array]]:
        gradients, (nats, tokens, scored) = jax.grad(loss, has_aux=True)(state.parameters, state, batch, padded)
        updates, optimizer_state = transformation.update(gradients, state.optimizer, state.parameters)
        model = nnx.merge(graph, optax.apply_updates(state.parameters, updates), state.buffers)
        model.project()
        model.write(scored.updates)
        _, parameters, buffers = _split(model)
        metrics = {
            "loss_nats": nats,
            "bits_per_byte": nats / (math.log(2) * bytes_per_token),
            "gradient_norm": optax.tree.norm(gradients),
            "parameter_norm": optax.tree.norm(parameters),
            "learning_rate": optimizer.learning_rate(state.step, total_steps),
            "tokens": tokens,
        }
        state = TrainState(state.step + 1, parameters, buffers, optimizer_state, scored.memory)
        return state, metrics | _reports(scored)

    return Step(update)


def _split(model: Decoder) -> tuple[Any, Any, Any]:
    """The graph definition, the parameters and the buffers; raises where there is anything else."""
    parts: Any = nnx.split(model, nnx.Param, Buffer)
    return parts


def _reports(scored: Scored) -> dict[str, Array]:
    losses = {f"loss/{name}": value for name, value in scored.losses.items()}
    return losses | {f"layer/{name}": value for name, value in scored.metrics.items()}
