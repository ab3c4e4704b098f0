"""Arrangements: q, k, v in blocks of static shape; every pair that a rule allows lies in a listed pair of blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lra.attention.rows import harmless, lengths
from lra.attention.visibility import Array, Visibility

Pairs = tuple[tuple[int, int], ...]
Labels = tuple[Mapping[str, Array], Mapping[str, Array]]

BLOCK = 256
"""Upper bound of a block's length: 256 x 256 scores of 8 heads fill a core's cache (docs/performance.md)."""
SMALL = 32
"""Blocks below this length are taken together, as many as fit."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entries:
    """What is known of the entries of one side before they are cut into blocks: [B or 1, L], or [B or 1, L, H].

    Attributes:
        position: integers; None for the index.
        valid: booleans; None for all.
        segment: integers, or None.
        labels: the pattern's own integers by name.
    """

    position: Array | None = None
    valid: Array | None = None
    segment: Array | None = None
    labels: Mapping[str, Array] = dataclasses.field(default_factory=dict)


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
        front: empty entries before the first query.
        length: T, to which the output is restored.
    """

    pairs: Pairs
    step: int
    consecutive: bool
    front: int
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
        return x[:, self.layout.front : self.layout.front + self.layout.length]


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
    labels: Labels = ({}, {}),
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
        block: upper bound of the block size; with more classes, blocks are smaller.
        labels: the pattern's integers, [B or 1, T] for queries and [B or 1, S] for keys.
    """
    length, size = lengths(q, k, visibility)
    block = min(block, max(8, int(BLOCK * step**-0.5)))
    first = 0 if before is None else max(0, size - length - before * step)
    blocks_q, blocks_k = _Blocks.at_end(length, step, block), _Blocks.at_end(size - first, step, block)
    return _grid(q, k, v, visibility, labels, blocks_q, blocks_k, first, _pairs(blocks_q, blocks_k, before, after))


def blocks(
    q: Array, k: Array, v: Array, visibility: Visibility, *, size: int, before: int, after: int, causal: bool
) -> Grid:
    """Blocks for rules by block number, the index of a key // size: `before` to `after` blocks around the query's own.

    Borders stand where they should if the rows are anchored (see `anchor`). Entries have the label "place", the index.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D]. v: [B, S, H, E].
        visibility: checked against these shapes.
        size: tokens of a block.
        before: how many blocks before its own a query may read. after: how many after it.
        causal: whether what lies after the query is skipped.
    """
    length, keys = lengths(q, k, visibility)
    offset = keys - length
    if size > BLOCK:
        tile = -(-size // -(-size // BLOCK))
    else:
        tile = size * max(1, SMALL // size)  # a few small blocks together
    start = offset // tile * tile
    oldest = max(0, offset // size - before) * size  # what is older is not touched
    blocks_q, blocks_k = _Blocks.from_start(offset - start, length, tile), _Blocks.from_start(0, keys - oldest, tile)
    pairs = []
    for i in range(blocks_q.count):
        low, high = max(offset, start + i * tile), min(keys, start + (i + 1) * tile) - 1
        lowest, highest = (low // size - before) * size, (high // size + 1 + after) * size - 1
        highest = high if causal else highest
        last = min(blocks_k.count - 1, (highest - oldest) // tile)
        pairs += [(i, j) for j in range(max(0, (lowest - oldest) // tile), last + 1)]
    index = np.arange(keys, dtype=np.int32)[None]
    labels: Labels = ({"place": index[:, offset:]}, {"place": index})
    return _grid(q, k, v, visibility, labels, blocks_q, blocks_k, oldest, tuple(pairs))


def tiles(
    q: Array,
    k: Array,
    v: Array,
    queries: Entries,
    keys: Entries,
    *,
    pairs: Callable[[range, range], bool] | None = None,
    tile: tuple[int, int] | None = None,
) -> Grid:
    """Blocks of any queries and any keys, each with entries of its own (which need positions).

    Args:
        q: [B, Tq, H, D]. k: [B, Sk, H, D]. v: [B, Sk, H, E]. Here Tq and Sk are free.
        queries: of q. keys: of k and v.
        pairs: whether the queries and the keys at these indices may meet; None where all may.
        tile: queries and keys of a block; None for an area of at most `BLOCK` squared, a quarter of it with `pairs`.
    """
    if tile is None:
        bound = BLOCK if pairs is None else BLOCK // 2  # finer where that leaves more out
        wide = min(q.shape[1], bound)
        high = min(k.shape[1], bound * bound // wide)
        tile = min(q.shape[1], bound * bound // high), high
    blocks_q, blocks_k = _Blocks.from_start(0, q.shape[1], tile[0]), _Blocks.from_start(0, k.shape[1], tile[1])
    rows, columns = ([each.indices(n) for n in range(each.count)] for each in (blocks_q, blocks_k))
    met = [
        (i, j) for i, row in enumerate(rows) for j, column in enumerate(columns) if pairs is None or pairs(row, column)
    ]
    q, k, v = harmless(q, queries.valid), harmless(k, keys.valid), harmless(v, keys.valid)
    layout = Layout(pairs=tuple(met), step=1, consecutive=False, front=0, length=q.shape[1])
    return Grid(
        blocks_q.split(q), blocks_k.split(k), blocks_k.split(v), _side(blocks_q, 0, queries), _side(blocks_k, 0, keys),
        layout,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """`count` blocks of `size` entries for each of `step` classes, with `front` and `back` empty entries around."""

    count: int
    size: int
    step: int
    front: int
    back: int

    @classmethod
    def at_end(cls, length: int, step: int, block: int) -> _Blocks:
        """The last entry ends the last block; blocks of at most `block`."""
        each = -(-length // step)
        count = -(-each // block)
        size = -(-each // count)
        if count > 1:
            size = min(block, -(-size // 8) * 8)  # rows of whole vectors
        return cls(count, size, step, count * size * step - length, 0)

    @classmethod
    def from_start(cls, front: int, length: int, size: int) -> _Blocks:
        """`front` entries stand empty in the first block."""
        count = -(-(front + length) // size)
        return cls(count, size, 1, front, count * size - front - length)

    def indices(self, i: int) -> range:
        """The indices of block i's entries, for blocks from the start without a front."""
        return range(i * self.size, min((i + 1) * self.size, self.count * self.size - self.back))

    def split(self, x: Array) -> Array:
        """[B, T, H, ...] to [N, B, R, H, b, ...]."""
        x = jnp.pad(x, ((0, 0), (self.front, self.back), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(x.shape[0], self.count, self.size, self.step, *x.shape[2:])
        return jnp.moveaxis(x, (1, 2, 3, 4), (0, 4, 2, 3))


def _grid(
    q: Array, k: Array, v: Array, visibility: Visibility, labels: Labels, blocks_q: _Blocks, blocks_k: _Blocks,
    first: int, pairs: Pairs,
) -> Grid:  # fmt: skip
    """The grid of all queries and of the keys from `first` on."""
    q, k, v = (
        harmless(q, visibility.q_valid),
        harmless(k[:, first:], None if visibility.k_valid is None else visibility.k_valid[:, first:]),
        harmless(v[:, first:], None if visibility.k_valid is None else visibility.k_valid[:, first:]),
    )
    offset = k.shape[1] + first - q.shape[1]
    queries = Entries(visibility.q_position, visibility.q_valid, visibility.q_segment, labels[0])
    keys = Entries(visibility.k_position, visibility.k_valid, visibility.k_segment, labels[1])
    keys = jax.tree.map(lambda x: x[:, first:], keys)
    layout = Layout(
        pairs=pairs,
        step=blocks_q.step,
        consecutive=visibility.q_position is None,
        front=blocks_q.front,
        length=q.shape[1],
    )
    return Grid(
        blocks_q.split(q), blocks_k.split(k), blocks_k.split(v), _side(blocks_q, offset, queries),
        _side(blocks_k, first, keys), layout,
    )  # fmt: skip


def _side(blocks: _Blocks, first: int, entries: Entries) -> Side:
    """The entries in blocks; without positions, those of the index from `first`, which run on into the padding."""

    def split(x: Array) -> Array:
        return blocks.split(x[:, :, None] if x.ndim == 2 else x)

    whole = blocks.count * blocks.size * blocks.step
    if entries.position is None:
        index = np.arange(whole, dtype=np.int32) - blocks.front + first
        grid = index.reshape(blocks.count, blocks.size, blocks.step).transpose(0, 2, 1)
        position = jnp.asarray(grid[:, None, :, None, :])
    else:
        position = split(entries.position)
    valid = entries.valid
    if valid is None and blocks.front + blocks.back:
        valid = np.ones((1, whole - blocks.front - blocks.back), bool)
    return Side(
        position=position,
        valid=None if valid is None else split(jnp.asarray(valid)),
        segment=None if entries.segment is None else split(entries.segment),
        labels={name: split(jnp.asarray(x)) for name, x in entries.labels.items()},
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
