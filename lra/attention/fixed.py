"""Fixed attention (Child et al. 2019, arXiv:1904.10509, section 4.3). O(T (l + c T / l)) time, O(T) memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra.attention import arrange, core
from lra.attention.arrange import Entries, Grid, Labels
from lra.attention.core import Rule, Terms
from lra.attention.pattern import FunctionPattern, Site, aligned, default_scale
from lra.attention.promise import BORDERED, Promise
from lra.attention.rows import Anchored, anchor
from lra.attention.visibility import Array, Entry, Visibility

PARTS = ("both", "local", "summary")


@dataclasses.dataclass(frozen=True)
class FixedRule:
    """Keys of the query's own block, and the summary columns at every block's end."""

    block: int
    summary: int
    groups: int
    part: str
    causal: bool

    def __call__(self, q: Entry, k: Entry) -> Array:
        back = q.labels["place"] // self.block - k.labels["place"] // self.block
        # Columns from the block's end: sub-block g is g * summary .. (g + 1) * summary - 1.
        column = self.block - 1 - k.labels["place"] % self.block
        summary = column // self.summary == q.head % self.groups
        parts = {"both": (back == 0) | summary, "local": back == 0, "summary": summary}
        allowed = (back != 0) & summary if self.part == "far summary" else parts[self.part]
        return allowed & (k.position <= q.position) if self.causal else allowed


@functools.partial(
    jax.jit, static_argnames=("block", "summary", "groups", "part", "causal", "scale", "dropout", "precision")
)
def fixed(
    q: Array,
    k: Array,
    v: Array,
    *,
    block: int,
    summary: int,
    groups: int = 1,
    part: Literal["both", "local", "summary"] = "both",
    causal: bool = True,
    scale: float | None = None,
    visibility: Visibility | None = None,
    terms: Terms = (),
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> Array:
    """Attention to the query's own block, and to the last `summary` tokens of every block.

    The factors can alternate by layer, be united in every head ("both", as in the paper's enwik8 model; no key counts
    twice), or be split over heads (`Heads`). Two layers reach everything only as own block, then summary: what a
    block's end has gathered is read from everywhere after. Blocks are counted from the first valid key of a row.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D], S >= T, the last T being the queries' own tokens. v: [B, S, H, E].
        block: l, tokens (the paper calls it stride; 128 or 256).
        summary: c, columns at a block's end (8, 16 or 32).
        groups: heads take different sub-blocks of `summary` columns: head h number h % groups, counted from the end.
        part: which factor, or their union.
        causal: a query reads its own key and keys before it; else both directions.
        scale, visibility, terms, dropout, key, precision: as of `full`.

    Returns:
        [B, T, H, E] in q's dtype; exactly 0 where a query may read nothing.

    Raises:
        ValueError: a size below 1, more summary columns than the block has, an unknown part, shapes that do not fit.

    Example:
        >>> import jax, lra.attention
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 17, 2, 8))
        >>> lra.attention.fixed(q, k, v, block=4, summary=1).shape
        (1, 17, 2, 8)
    """
    _check(block, summary, groups, part)
    width = q.shape[-1]
    q, k, visibility = aligned(terms, q, k, visibility)
    row = anchor(q, k, v, visibility, period=block)
    attend = functools.partial(
        core.attend, scale=default_scale(scale, width), terms=terms, dropout=dropout, precision=precision
    )
    rule = functools.partial(FixedRule, block, summary, groups)
    parts = []
    if part != "summary":
        own = arrange.blocks(row.q, row.k, row.v, row.visibility, size=block, before=0, after=0, causal=causal)
        parts.append(attend(own, rule=rule("local", causal), key=core.part_key(key, 0)))
    if part != "local":
        columns = _columns(row, block, summary, groups, causal)
        which = "summary" if part == "summary" else "far summary"
        parts.append(attend(columns, rule=rule(which, causal), key=core.part_key(key, 1)))
    return row.release(core.union(*parts).out).astype(q.dtype)


def _columns(row: Anchored, block: int, summary: int, groups: int, causal: bool) -> Grid:
    """All queries, and the summary columns of every block: of each head its own ones."""
    length, size, heads = row.q.shape[1], row.k.shape[1], row.q.shape[2]
    blocks = -(-size // block)
    own = np.arange(heads, dtype=np.int32) % groups
    start = np.arange(blocks, dtype=np.int32)[:, None, None] * block + block - (own + 1) * summary  # [N, 1, H]
    index = (start + np.arange(summary, dtype=np.int32)[:, None]).reshape(-1, heads)  # [N c, H]
    if groups == 1:
        index = index[:, :1]

    def take(x: Array) -> Array:
        """[B or 1, S, ...] or [B or 1, S, H, ...] at the columns."""
        x = jnp.pad(x, ((0, 0), (0, blocks * block - size), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(x.shape[0], blocks, block, *x.shape[2:])
        picked = [x[:, :, block - (g + 1) * summary : block - g * summary] for g in range(groups)]
        merged = jnp.stack(picked, axis=3)  # [B, N, c, G, ...]
        merged = merged.reshape(x.shape[0], blocks * summary, groups, *x.shape[3:])
        if x.ndim == 3:  # no heads of its own
            return merged if groups == 1 else merged[:, :, own]
        return merged[:, :, 0] if groups == 1 else merged[:, :, own, np.arange(heads)]

    seen = row.visibility
    positions = seen.positions(length, size)
    offset = size - length
    valid = np.ones((1, size), bool) if seen.k_valid is None else seen.k_valid
    queries = Entries(
        positions[0], seen.q_valid, seen.q_segment, {"place": np.arange(offset, size, dtype=np.int32)[None]}
    )
    segment = None if seen.k_segment is None else take(seen.k_segment)
    keys = Entries(take(jnp.asarray(positions[1])), take(jnp.asarray(valid)), segment, {"place": index[None]})

    first = index.min(1)  # rises

    def meet(i: range, j: range) -> bool:
        return not causal or int(first[j[0]]) <= offset + i[-1]

    return arrange.tiles(row.q, take(row.k), take(row.v), queries, keys, pairs=meet)


def _check(block: int, summary: int, groups: int, part: str) -> None:
    for name, value in (("block", block), ("summary", summary), ("groups", groups)):
        if value < 1:
            raise ValueError(f"{name} needs to be at least 1, got {value}")
    if summary * groups > block:
        raise ValueError(
            f"a block of {block} tokens has no {groups} x {summary} summary columns: "
            "lower summary or groups, or raise block"
        )
    if part not in PARTS:
        raise ValueError(f"part needs to be one of {', '.join(map(repr, PARTS))}, got {part!r}")


class Fixed(FunctionPattern):
    """See `fixed`; `block`, `summary` and `groups` may be tuples with one entry a layer."""

    function = staticmethod(fixed)

    def __init__(
        self,
        *,
        block: int | tuple[int, ...],
        summary: int | tuple[int, ...],
        groups: int | tuple[int, ...] = 1,
        part: Literal["both", "local", "summary"] = "both",
        site: Site,
        rngs: nnx.Rngs,
    ) -> None:
        self.block = site.pick("Fixed.block", block)
        self.summary = site.pick("Fixed.summary", summary)
        self.groups = site.pick("Fixed.groups", groups)
        self.part = part
        super().__init__(site)
        _check(self.block, self.summary, self.groups, part)

    @property
    def arguments(self) -> Mapping[str, Any]:
        return {"block": self.block, "summary": self.summary, "groups": self.groups, "part": self.part}

    @property
    def promise(self) -> Promise:
        return BORDERED

    @property
    def rule(self) -> Rule:
        return FixedRule(self.block, self.summary, self.groups, self.part, self.causal)

    def labels(self, queries: int, keys: int, visibility: Visibility, selection: Any = None) -> Labels:
        return visibility.place_labels(queries, keys)

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return (
            {"block": 5, "summary": 2},
            {"block": 7, "summary": 2, "groups": 3},
            {"block": 4, "summary": 1, "part": "summary"},
        )

    @classmethod
    def typical(cls, num_heads: int) -> dict[str, Any]:
        return {"block": 64, "summary": 8}
