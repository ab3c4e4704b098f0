"""Strided attention (Child et al. 2019, arXiv:1904.10509, section 4.3). O(T (l + T / l)) time, O(T) memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
from flax import nnx

from lra.attention import arrange, core
from lra.attention.core import Rule, Terms
from lra.attention.pattern import FunctionPattern, Site, aligned, default_scale
from lra.attention.promise import EVERYTHING, Promise
from lra.attention.visibility import Array, Entry, Visibility

PARTS = ("both", "local", "column")


@dataclasses.dataclass(frozen=True)
class StridedRule:
    """Keys nearer than `stride`, and keys whose distance it divides."""

    stride: int
    part: str
    causal: bool

    def __call__(self, q: Entry, k: Entry) -> Array:
        back = q.position - k.position
        near = abs(back) < self.stride
        column = back % self.stride == 0
        allowed = {"both": near | column, "local": near, "column": column, "far column": column & ~near}[self.part]
        return allowed & (back >= 0) if self.causal else allowed


@functools.partial(jax.jit, static_argnames=("stride", "part", "causal", "scale", "dropout", "precision"))
def strided(
    q: Array,
    k: Array,
    v: Array,
    *,
    stride: int,
    part: Literal["both", "local", "column"] = "both",
    causal: bool = True,
    scale: float | None = None,
    visibility: Visibility | None = None,
    terms: Terms = (),
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> Array:
    """Attention to the last `stride` keys and to every `stride`-th key before.

    The factors can alternate by layer ("local", then "column"), be united in every head ("both": no key counts twice),
    or be split over heads (`Heads`). Either order of the factors reaches everything in two layers.

    `part="local"` reads l = `stride` keys, the query's own included, as the released dense reference does. The paper's
    formula has max(0, i - l)..i, a key more, which the column holds: the union is the same. Drawings that do not count
    the query's own key, l keys before it and columns l + 1 apart, are those of `stride = l + 1` here.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D], S >= T, the last T being the queries' own tokens. v: [B, S, H, E].
        stride: l, tokens; the cost is least near sqrt(T).
        part: which factor, or their union.
        causal: a query reads its own key and keys before it; else both directions.
        scale, visibility, terms, dropout, key, precision: as of `full`.

    Returns:
        [B, T, H, E] in q's dtype; exactly 0 where a query may read nothing.

    Raises:
        ValueError: a stride below 1, an unknown part, shapes that do not fit.

    Example:
        >>> import jax, lra.attention
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 17, 2, 8))
        >>> lra.attention.strided(q, k, v, stride=4).shape
        (1, 17, 2, 8)
    """
    _check(stride, part)
    width = q.shape[-1]
    q, k, visibility = aligned(terms, q, k, visibility)
    attend = functools.partial(
        core.attend, scale=default_scale(scale, width), terms=terms, dropout=dropout, precision=precision
    )
    parts = []
    if part != "column":
        near = arrange.band(
            q, k, v, visibility, before=stride - 1, after=0 if causal else stride - 1,
            block=min(arrange.BLOCK, max(arrange.SMALL, stride)),
        )  # fmt: skip
        parts.append(attend(near, rule=StridedRule(stride, "local", causal), key=core.part_key(key, 0)))
    if part != "local":
        columns = arrange.band(q, k, v, visibility, before=None, after=0 if causal else None, step=stride)
        which = "column" if part == "column" else "far column"
        parts.append(attend(columns, rule=StridedRule(stride, which, causal), key=core.part_key(key, 1)))
    return core.union(*parts).out.astype(q.dtype)


def _check(stride: int, part: str) -> None:
    if stride < 1:
        raise ValueError(f"stride is a number of tokens and needs to be at least 1, got {stride}")
    if part not in PARTS:
        raise ValueError(f"part needs to be one of {', '.join(map(repr, PARTS))}, got {part!r}")


class Strided(FunctionPattern):
    """See `strided`; `stride` may be a tuple with one entry a layer."""

    function = staticmethod(strided)

    def __init__(
        self,
        *,
        stride: int | tuple[int, ...],
        part: Literal["both", "local", "column"] = "both",
        site: Site,
        rngs: nnx.Rngs,
    ) -> None:
        self.stride, self.part = site.pick("Strided.stride", stride), part
        super().__init__(site)
        _check(self.stride, part)

    @property
    def arguments(self) -> Mapping[str, Any]:
        return {"stride": self.stride, "part": self.part}

    @property
    def promise(self) -> Promise:
        return EVERYTHING

    @property
    def rule(self) -> Rule:
        return StridedRule(self.stride, self.part, self.causal)

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return {"stride": 4}, {"stride": 5, "part": "local"}, {"stride": 3, "part": "column"}

    @classmethod
    def typical(cls, num_heads: int) -> dict[str, Any]:
        return {"stride": 64}
