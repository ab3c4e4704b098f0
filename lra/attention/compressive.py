"""Compressive memory (Rae et al. 2019, arXiv:1911.05507): what leaves memory is compressed.

Attention reads compressed memory, memory and segment, N + M + T keys, and reaches M + c N tokens back in a layer. The
compression costs O(T C^2), attention reconstruction O(T^2) in training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra.attention import arrange, core
from lra.attention.arrange import Entries
from lra.attention.full import FullRule
from lra.attention.memory import Attending, Memory, Remembered, Slots
from lra.attention.precision import accumulator
from lra.attention.visibility import Array
from lra.errors import UserError

COMPRESSIONS = ("mean", "max", "convolution", "dilated_convolution", "most_used")
LEARNED = ("convolution", "dilated_convolution")
LOSSES = ("none", "auto_encoding", "attention_reconstruction")
DILATION = 2
"""Distance between the three taps of the dilated convolution."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressiveState:
    """The two queues, oldest first.

    Attributes:
        memory: the last M layer inputs.
        compressed: N slots, the newest of what left memory.
        evicted: what left memory last, to be compressed once more where it is read, in training without a loss of the
            compression's own; else None.
    """

    memory: Slots
    compressed: Slots
    evicted: Slots | None = None


class CompressiveMemory(Memory):
    """First in, first out: layer inputs pass through memory, then c of them at a time become a compressed slot.

    What leaves memory after a segment of T tokens becomes T / c slots. Empty slots are read by nobody, and a slot is
    empty if all that it was made of was; the paper starts from zeros that are read. Memory passes no gradient to what
    it holds. The compression learns by `loss`:

    * "attention_reconstruction": the segment's content-based attention (no terms by position) to what leaves memory,
      against that to its compressed slots. Queries, keys and values are made by the layer's own projections.
    * "auto_encoding": a linear map from a compressed slot back to the c layer inputs that it is made of.
    * "none": the loss of the language model, back-propagated through time as far as one segment: what left memory last
      is compressed anew where the next segment reads it.

    The first two pass gradients to the compression alone, and no other loss reaches it. The paper's loss is an L2 norm
    without its axes: here that of each query's output over heads and features, or of each reconstructed layer input,
    averaged over those of the batch, in nats as it stands.

    The paper leaves open what a dilated convolution is: here a convolution of three taps, two tokens apart, and a ReLU,
    then the strided one. The most used slots are those with the largest mean weight in the last segment that read them.

    Args:
        length: M, tokens of memory in training.
        compressed_length: N, compressed slots in training.
        rate: c, tokens that become one slot; it has to divide the segment.
        compression: "convolution" (kernel = stride = c), "dilated_convolution", "mean", "max" or "most_used".
        loss: "attention_reconstruction", "auto_encoding" or "none"; a compression without parameters has "none".
        evaluation_length: M in evaluation; None for the same.
        evaluation_compressed_length: N in evaluation; None for the same.
        positions: "slot": slots are as far from each other as tokens; "centre": a compressed slot stands at the centre
            of the c tokens in its place, the later one of two. The latter needs a pattern that promises `gaps`.

    Raises:
        ValueError: sizes or names that do not fit.
    """

    def __init__(
        self,
        *,
        length: int,
        compressed_length: int,
        rate: int,
        compression: str = "convolution",
        loss: str = "attention_reconstruction",
        evaluation_length: int | None = None,
        evaluation_compressed_length: int | None = None,
        positions: Literal["slot", "centre"] = "slot",
        width: int,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = {
            "length": length, "compressed_length": compressed_length, "evaluation_length": evaluation_length,
            "evaluation_compressed_length": evaluation_compressed_length,
        }  # fmt: skip
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ValueError(
                    f"CompressiveMemory.{name} needs to be at least 1 (Decoder.memory = @Recurrence for no compressed "
                    f"memory), got {value}"
                )
        if rate < 2:
            raise ValueError(
                f"CompressiveMemory.rate needs to be at least 2 tokens a slot (Decoder.memory = @Recurrence for slots "
                f"of one), got {rate}"
            )
        known = {"compression": COMPRESSIONS, "loss": LOSSES, "positions": ("slot", "centre")}
        for name, given in {"compression": compression, "loss": loss, "positions": positions}.items():
            if given not in known[name]:
                names = ", ".join(map(repr, known[name]))
                raise ValueError(f"CompressiveMemory.{name} needs to be one of {names}, got {given!r}")
        if loss != "none" and compression not in LEARNED:
            raise ValueError(
                f"CompressiveMemory.compression = {compression!r} has no parameters that a loss could train: set "
                f'CompressiveMemory.loss = "none", or choose one of {", ".join(map(repr, LEARNED))}'
            )
        self.lengths = (length, compressed_length)
        self.evaluation_lengths = (evaluation_length or length, evaluation_compressed_length or compressed_length)
        self.rate, self.compression, self.loss, self.positions, self.width = rate, compression, loss, positions, width
        if compression in LEARNED:
            self.convolution = nnx.Linear(rate * width, width, rngs=rngs)
        if compression == "dilated_convolution":
            self.dilated = nnx.Linear(3 * width, width, rngs=rngs)
        if loss == "auto_encoding":
            self.decoder = nnx.Linear(width, rate * width, rngs=rngs)

    @property
    def gaps(self) -> bool:
        return self.positions == "centre"

    @property
    def weights(self) -> bool:
        return self.compression == "most_used"

    def initial(self, batch: int, train: bool, dtype: Any = jnp.float32, length: int | None = None) -> CompressiveState:
        """See `Memory.initial`; `length` replaces M, not N."""
        fine, compressed = self._lengths(train, length)
        evicted = None
        if train and self.loss == "none" and self.compression in LEARNED:
            evicted = Slots.empty(batch, -(-fine // self.rate) * self.rate, self.width, dtype)
        memory, slots = (Slots.empty(batch, n, self.width, dtype) for n in (fine, compressed))
        return CompressiveState(memory, slots, evicted)

    def describe(self, train: bool, length: int | None = None) -> str:
        fine, compressed = self._lengths(train, length)
        return f"{fine} tokens of memory and {compressed} compressed slots of {self.rate} tokens"

    def check(self, segment: int) -> None:
        if segment % self.rate:
            raise UserError(
                f"CompressiveMemory.rate is {self.rate}, which does not divide a segment of {segment} tokens: choose a "
                "rate that does, or another segment"
            )

    def read(self, state: CompressiveState) -> Remembered:
        compressed, memory = jax.lax.stop_gradient((state.compressed, state.memory))
        if state.evicted is not None:
            fresh = self.compress(jax.lax.stop_gradient(state.evicted))
            count = min(fresh.length, compressed.length)
            fresh, old = fresh[fresh.length - count :], compressed[compressed.length - count :]
            hidden = jnp.where(fresh.valid[..., None], fresh.hidden, old.hidden)
            hidden = jnp.concatenate([compressed.hidden[:, : compressed.length - count], hidden], axis=1)
            compressed = Slots(hidden, compressed.valid)
        both = jnp.concatenate([compressed.hidden, memory.hidden], axis=1)
        filled = jnp.concatenate([compressed.valid, memory.valid], axis=1)
        parts = ("compressed", compressed.length), ("memory", memory.length)
        return Remembered(both, filled, parts, self._positions(memory.length, compressed.length))

    def update(
        self,
        state: CompressiveState,
        layer_inputs: Array,
        valid: Array | None,
        attention: Attending | None,
        train: bool,
    ) -> tuple[CompressiveState, Mapping[str, Array], Mapping[str, Array]]:
        length, read = layer_inputs.shape[1], state.compressed.length
        self.check(length)
        memory, leaving = jax.lax.stop_gradient(state.memory.push(Slots.of(layer_inputs, valid)))
        weights = None
        if self.compression == "most_used" and attention is not None:
            weights = attention.received()[:, read : read + length]
        new = self.compress(leaving, weights)
        losses = {}
        if train and attention is not None and self.loss != "none":
            losses[self.loss] = self._loss(jax.lax.stop_gradient(layer_inputs), valid, leaving, new, attention)
        compressed, _ = state.compressed.push(jax.lax.stop_gradient(new))
        evicted = None if state.evicted is None else _newest(leaving, state.evicted.length)
        return CompressiveState(memory, compressed, evicted), losses, {}

    def compress(self, slots: Slots, weights: Array | None = None) -> Slots:
        """Compresses L slots to L / c.

        Args:
            slots: L of them.
            weights: that each received [B, L], for "most_used"; None for equal ones.
        """
        batch, length = slots.valid.shape
        if self.compression == "most_used":
            weights = jnp.zeros((batch, length)) if weights is None else weights
            _, chosen = jax.lax.top_k(jnp.where(slots.valid, weights, -1), length // self.rate)
            chosen = jnp.sort(chosen, axis=1)
            hidden = jnp.take_along_axis(slots.hidden, chosen[..., None], axis=1)
            return Slots(hidden, jnp.take_along_axis(slots.valid, chosen, axis=1))
        x = jnp.where(slots.valid[..., None], slots.hidden, jnp.zeros((), slots.hidden.dtype))
        if self.compression == "dilated_convolution":
            wide = jnp.pad(x, ((0, 0), (DILATION, DILATION), (0, 0)))
            taps = [wide[:, n : n + length] for n in range(0, 2 * DILATION + 1, DILATION)]
            x = jnp.where(slots.valid[..., None], jax.nn.relu(self.dilated(jnp.concatenate(taps, axis=-1))), 0)
        groups = batch, length // self.rate, self.rate
        x, valid = x.reshape(*groups, self.width), slots.valid.reshape(groups)
        some = valid.any(-1)
        if self.compression == "mean":
            hidden = x.sum(2) / jnp.maximum(valid.sum(-1, dtype=x.dtype), 1)[..., None]
        elif self.compression == "max":
            lowest = jnp.finfo(x.dtype).min
            hidden = jnp.where(valid[..., None], x, lowest).max(2)
        else:
            hidden = self.convolution(x.reshape(*groups[:2], -1))
        return Slots(jnp.where(some[..., None], hidden, jnp.zeros((), x.dtype)), some)

    def _loss(self, h: Array, valid: Array | None, old: Slots, new: Slots, attention: Attending) -> Array:
        if self.loss == "auto_encoding":
            difference = self.decoder(new.hidden).reshape(old.hidden.shape) - old.hidden
            return _mean_norm(difference, old.valid)
        q, _, _ = attention.project(h)
        asks = jnp.ones(h.shape[:2], bool) if valid is None else valid
        read = [content(q, *attention.project(slots.hidden)[1:], slots.valid) for slots in (old, new)]
        difference = read[1] - jax.lax.stop_gradient(read[0])
        return _mean_norm(difference.reshape(*h.shape[:2], -1), asks & old.valid.any(1, keepdims=True))

    def _lengths(self, train: bool, length: int | None) -> tuple[int, int]:
        fine, compressed = self.lengths if train else self.evaluation_lengths
        return fine if length is None else length, compressed

    def _positions(self, fine: int, compressed: int) -> tuple[int, ...] | None:
        if self.positions == "slot":
            return None
        return *range(-fine - self.rate * compressed + self.rate // 2, -fine, self.rate), *range(-fine, 0)


def content(q: Array, k: Array, v: Array, valid: Array) -> Array:
    """Attention by content alone to all valid keys: q [B, T, H, D] to [B, T, H, D], with k, v [B, S, H, D]."""
    queries, keys = (np.arange(x.shape[1], dtype=np.int32)[None] for x in (q, k))  # positions that nothing depends on
    grid = arrange.tiles(q, k, v, Entries(queries), Entries(keys, valid))
    return core.attend(grid, rule=FullRule(False), scale=q.shape[-1] ** -0.5).out


def _mean_norm(x: Array, counts: Array) -> Array:
    """The mean of the L2 norms of vectors [B, L, C] that count [B, L]; 0 where none does."""
    square = jnp.square(x.astype(accumulator(x.dtype))).sum(-1)
    some = counts & (square > 0)  # the root has no gradient at 0
    norms = jnp.where(some, jnp.sqrt(jnp.where(some, square, 1)), 0)
    return norms.sum() / jnp.maximum(counts.sum(dtype=norms.dtype), 1)


def _newest(slots: Slots, length: int) -> Slots:
    """The newest `length` slots, with empty ones in front where there are fewer."""
    short = max(0, length - slots.length)
    hidden, valid = slots.hidden[:, -length:], slots.valid[:, -length:]
    return Slots(jnp.pad(hidden, ((0, 0), (short, 0), (0, 0))), jnp.pad(valid, ((0, 0), (short, 0))))
