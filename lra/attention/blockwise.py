"""Blockwise attention (Qiu et al. 2019, arXiv:1911.02972, section 3). O(T^2 / n) time, O(T) memory.

The paper's table of the layer's scores, T^2 / n, is what a dense implementation stores; it stays quadratic in T.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra.attention import arrange, core
from lra.attention.arrange import Entries, Labels
from lra.attention.core import Rule, Terms
from lra.attention.pattern import FunctionPattern, Site, aligned, default_scale
from lra.attention.promise import BORDERED, Promise
from lra.attention.rows import harmless, lengths, take
from lra.attention.visibility import Array, Entry, Visibility


@dataclasses.dataclass(frozen=True)
class BlockwiseRule:
    """A query of block i reads block (i + s) mod n, with a shift s of its head."""

    blocks: int
    shifts: tuple[int, ...]

    def __call__(self, q: Entry, k: Entry) -> Array:
        shift = jnp.asarray(self.shifts, jnp.int32)[q.head]
        return k.labels["block"] == (q.labels["block"] + shift) % self.blocks


@functools.partial(jax.jit, static_argnames=("blocks", "heads", "shifts", "causal", "scale", "dropout", "precision"))
def blockwise(
    q: Array,
    k: Array,
    v: Array,
    *,
    blocks: int,
    heads: tuple[int, ...] | None = None,
    shifts: tuple[int, ...] | None = None,
    causal: bool = False,
    scale: float | None = None,
    visibility: Visibility | None = None,
    terms: Terms = (),
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> Array:
    """Attention of each block of a row to one block, which differs by head.

    The valid span of a row is cut into n = `blocks` blocks of equal length, the last one shorter where it does not
    divide. With the identity a head reads its own block, with a shift of s the block s further on, around the end.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D], S >= T, the last T being the queries' own tokens. v: [B, S, H, E].
        blocks: n.
        heads: numbers of heads with shift 0, 1, 2, ...: the paper's 10:2 is (10, 2).
        shifts: the shift of every head, in place of `heads`.
        causal: must be False: a shifted block lies ahead of some queries, which would have nothing to read.
        scale, visibility, terms, dropout, key, precision: as of `full`.

    Returns:
        [B, T, H, E] in q's dtype; exactly 0 where a query may read nothing.

    Raises:
        ValueError: `causal`, no block, heads or shifts that do not fit H or n, shapes that do not fit.

    Example:
        >>> import jax, lra.attention
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 17, 3, 8))
        >>> lra.attention.blockwise(q, k, v, blocks=2, heads=(2, 1)).shape
        (1, 17, 3, 8)
    """
    _refuse_causal(causal)
    shifts = _shifts(blocks, heads, shifts, q.shape[2])
    width = q.shape[-1]
    q, k, visibility = aligned(terms, q, k, visibility)
    length, size = lengths(q, k, visibility)
    first, span = _rows(visibility, size, blocks)
    room, tile = _room(-(-size // blocks))
    block, inside = np.divmod(np.arange(blocks * room, dtype=np.int32)[None], room)
    place = block * span + inside
    there = (inside < span) & (first + place < size)
    index = jnp.where(there, first + place, 0)  # of the key in each slot

    def slots(x: Array) -> Array:
        return take(jnp.asarray(x), index)

    shifted = functools.partial(_shifted, blocks=blocks, shifts=shifts)
    offset = size - length
    known = visibility.positions(length, size)
    filled = there if visibility.k_valid is None else there & slots(visibility.k_valid)
    asked = there & (index >= offset)
    own = jnp.where(asked, index - offset, 0)
    if visibility.q_valid is not None:
        asked = asked & take(visibility.q_valid, own)
    queries = Entries(
        take(jnp.asarray(known[0]), own), asked,
        None if visibility.q_segment is None else take(visibility.q_segment, own), {"block": block},
    )  # fmt: skip
    keys = Entries(
        shifted(slots(known[1])), shifted(filled),
        None if visibility.k_segment is None else shifted(slots(visibility.k_segment)), {"block": shifted(block)},
    )  # fmt: skip
    k, v = harmless(slots(k), filled), harmless(slots(v), filled)
    grid = arrange.tiles(
        take(q, own), shifted(k), shifted(v), queries, keys,
        pairs=lambda i, j: i[0] // room == j[0] // room, tile=(tile, tile),
    )  # fmt: skip
    part = core.attend(
        grid, rule=BlockwiseRule(blocks, shifts), scale=default_scale(scale, width), terms=terms, dropout=dropout,
        key=key, precision=precision,
    )  # fmt: skip
    places = jnp.arange(offset, size, dtype=jnp.int32)[None] - first
    slot = jnp.clip(places // span * room + places % span, 0, blocks * room - 1)
    return harmless(take(part.out, slot), visibility.q_valid).astype(q.dtype)


def _room(longest: int) -> tuple[int, int]:
    """Slots for a block of at most `longest` tokens, and the length of the tiles that divide them."""
    tile = -(-longest // -(-longest // arrange.BLOCK))
    return -(-longest // tile) * tile, tile


def _shifted(x: Array, blocks: int, shifts: tuple[int, ...]) -> Array:
    """[B or 1, slots] or [B, slots, H, ...]: for each head the blocks in the order in which it reads them."""
    cut = x.reshape(x.shape[0], blocks, -1, *x.shape[2:])
    own = (cut[:, :, :, h] if x.ndim > 2 else cut for h in range(len(shifts)))
    turned = jnp.stack([jnp.roll(y, -s, axis=1) for y, s in zip(own, shifts, strict=True)], axis=3)
    return turned.reshape(*x.shape[:2], *turned.shape[3:])


def _rows(visibility: Visibility, size: int, blocks: int) -> tuple[Array, Array]:
    """Of each row the index of its first valid key, and the length of its blocks: [B or 1, 1] each."""
    if visibility.k_valid is None:
        return np.zeros((1, 1), np.int32), np.full((1, 1), -(-size // blocks), np.int32)
    first = jnp.argmax(visibility.k_valid, axis=1).astype(jnp.int32)[:, None]
    last = size - 1 - jnp.argmax(visibility.k_valid[:, ::-1], axis=1).astype(jnp.int32)[:, None]
    return first, -(-(last + 1 - first) // blocks)


def _shifts(
    blocks: int, heads: tuple[int, ...] | None, shifts: tuple[int, ...] | None, num_heads: int
) -> tuple[int, ...]:
    """The shift of every head."""
    if blocks < 1:
        raise ValueError(f"blocks needs to be at least 1, got {blocks}")
    if (heads is None) == (shifts is None):
        raise ValueError("blockwise attention needs heads, such as (10, 2), or shifts, one a head: give one of them")
    if heads is not None:
        if min(heads, default=0) < 1 or sum(heads) != num_heads or len(heads) > blocks:
            raise ValueError(
                f"heads needs at most {blocks} numbers of at least 1 that add up to {num_heads} heads, got {heads}"
            )
        return tuple(shift for shift, count in enumerate(heads) for _ in range(count))
    if shifts is None or len(shifts) != num_heads or not all(0 <= shift < blocks for shift in shifts):
        raise ValueError(f"shifts needs {num_heads} numbers in 0..{blocks - 1}, one a head, got {shifts}")
    return tuple(shifts)


def _refuse_causal(causal: bool) -> None:
    if causal:
        raise ValueError(
            "Blockwise has no causal form: a shifted block lies ahead of some queries, which would have nothing to "
            "read; choose a pattern that `lra attention list` marks causal, such as block_local"
        )


class Blockwise(FunctionPattern):
    """See `blockwise`; `blocks` may be a tuple with one entry a layer."""

    function = staticmethod(blockwise)

    def __init__(
        self,
        *,
        blocks: int | tuple[int, ...],
        heads: tuple[int, ...] | None = None,
        shifts: tuple[int, ...] | None = None,
        site: Site,
        rngs: nnx.Rngs,
    ) -> None:
        _refuse_causal(site.causal)
        self.blocks = site.pick("Blockwise.blocks", blocks)
        self.shifts = _shifts(self.blocks, heads, shifts, site.num_heads)
        super().__init__(site)

    @property
    def arguments(self) -> Mapping[str, Any]:
        return {"blocks": self.blocks, "shifts": self.shifts}

    @property
    def promise(self) -> Promise:
        return dataclasses.replace(BORDERED, causal=None, decode=None)

    @property
    def rule(self) -> Rule:
        return BlockwiseRule(self.blocks, self.shifts)

    def labels(self, queries: int, keys: int, visibility: Visibility, selection: Any = None) -> Labels:
        _, span = _rows(visibility, keys, self.blocks)
        q_place, k_place = visibility.places(queries, keys)
        return {"block": q_place // span}, {"block": k_place // span}

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return {"blocks": 2, "heads": (2, 1)}, {"blocks": 3, "shifts": (1, 0, 2)}

    @classmethod
    def typical(cls, num_heads: int) -> dict[str, Any]:
        return {"blocks": 2, "heads": (num_heads - num_heads // 4, num_heads // 4) if num_heads > 3 else (num_heads,)}
