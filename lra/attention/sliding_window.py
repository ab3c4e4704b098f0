"""Sliding window attention, dilated (Beltagy et al. 2020, arXiv:2004.05150, section 3.1). O(T W) time, O(T) memory."""

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
from lra.attention.visibility import Array, Entry, Visibility


@dataclasses.dataclass(frozen=True)
class WindowRule:
    """Keys at distances -window_right * dilation .. (window - 1) * dilation, in steps of dilation."""

    window: int
    window_right: int
    dilation: int

    @property
    def block(self) -> int:
        """Length of the blocks that it is computed by."""
        return min(arrange.BLOCK, max(8, self.window + self.window_right))

    def __call__(self, q: Entry, k: Entry) -> Array:
        back = q.position - k.position
        near = (back <= (self.window - 1) * self.dilation) & (back >= -self.window_right * self.dilation)
        return near if self.dilation == 1 else near & (back % self.dilation == 0)


@functools.partial(
    jax.jit, static_argnames=("window", "window_right", "dilation", "causal", "scale", "dropout", "precision")
)
def sliding_window(
    q: Array,
    k: Array,
    v: Array,
    *,
    window: int,
    window_right: int = 0,
    dilation: int = 1,
    causal: bool = True,
    scale: float | None = None,
    visibility: Visibility | None = None,
    terms: Terms = (),
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> Array:
    """Attention to the last `window` keys, the query's own included, and `window_right` keys after it.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D], S >= T, the last T being the queries' own tokens. v: [B, S, H, E].
        window: keys up to and including the query's own; 1 gives v itself.
        window_right: keys after the query's own; 0 when causal.
        dilation: step in tokens between the keys of a window; 1 for neighbours (a gap of g tokens is a step of g + 1).
        causal: says that nothing after the query is read.
        scale, visibility, terms, dropout, key, precision: as of `full`.

    Returns:
        [B, T, H, E] in q's dtype; exactly 0 where a query may read nothing.

    Raises:
        ValueError: a window or dilation below 1, `window_right` with `causal`, shapes that do not fit.

    Example:
        >>> import jax, lra.attention
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 7, 2, 8))
        >>> bool((lra.attention.sliding_window(q, k, v, window=1) == v).all())
        True
    """
    check_window(window, window_right, dilation, causal)
    width = q.shape[-1]
    q, k, visibility = aligned(terms, q, k, visibility)
    rule = WindowRule(window, window_right, dilation)
    grid = arrange.band(q, k, v, visibility, before=window - 1, after=window_right, step=dilation, block=rule.block)
    part = core.attend(
        grid, rule=rule, scale=default_scale(scale, width), terms=terms, dropout=dropout, key=key, precision=precision
    )
    return part.out.astype(q.dtype)


def limited_window(pattern: Pattern, window: int, window_right: int = 0, dilation: int = 1) -> SlidingWindow:
    """A window in place of a pattern of the same heads and direction."""
    site = Site(num_heads=pattern.num_heads, causal=pattern.causal, dropout=pattern.dropout)
    return SlidingWindow(window=window, window_right=window_right, dilation=dilation, site=site, rngs=nnx.Rngs(0))


def check_window(window: int, window_right: int, dilation: int, causal: bool) -> None:
    """Raises for sizes of a window that make no sense."""
    if window < 1:
        raise ValueError(
            f"window counts keys up to and including the query's own and needs to be at least 1, got {window}"
        )
    if dilation < 1:
        raise ValueError(f"dilation is a step in tokens and needs to be at least 1, got {dilation}")
    if window_right < 0:
        raise ValueError(f"window_right needs to be at least 0, got {window_right}")
    if causal and window_right:
        raise ValueError(f"a causal window reads nothing after the query: set window_right = 0, got {window_right}")


class SlidingWindow(FunctionPattern):
    """See `sliding_window`; `window`, `window_right` and `dilation` may be tuples with one entry a layer."""

    function = staticmethod(sliding_window)

    def __init__(
        self,
        *,
        window: int | tuple[int, ...],
        window_right: int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        site: Site,
        rngs: nnx.Rngs,
    ) -> None:
        self.window = site.pick("SlidingWindow.window", window)
        self.window_right = site.pick("SlidingWindow.window_right", window_right)
        self.dilation = site.pick("SlidingWindow.dilation", dilation)
        super().__init__(site)
        check_window(self.window, self.window_right, self.dilation, site.causal)

    @property
    def arguments(self) -> Mapping[str, Any]:
        return {"window": self.window, "window_right": self.window_right, "dilation": self.dilation}

    @property
    def promise(self) -> Promise:
        return dataclasses.replace(EVERYTHING, gaps=self.dilation == 1)

    @property
    def rule(self) -> Rule:
        return WindowRule(self.window, self.window_right, self.dilation)

    def limited(self, keys: int) -> Pattern:
        window = min(self.window, -(-keys // self.dilation))
        return limited_window(self, window, self.window_right, self.dilation)

    @property
    def reach(self) -> int:
        return (self.window - 1) * self.dilation

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return {"window": 5}, {"window": 3, "dilation": 3}, {"window": 4, "window_right": 2}

    @classmethod
    def typical(cls, num_heads: int) -> dict[str, Any]:
        return {"window": 128}
