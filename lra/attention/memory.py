"""Memory: which past is carried from segment to segment. The seam `Memory`, and the recurrence of hidden states."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx

from lra.attention.visibility import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Remembered:
    """What stands before a segment: M slots, oldest first.

    Attributes:
        inputs: layer inputs [B, M, C]. No gradient flows through them but what the memory means to learn by.
        filled: whether a slot holds something [B, M].
        parts: names and numbers of slots of the parts that the memory has, in order.
        positions: M integers, counted from the segment's first token; None where slots are consecutive tokens.
    """

    inputs: Array
    filled: Array
    parts: tuple[tuple[str, int], ...] = dataclasses.field(metadata={"static": True})
    positions: tuple[int, ...] | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def span(self) -> int:
        """Tokens from the oldest slot to the segment's first token."""
        return -self.positions[0] if self.positions else self.filled.shape[1]

    def newest(self, reach: int) -> Remembered:
        """Without the slots in front that are further back than so many tokens: they need no keys and values."""
        slots = self.filled.shape[1]
        there = range(-slots, 0) if self.positions is None else self.positions
        first = sum(place < -reach for place in there)
        parts, passed = [], 0
        for name, size in self.parts:
            parts.append((name, max(0, size - max(0, first - passed))))
            passed += size
        return Remembered(
            self.inputs[:, first:], self.filled[:, first:], tuple(parts),
            None if self.positions is None else self.positions[first:],
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Attending:
    """What a layer's attention tells its memory after a segment.

    Attributes:
        project: layer inputs [B, L, C] to queries, keys and values [B, L, H, D], before terms by position; no gradient
            flows into the layer's parameters.
        received: the mean weight over heads and queries that each key received [B, S], slots of memory first.
    """

    project: Callable[[Array], tuple[Array, Array, Array]]
    received: Callable[[], Array]


class Memory(nnx.Module):
    """One layer's memory. States are explicit values: passed in, passed out, a pytree of arrays with batch axis first.

    Subclasses are final and take their own arguments, then `width` (C) and `rngs` from the model.
    """

    @property
    def gaps(self) -> bool:
        """Whether positions of slots leave gaps, which patterns have to promise."""
        return False

    @property
    def weights(self) -> bool:
        """Whether it asks for the weights that slots received, so that patterns have to read values as they are."""
        return False

    @abc.abstractmethod
    def initial(self, batch: int, train: bool, dtype: Any = jnp.float32, length: int | None = None) -> Any:
        """The state of B rows that have seen nothing; its shapes carry the lengths for training or for evaluation.

        `length` replaces the tokens remembered, for an evaluation protocol that names its own.
        """

    @abc.abstractmethod
    def describe(self, train: bool, length: int | None = None) -> str:
        """What `initial` has room for, for reports: "128 tokens of memory"."""

    @abc.abstractmethod
    def read(self, state: Any) -> Remembered:
        """What stands before the segment's own layer inputs."""

    @abc.abstractmethod
    def update(
        self, state: Any, layer_inputs: Array, valid: Array | None, attention: Attending | None, train: bool
    ) -> tuple[Any, Mapping[str, Array], Mapping[str, Array]]:
        """The state after a segment.

        Args:
            state: before it, as it was read.
            layer_inputs: [B, T, C].
            valid: [B, T] booleans; None for all.
            attention: of this segment; None where nobody attends (drawings): nothing is learned, all weights are equal.
            train: whether losses are wanted.

        Returns:
            The state, losses and metrics by name.
        """

    def check(self, segment: int) -> None:
        """Raises `UserError` for a segment of T tokens that it cannot remember."""

    def reset(self, state: Any, rows: Array) -> Any:
        """The state with the given rows [B] emptied, where a new document or epoch begins."""
        return jax.tree.map(
            lambda x: jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), jnp.zeros((), x.dtype), x), state
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Layer inputs [B, M, C] and whether they are filled [B, M], oldest first."""

    hidden: Array
    valid: Array

    @classmethod
    def empty(cls, batch: int, length: int, width: int, dtype: Any) -> Self:
        """M slots that hold nothing."""
        return cls(jnp.zeros((batch, length, width), dtype), jnp.zeros((batch, length), bool))

    @classmethod
    def of(cls, hidden: Array, valid: Array | None) -> Self:
        """Slots that hold [B, M, C]."""
        return cls(hidden, jnp.ones(hidden.shape[:2], bool) if valid is None else valid)

    @property
    def length(self) -> int:
        """M."""
        return int(self.valid.shape[1])

    def __getitem__(self, part: slice) -> Self:
        return dataclasses.replace(self, hidden=self.hidden[:, part], valid=self.valid[:, part])

    def push(self, more: Slots) -> tuple[Slots, Slots]:
        """First in, first out: the slots after as many more, and the oldest, which leave."""
        hidden = jnp.concatenate([self.hidden, more.hidden.astype(self.hidden.dtype)], axis=1)
        both = Slots(hidden, jnp.concatenate([self.valid, more.valid], axis=1))
        return both[more.length :], both[: more.length]


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

    def initial(self, batch: int, train: bool, dtype: Any = jnp.float32, length: int | None = None) -> Slots:
        slots = Slots.empty(batch, self._length(train, length), self.width, dtype)
        return dataclasses.replace(slots, valid=slots.valid | (self.start == "zeros"))

    def reset(self, state: Slots, rows: Array) -> Slots:
        emptied: Slots = super().reset(state, rows)
        if self.start == "empty":
            return emptied
        return dataclasses.replace(emptied, valid=emptied.valid | rows[:, None])

    def describe(self, train: bool, length: int | None = None) -> str:
        return f"{self._length(train, length)} tokens of memory"

    def read(self, state: Slots) -> Remembered:
        return Remembered(jax.lax.stop_gradient(state.hidden), state.valid, (("memory", state.length),))

    def update(
        self, state: Slots, layer_inputs: Array, valid: Array | None, attention: Attending | None, train: bool
    ) -> tuple[Slots, Mapping[str, Array], Mapping[str, Array]]:
        return jax.lax.stop_gradient(state.push(Slots.of(layer_inputs, valid))[0]), {}, {}

    def _length(self, train: bool, length: int | None) -> int:
        if length is not None:
            return length
        return self.length if train else self.evaluation_length
