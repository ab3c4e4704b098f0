"""Memory: which past is carried from segment to segment. The seam `Memory`, and the recurrence of hidden states."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from lra.attention.visibility import Array


class Memory(nnx.Module):
    """One layer's memory. States are explicit values: passed in, passed out, a pytree of arrays with batch axis first.

    Subclasses are final and take their own arguments, then `width` (C) and `rngs` from the model.
    """

    @abc.abstractmethod
    def initial(self, batch: int, train: bool, dtype: Any = jnp.float32, length: int | None = None) -> Any:
        """The state of B rows that have seen nothing; its shapes carry the lengths for training or for evaluation.

        `length` replaces the tokens remembered, for an evaluation protocol that names its own.
        """

    @abc.abstractmethod
    def read(self, state: Any) -> tuple[Array, Array]:
        """Layer inputs [B, M, C] to stand before the segment's own, in order, and whether each is filled [B, M]."""

    @abc.abstractmethod
    def update(self, state: Any, layer_inputs: Array, valid: Array | None) -> tuple[Any, Mapping[str, Array]]:
        """The state after a segment [B, T, C] with validity [B, T] (None: all), and metrics."""

    def reset(self, state: Any, rows: Array) -> Any:
        """The state with the given rows [B] emptied, where a new document or epoch begins."""
        return jax.tree.map(
            lambda x: jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), jnp.zeros((), x.dtype), x), state
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrenceState:
    """Hidden states [B, M, C] and whether they are filled [B, M]."""

    hidden: Array
    valid: Array


class Recurrence(Memory):
    """Segment-level recurrence (Dai et al. 2019, arXiv:1901.02860, section 3.2): the last M layer inputs, no gradient.

    Args:
        length: M, tokens remembered in training.
        evaluation_length: tokens remembered in evaluation; None for the same.
        start: "empty": the memory grows to its length, and nobody reads empty slots (released PyTorch code); "zeros":
            it starts as M vectors of zeros, which are read (released TensorFlow code).
    """

    def __init__(
        self,
        *,
        length: int,
        evaluation_length: int | None = None,
        start: Literal["empty", "zeros"] = "empty",
        width: int,
        rngs: nnx.Rngs,
    ) -> None:
        if start not in ("empty", "zeros"):
            raise ValueError(f"Recurrence.start needs to be 'empty' or 'zeros', got {start!r}")
        self.start = start
        for name, value in (("length", length), ("evaluation_length", evaluation_length)):
            if value is not None and value < 1:
                raise ValueError(
                    f"Recurrence.{name} needs to be at least 1 (Decoder.memory = None for none), got {value}"
                )
        self.length, self.evaluation_length, self.width = length, evaluation_length or length, width

    def initial(self, batch: int, train: bool, dtype: Any = jnp.float32, length: int | None = None) -> RecurrenceState:
        if length is None:
            length = self.length if train else self.evaluation_length
        valid = jnp.full((batch, length), self.start == "zeros")
        return RecurrenceState(jnp.zeros((batch, length, self.width), dtype), valid)

    def reset(self, state: RecurrenceState, rows: Array) -> RecurrenceState:
        emptied: RecurrenceState = super().reset(state, rows)
        if self.start == "empty":
            return emptied
        return dataclasses.replace(emptied, valid=emptied.valid | rows[:, None])

    def read(self, state: RecurrenceState) -> tuple[Array, Array]:
        return state.hidden, state.valid

    def update(
        self, state: RecurrenceState, layer_inputs: Array, valid: Array | None
    ) -> tuple[RecurrenceState, Mapping[str, Array]]:
        length = layer_inputs.shape[1]  # as many slots leave in front
        if valid is None:
            valid = jnp.ones(layer_inputs.shape[:2], bool)
        hidden = jnp.concatenate([state.hidden, layer_inputs.astype(state.hidden.dtype)], axis=1)[:, length:]
        valid = jnp.concatenate([state.valid, valid], axis=1)[:, length:]
        return jax.lax.stop_gradient(RecurrenceState(hidden, valid)), {}
