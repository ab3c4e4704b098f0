"""Block-local attention (Liu et al. 2018, arXiv:1801.10198, section 4.2.4). O(T W) time, O(T) memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from lra.attention import arrange, core
from lra.attention.arrange import Labels
from lra.attention.core import Rule, Terms
from lra.attention.pattern import FunctionPattern, Site, aligned, default_scale
from lra.attention.promise import BORDERED, Promise
from lra.attention.rows import anchor
from lra.attention.visibility import Array, Entry, Visibility


@dataclasses.dataclass(frozen=True)
class BlockRule:
    """Keys of the query's own block and of `look_back` blocks before it; as many after it unless causal."""

    block: int
    look_back: int
    causal: bool

    def __call__(self, q: Entry, k: Entry) -> Array:
        back = q.labels["place"] // self.block - k.labels["place"] // self.block
        if self.causal:
            return (back >= 0) & (back <= self.look_back) & (k.position <= q.position)
        return abs(back) <= self.look_back


@functools.partial(jax.jit, static_argnames=("block", "look_back", "causal", "scale", "dropout", "precision"))
def block_local(
    q: Array,
    k: Array,
    v: Array,
    *,
    block: int,
    look_back: int = 0,
    causal: bool = True,
    scale: float | None = None,
    visibility: Visibility | None = None,
    terms: Terms = (),
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> Array:
    """Attention inside disjoint blocks of `block` tokens, and to `look_back` whole blocks before.

    The paper's blocks of 256 stand apart. The masked local attention of tensor2tensor also reads the whole block
    before: `look_back=1`. Blocks are counted from the first valid key of a row.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D], S >= T, the last T being the queries' own tokens. v: [B, S, H, E].
        block: W, tokens.
        look_back: blocks before the query's own; as many after it when bidirectional.
        causal: a query reads its own key and keys before it.
        scale, visibility, terms, dropout, key, precision: as of `full`.

    Returns:
        [B, T, H, E] in q's dtype; exactly 0 where a query may read nothing.

    Raises:
        ValueError: a block below 1, a negative `look_back`, shapes that do not fit.

    Example:
        >>> import jax, lra.attention
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 17, 2, 8))
        >>> lra.attention.block_local(q, k, v, block=4).shape
        (1, 17, 2, 8)
    """
    _check(block, look_back)
    width = q.shape[-1]
    q, k, visibility = aligned(terms, q, k, visibility)
    row = anchor(q, k, v, visibility, period=block)
    grid = arrange.blocks(
        row.q, row.k, row.v, row.visibility, size=block, before=look_back, after=0 if causal else look_back,
        causal=causal,
    )  # fmt: skip
    part = core.attend(
        grid, rule=BlockRule(block, look_back, causal), scale=default_scale(scale, width), terms=terms,
        dropout=dropout, key=key, precision=precision,
    )  # fmt: skip
    return row.release(part.out).astype(q.dtype)


def _check(block: int, look_back: int) -> None:
    if block < 1:
        raise ValueError(f"block is a number of tokens and needs to be at least 1, got {block}")
    if look_back < 0:
        raise ValueError(f"look_back is a number of blocks and needs to be at least 0, got {look_back}")


class BlockLocal(FunctionPattern):
    """See `block_local`; `block` and `look_back` may be tuples with one entry a layer."""

    function = staticmethod(block_local)

    def __init__(
        self, *, block: int | tuple[int, ...], look_back: int | tuple[int, ...] = 0, site: Site, rngs: nnx.Rngs
    ) -> None:
        self.block = site.pick("BlockLocal.block", block)
        self.look_back = site.pick("BlockLocal.look_back", look_back)
        super().__init__(site)
        _check(self.block, self.look_back)

    @property
    def arguments(self) -> Mapping[str, Any]:
        return {"block": self.block, "look_back": self.look_back}

    @property
    def promise(self) -> Promise:
        return BORDERED

    @property
    def rule(self) -> Rule:
        return BlockRule(self.block, self.look_back, self.causal)

    def labels(self, queries: int, keys: int, visibility: Visibility, selection: Any = None) -> Labels:
        return visibility.place_labels(queries, keys)

    @property
    def reach(self) -> int:
        return (self.look_back + 1) * self.block - 1

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return {"block": 5}, {"block": 3, "look_back": 2}

    @classmethod
    def typical(cls, num_heads: int) -> dict[str, Any]:
        return {"block": 128}
