"""The pure training step: from a state and a batch to the next state and metrics."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lra.attention.pattern import Buffer
from lra.attention.visibility import Array
from lra.models import Decoder
from lra.training import loss_scale
from lra.training.compiled import Step
from lra.training.gradients import Summed, make_gradients
from lra.training.optimizers import Optimizer
from lra.training.state import Faults, TrainState

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
        average = None if optimizer.ema_decay is None else jax.tree.map(jnp.copy, parameters)
        return graph, TrainState(
            step=jnp.zeros((), jnp.int32),
            parameters=parameters,
            buffers=buffers,
            optimizer=transformation.init(parameters),
            memory=memory,
            average=average,
            scale=loss_scale.initial(model.compute_dtype),
            faults=Faults.none(),
        )

    return initial


def make_step(
    graph: Any,
    optimizer: Optimizer,
    *,
    total_steps: int,
    seed: int,
    bytes_per_token: float = 1.0,
    accumulate: int = 1,
    non_finite: str = "stop",
    non_finite_limit: int = 10,
) -> Step:
    """Makes the training step.

    The loss is sum(nats * weights) / sum(weights), 0 without weights, plus the auxiliary losses. Padding
    (`Batch.valid`) is invisible; other targets of weight 0 are read and not learnt. Rows that begin anew
    (`batch.reset`) start from an empty memory.

    Micro-batches are consecutive rows. Their gradients add up to those of the whole batch, since each is divided by the
    weights of all; auxiliary losses, metrics and new buffer values are averaged by weight (the last micro-batch's for
    integers), and buffers are written once.

    A step whose loss or gradients are not finite changes nothing but counters. After it all further steps change
    nothing either, so that it can be done again from the state at hand, unless it is one that "skip" allows.

    Args:
        graph: the model's graph definition.
        optimizer: see `Optimizer`.
        total_steps: of the configured run, for the schedule.
        seed: of the run; dropout of step n has `fold_in(key(seed), n)`, and a micro-batch folds in its number.
        bytes_per_token: of the training text, for bits per byte.
        accumulate: micro-batches of a batch, a divisor of its rows.
        non_finite: "stop", "skip" or "rewind" (see `Training`).
        non_finite_limit: steps in a row that "skip" allows.

    Returns:
        `step(state, batch) -> (state, metrics)`. Metrics are scalars: loss_nats, bits_per_byte, gradient_norm (before
        clipping), clip_ratio (what clipping multiplies the gradients by), parameter_norm (after the update),
        learning_rate, tokens (sum of weights), non_finite (steps in a row up to this one), skipped_steps, rewinds,
        loss_scale, loss/NAME for each auxiliary loss; and layer/NAME, [L], for what layers report.
    """
    transformation, allowed = optimizer.transformation(total_steps), non_finite_limit if non_finite == "skip" else 0

    def applied(graph: Any, state: TrainState, gradients: Any, summed: Summed) -> TrainState:
        updates, optimizer_state = transformation.update(gradients, state.optimizer, state.parameters)
        model = nnx.merge(graph, optax.apply_updates(state.parameters, updates), state.buffers)
        model.project()
        model.write(summed.updates)
        _, parameters, buffers = _split(model)
        return dataclasses.replace(
            state,
            parameters=parameters,
            buffers=buffers,
            optimizer=optimizer_state,
            memory=summed.memory,
            average=optimizer.average(state.average, parameters, state.updates + 1),
        )

    def update(
        graph: Any, state: TrainState, batch: dict[str, Array], padded: bool
    ) -> tuple[TrainState, dict[str, Array]]:
        gradients, summed = make_gradients(graph, seed=seed, accumulate=accumulate)(state, batch, padded)
        norm = optax.tree.norm(gradients)
        loss = summed.nats + sum(summed.losses.values())
        sound, counted = _verdict(state, loss, norm, allowed=allowed)
        # Not a choice between old and new values, which would hold both in memory.
        new = jax.lax.cond(sound, functools.partial(applied, graph), lambda state, *_: state, state, gradients, summed)
        new = dataclasses.replace(new, **counted)
        metrics = {
            "loss_nats": summed.nats,
            "bits_per_byte": summed.nats / (math.log(2) * bytes_per_token),
            "gradient_norm": norm,
            "parameter_norm": optax.tree.norm(new.parameters),
            "learning_rate": optimizer.learning_rate(state.updates, total_steps),
            "tokens": batch["weights"].sum(),
            "non_finite": new.faults.in_a_row,
        }
        if optimizer.clip_norm is not None:
            metrics["clip_ratio"] = optimizer.clip_ratio(gradients)
        return new, metrics | _counts(state, new, non_finite) | _reports(summed)

    return Step(graph, update)


def _verdict(state: TrainState, loss: Array, norm: Array, *, allowed: int) -> tuple[Array, dict[str, Any]]:
    """Whether the update is applied, and the new values of the state's counters: step, scale and faults."""
    faults = state.faults
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    overflowed = jnp.zeros((), bool) if state.scale is None else state.scale.overflowed(loss, norm)
    halted, failed = faults.in_a_row > allowed, ~finite & ~overflowed
    sound, passed = finite & ~halted, ~halted & (overflowed | (failed & (faults.in_a_row < allowed)))
    counts = Faults(
        skipped=faults.skipped + passed,
        in_a_row=jnp.where(failed | halted, faults.in_a_row + 1, jnp.where(finite, 0, faults.in_a_row)),
        rewinds=faults.rewinds,
    )
    scale = None if state.scale is None else state.scale.after(overflowed)
    return sound, {"step": state.step + (sound | passed), "scale": scale, "faults": counts}


def _split(model: Decoder) -> tuple[Any, Any, Any]:
    """The graph definition, the parameters and the buffers; raises where there is anything else."""
    parts: Any = nnx.split(model, nnx.Param, Buffer)
    return parts


def _counts(state: TrainState, new: TrainState, non_finite: str) -> dict[str, Array]:
    """What a run counts of values that are not finite, and the loss scale of its step."""
    counts = {}
    if non_finite == "skip" or state.scale is not None:
        counts["skipped_steps"] = new.faults.skipped
    if non_finite == "rewind":
        counts["rewinds"] = new.faults.rewinds
    if state.scale is not None:
        counts["loss_scale"] = state.scale.value
    return counts


def _reports(scored: Summed) -> dict[str, Array]:
    losses = {f"loss/{name}": value for name, value in scored.losses.items()}
    return losses | {f"layer/{name}": value for name, value in scored.metrics.items()}
