"""Gradients of the training loss, of a whole batch or of micro-batches one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra.attention.visibility import Array
from lra.training import loss_scale
from lra.training.state import TrainState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Summed:
    """What a batch gave beside its gradients, summed over micro-batches.

    Attributes:
        nats: the mean negative log-likelihood of the batch's targets.
        losses: weighted auxiliary losses.
        metrics: by layer, [L] each.
        updates: new buffer values, for `Decoder.write`.
        memory: the memory after the batch, or None.
    """

    nats: Array
    losses: Mapping[str, Array]
    metrics: Mapping[str, Array]
    updates: Any
    memory: Any


Gradients = Callable[[TrainState, dict[str, Array], bool], tuple[Any, Summed]]


def make_gradients(graph: Any, *, seed: int, accumulate: int = 1) -> Gradients:
    """Makes `gradients(state, batch, padded) -> (gradients, Summed)`, a pure function; see `make_step` for the loss."""

    def loss(parameters: Any, state: TrainState, batch: dict[str, Array], memory: Any, key: Array, padded: bool,
             total: Array, share: Array) -> tuple[Array, Any]:  # fmt: skip
        model = nnx.merge(graph, parameters, state.buffers)
        weights = batch["weights"]
        scored = model.score(
            batch["inputs"], batch["targets"],
            valid=batch["valid"] if padded else None,
            memory=model.reset_memory(memory, batch["reset"]),
            key=key,
            train=True,
        )  # fmt: skip
        nats = jnp.where(weights > 0, scored.nats * weights, 0).sum() / jnp.where(total > 0, total, 1)
        value = nats + share * sum(scored.losses.values())
        return value if state.scale is None else value * state.scale.value, (nats, scored)

    def part(state: TrainState, batch: dict[str, Array], memory: Any, key: Array, padded: bool,
             total: Array) -> tuple[Any, Summed]:  # fmt: skip
        """One micro-batch's part of everything that is summed, and its memory."""
        share = jnp.where(total > 0, batch["weights"].sum() / jnp.where(total > 0, total, 1), 1 / accumulate)
        gradients, (nats, scored) = jax.grad(loss, has_aux=True)(
            state.parameters, state, batch, memory, key, padded, total, share
        )
        losses, metrics, updates = jax.tree.map(
            lambda x: (share * x).astype(x.dtype) if _real(x) else x, (scored.losses, scored.metrics, scored.updates)
        )
        return gradients, Summed(nats, losses, metrics, updates, scored.memory)

    def whole(state: TrainState, batch: dict[str, Array], padded: bool) -> tuple[Any, Summed]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        total = batch["weights"].sum()
        if accumulate == 1:
            gradients, summed = part(state, batch, state.memory, key, padded, total)
            return loss_scale.unscaled(gradients, state.scale), summed
        rows, memory = _cut(batch, 0, accumulate), _cut(state.memory, 1, accumulate)

        def micro(i: Array, batch: dict[str, Array], memory: Any) -> tuple[Any, Any]:
            gradients, summed = part(state, batch, memory, jax.random.fold_in(key, i), padded, total)
            return (gradients, dataclasses.replace(summed, memory=None)), summed.memory

        def add(sums: Any, slices: Any) -> tuple[Any, Any]:
            more, memory = micro(*slices)
            return jax.tree.map(lambda a, b: a + b if _real(b) else b, sums, more), memory

        slices = (jnp.arange(accumulate), rows, memory)
        shapes, _ = jax.eval_shape(micro, *jax.tree.map(lambda x: x[0], slices))
        (gradients, summed), memory = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, shapes), slices)
        return loss_scale.unscaled(gradients, state.scale), dataclasses.replace(summed, memory=_join(memory))

    return whole


def _cut(tree: Any, axis: int, parts: int) -> Any:
    """The rows at `axis` as `parts` runs of neighbours, on a new leading axis."""

    def cut(x: Array) -> Array:
        split = jnp.reshape(x, (*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :]))
        return jnp.moveaxis(split, axis, 0)

    return jax.tree.map(cut, tree)


def _join(memory: Any) -> Any:
    """The inverse of `_cut` at axis 1: memory has its rows behind the axis of equal layers."""

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return jnp.reshape(x, (x.shape[0], -1, *x.shape[3:]))

    return jax.tree.map(join, memory)


def _real(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))
