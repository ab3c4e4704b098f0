"""Full attention, the dense baseline (Vaswani et al. 2017, arXiv:1706.03762). O(T S) time, O(T) memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from lra.attention import arrange, core
from lra.attention.core import Rule, Terms
from lra.attention.pattern import FunctionPattern, Pattern, Site, aligned, default_scale
from lra.attention.promise import EVERYTHING, Promise
from lra.attention.sliding_window import limited_window
from lra.attention.visibility import Array, Entry, Visibility


@dataclasses.dataclass(frozen=True)
class FullRule:
    """Every key, or every key up to the query's own."""

    causal: bool

    def __call__(self, q: Entry, k: Entry) -> Array:
        ahead = k.position - q.position
        return ahead <= 0 if self.causal else ahead == ahead


@functools.partial(jax.jit, static_argnames=("causal", "scale", "dropout", "precision"))
def full(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    visibility: Visibility | None = None,
    terms: Terms = (),
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> Array:
    """Full attention over key chunks, never holding T x S scores.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D], S >= T, the last T being the queries' own tokens. v: [B, S, H, E].
        causal: a query reads its own key and the ones before it.
        scale: of the logits; None for 1/sqrt(D).
        visibility: positions, validity and segments.
        terms: additions by position.
        dropout: share of the weights dropped, with `key`.
        key: random key.
        precision: of float32 products.

    Returns:
        [B, T, H, E] in q's dtype; exactly 0 where a query may read nothing.

    Raises:
        ValueError: shapes that do not fit, or dropout without a key.

    Example:
        >>> import jax, lra.attention
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 7, 2, 8))
        >>> lra.attention.full(q, k, v).shape
        (1, 7, 2, 8)
    """
    width = q.shape[-1]
    q, k, visibility = aligned(terms, q, k, visibility)
    grid = arrange.band(q, k, v, visibility, before=None, after=0 if causal else None)
    part = core.attend(
        grid, rule=FullRule(causal), scale=default_scale(scale, width), terms=terms, dropout=dropout, key=key,
        precision=precision,
    )  # fmt: skip
    return part.out.astype(q.dtype)


class Full(FunctionPattern):
    """See `full`."""

    function = staticmethod(full)

    def __init__(self, *, site: Site, rngs: nnx.Rngs) -> None:
        super().__init__(site)

    @property
    def arguments(self) -> Mapping[str, Any]:
        return {}

    def limited(self, keys: int) -> Pattern:
        return limited_window(self, keys)

    @property
    def promise(self) -> Promise:
        return dataclasses.replace(EVERYTHING, gaps=True)

    @property
    def rule(self) -> Rule:
        return FullRule(self.causal)

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return ({},)
