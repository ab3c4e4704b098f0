"""Strictly causal LSH attention: the newest tokens of the query's own bucket, in place of sorted chunks.

O(rounds T W) time, O(rounds T) memory. Not published; see `sorted_window`. The original is `lsh`.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from lra.attention import hashing
from lra.attention.arrange import Labels
from lra.attention.core import Rule, Terms
from lra.attention.hashing import Buckets
from lra.attention.lsh import unit
from lra.attention.pattern import Attended, Inputs, Pattern, Site
from lra.attention.promise import Promise
from lra.attention.rows import harmless, lengths
from lra.attention.sorted_window import (
    STRICT,
    SortedWindowRule,
    check_labels,
    check_window,
    sorted_labels,
    sorted_window,
)
from lra.attention.visibility import Array, Visibility


def lsh_strict(
    q: Array,
    k: Array,
    v: Array,
    *,
    rotations: Array,
    buckets: Buckets,
    window: int,
    scale: float | None = None,
    visibility: Visibility | None = None,
    terms: Terms = (),
    selection: Array | None = None,
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> Array:
    """Attention to the newest `window` keys of the bucket that the query's own key is in, which is one of them.

    Keys count with length 1, as in `lsh`. With several rounds a query reads the keys of all of them, each once. Later
    tokens change nothing, and no token is left out.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D], S >= T, the last T being the queries' own tokens. v: [B, S, H, E].
        rotations: of `hashing.rotations`, [H, D, rounds, sum of factors / 2].
        buckets: their even number, or a tuple of even factors of it.
        window: W, keys of a bucket in a round, the query's own included.
        scale: of the logits of keys of length sqrt(D); None for 1/sqrt(D).
        selection: the buckets [B, S, H, rounds]; None to hash here.
        visibility, terms, dropout, key, precision: as of `full`.

    Returns:
        [B, T, H, E] in v's dtype; exactly 0 where a query may read nothing.

    Raises:
        ValueError: a window below 1, an odd number of buckets, shapes that do not fit.

    Example:
        >>> import jax, lra.attention
        >>> from lra.attention.hashing import rotations
        >>> q = v = jax.random.normal(jax.random.key(0), (1, 17, 2, 8))
        >>> turned = rotations(jax.random.key(1), 4, rounds=2, heads=2, width=8)
        >>> lra.attention.lsh_strict(q, q, v, rotations=turned, buckets=4, window=6).shape
        (1, 17, 2, 8)
    """
    check_window(window)
    visibility = visibility or Visibility()
    lengths(q, k, visibility)
    k = harmless(k, visibility.k_valid)
    if selection is None:
        selection = _buckets(k, rotations, buckets)
    return sorted_window(
        q, unit(k), v, labels=selection, window=window, scale=scale, visibility=visibility, terms=terms,
        dropout=dropout, key=key, precision=precision,
    )  # fmt: skip


def _buckets(k: Array, rotations: Array, buckets: Buckets) -> Array:
    """The buckets of keys [B, S, H, D] in each round, [B, S, H, rounds], which can be sorted."""
    check_labels("buckets", hashing.count(buckets), k.shape[1])
    return hashing.hashes(k, rotations, buckets)


class StrictLSH(Pattern):
    """See `lsh_strict`. Queries and keys are one projection; directions are drawn anew from each call's random key.

    Args:
        buckets: their even number, or a tuple of even factors of it.
        window: W, keys of a bucket in a round, the query's own included; or a tuple with one entry a layer.
        rounds: of hashing.
        site: where the layer stands. rngs: random streams.
    """

    projections = "shared_qk"

    def __init__(
        self, *, buckets: Buckets, window: int | tuple[int, ...], rounds: int = 1, site: Site, rngs: nnx.Rngs
    ) -> None:
        self.buckets, self.rounds = buckets, rounds
        self.window = site.pick("StrictLSH.window", window)
        hashing.factors(buckets)
        check_window(self.window)
        if rounds < 1:
            raise ValueError(f"rounds needs to be at least 1, got {rounds}")
        super().__init__(site)

    @property
    def promise(self) -> Promise:
        return STRICT

    @property
    def rule(self) -> Rule:
        return SortedWindowRule(self.window, self.rounds)

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return {"buckets": 4, "window": 3, "rounds": 2}, {"buckets": 2, "window": 5}

    @classmethod
    def typical(cls, num_heads: int) -> dict[str, Any]:
        return {"buckets": 64, "window": 64, "rounds": 2}

    def prepare(self, q: Array, k: Array) -> tuple[Array, Array]:
        return q, unit(k)

    def select(
        self, q: Array, k: Array, *, visibility: Visibility | None = None, key: Array | None = None, train: bool = False
    ) -> Array:
        key = jax.random.key(0) if key is None else key
        turned = hashing.rotations(key, self.buckets, rounds=self.rounds, heads=k.shape[2], width=k.shape[3])
        return _buckets(harmless(k, None if visibility is None else visibility.k_valid), turned, self.buckets)

    def colours(self, selection: Any) -> Array:
        return selection[..., 0]

    def labels(self, queries: int, keys: int, visibility: Visibility, selection: Any = None) -> Labels:
        return sorted_labels(selection, queries, visibility.k_valid)

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        inputs: Inputs | None = None,
        visibility: Visibility | None = None,
        terms: Terms = (),
        key: Array | None = None,
        train: bool = False,
        selection: Any = None,
    ) -> Attended:
        visibility = visibility or Visibility()
        lengths(q, k, visibility)
        k = harmless(k, visibility.k_valid)
        if selection is None:
            selection = self.select(q, k, key=key)
        out = sorted_window(
            q, unit(k), v, labels=selection, window=self.window, visibility=visibility, terms=terms,
            dropout=self.dropout_rate(train), key=key,
        )  # fmt: skip
        return Attended(out)
