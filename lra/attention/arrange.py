"""Arrangements: q, k, v in blocks of static shape; every pair that a rule allows lies in a listed pair of blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lra.attention.visibility import Array, Visibility

Pairs = tuple[tuple[int, int], ...]

BLOCK = 256
"""Upper bound of a block's length: 256 x 256 scores of 8 heads fill a core's cache (docs/performance.md)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Side:
    """The entries of all query blocks or of all key blocks: arrays [N, B or 1, R, H or 1, block], or None.

    R counts the classes that are kept apart (residues of a dilation; 1 for most patterns).
    """

    position: Array
    valid: Array | None
    segment: Array | None
    labels: Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The static part of a grid.

    Attributes:
        pairs: (query block, key block) for every pair of blocks that may hold a pair that the rule allows.
        step: distance in tokens between neighbours inside a block.
        consecutive: positions are those of the index, so that a block is a range `start, start + step, ...`.
        length: T, to which the output is restored.
    """

    pairs: Pairs
    step: int
    consecutive: bool
    length: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grid:
    """Blocks q [Nq, B, R, H, bq, D], k [Nk, B, R, H, bk, D] and v [Nk, B, R, H, bk, E] with their entries."""

    q: Array
    k: Array
    v: Array
    queries: Side
    keys: Side
    layout: Layout = dataclasses.field(metadata={"static": True})

    def restore(self, x: Array) -> Array:
        """[Nq, B, R, H, bq, ...] back to [B, T, H, ...]."""
        blocks, batch, classes, heads, size = x.shape[:5]
        x = jnp.moveaxis(x, (0, 4, 2, 3), (1, 2, 3, 4))  # [B, N, b, R, H, ...]
        x = x.reshape(batch, blocks * size * classes, heads, *x.shape[5:])
        return x[:, x.shape[1] - self.layout.length :]


def band(
    q: Array,
    k: Array,
    v: Array,
    visibility: Visibility,
    *,
    before: int | None,
    after: int | None,
    step: int = 1,
    block: int = BLOCK,
    labels: tuple[Mapping[str, Array], Mapping[str, Array]] = ({}, {}),
) -> Grid:
    """Blocks for rules that allow index distances `-after * step .. before * step` in steps of `step`.

    Both sides are padded in front, so that the last query stands with the last key whatever the remainders are. Keys
    that are older than any query's reach are dropped: nothing that they hold is touched.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D]. v: [B, S, H, E].
        visibility: checked against these shapes.
        before: how many steps back a query may read; None for all.
        after: how many steps ahead; None for all.
        step: the classes of indices modulo `step` (counted from the end) never meet and are kept apart.
        block: upper bound of the block size.
        labels: the pattern's integers, [B or 1, T] for queries and [B or 1, S] for keys.
    """
    batch, length = q.shape[:2]
    size = k.shape[1]
    if size < length:
        raise ValueError(f"keys need to end with the queries' own tokens: got {length} queries and only {size} keys")
    visibility = visibility.check(batch, length, size)
    first = 0 if before is None else max(0, size - length - before * step)
    blocks_q, blocks_k = _Blocks.of(length, step, block), _Blocks.of(size - first, step, block)
    q, k, v = _harmless(q, visibility.q_valid), _harmless(k, visibility.k_valid), _harmless(v, visibility.k_valid)
    queries = _side(blocks_q, size - length, visibility.q_position, visibility.q_valid, visibility.q_segment, labels[0])
    position, valid, segment = (
        None if x is None else x[:, first:] for x in (visibility.k_position, visibility.k_valid, visibility.k_segment)
    )
    keys = _side(blocks_k, first, position, valid, segment, {name: x[:, first:] for name, x in labels[1].items()})
    layout = Layout(
        pairs=_pairs(blocks_q, blocks_k, before, after),
        step=step,
        consecutive=visibility.q_position is None,
        length=length,
    )
    return Grid(blocks_q.split(q), blocks_k.split(k[:, first:]), blocks_k.split(v[:, first:]), queries, keys, layout)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """`count` blocks of `size` entries for each of `step` classes, after `pad` empty entries in front."""

    count: int
    size: int
    step: int
    pad: int

    @classmethod
    def of(cls, length: int, step: int, block: int) -> _Blocks:
        each = -(-length // step)
        count = -(-each // block)
        size = -(-each // count)
        if count > 1:
            size = min(block, -(-size // 8) * 8)  # rows of whole vectors
        return cls(count, size, step, count * size * step - length)

    def split(self, x: Array, fill: bool | int = 0) -> Array:
        """[B, T, H, ...] to [N, B, R, H, b, ...]."""
        x = jnp.pad(x, ((0, 0), (self.pad, 0), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
        x = x.reshape(x.shape[0], self.count, self.size, self.step, *x.shape[2:])
        return jnp.moveaxis(x, (1, 2, 3, 4), (0, 4, 2, 3))


def _harmless(x: Array, valid: Array | None) -> Array:
    """Zeros for what nobody may read: NaN times a weight of 0 would be NaN."""
    return x if valid is None else jnp.where(valid[:, :, None, None], x, jnp.zeros((), x.dtype))


def _side(
    blocks: _Blocks,
    first: int,
    position: Array | None,
    valid: Array | None,
    segment: Array | None,
    labels: Mapping[str, Array],
) -> Side:
    length = blocks.count * blocks.size * blocks.step - blocks.pad

    def split(x: Array) -> Array:
        return blocks.split(x[:, :, None])

    if position is None:
        index = np.arange(-blocks.pad, length, dtype=np.int32) + first
        grid = index.reshape(blocks.count, blocks.size, blocks.step).transpose(0, 2, 1)
        position = jnp.asarray(grid[:, None, :, None, :])
    else:
        position = split(position)
    if valid is None and blocks.pad:
        valid = np.ones((1, length), bool)
    return Side(
        position=position,
        valid=None if valid is None else split(jnp.asarray(valid)),
        segment=None if segment is None else split(segment),
        labels={name: split(x) for name, x in labels.items()},
    )


def _pairs(queries: _Blocks, keys: _Blocks, before: int | None, after: int | None) -> Pairs:
    """Pairs of blocks with at least one pair at an allowed distance."""
    offset = keys.count * keys.size - queries.count * queries.size
    pairs = []
    for i in range(queries.count):
        low, high = i * queries.size + offset, (i + 1) * queries.size - 1 + offset
        lowest = 0 if before is None else max(0, (low - before) // keys.size)
        highest = keys.count - 1 if after is None else min(keys.count - 1, (high + after) // keys.size)
        pairs += [(i, j) for j in range(lowest, highest + 1)]
    return tuple(pairs)
