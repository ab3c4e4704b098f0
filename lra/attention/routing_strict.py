"""Strictly causal routing: the newest tokens of the query's own cluster, in place of a cluster's nearest ones.

O(T (K + W)) time, O(T K) memory. Not published; see `sorted_window`. The original is `routing`.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from lra.attention import clustering
from lra.attention.arrange import Labels
from lra.attention.clustering import Clustered, FirstUpdate, Space, check_sizes, normalise
from lra.attention.core import Rule, Terms
from lra.attention.pattern import Attended, Inputs, Site
from lra.attention.promise import Promise
from lra.attention.rows import harmless, lengths
from lra.attention.sorted_window import STRICT, SortedWindowRule, check_labels, sorted_labels, sorted_window
from lra.attention.visibility import Array, Visibility


@jax.jit
def nearest_centroid(k: Array, centroids: Array) -> Array:
    """Labels [B, S, H, 1] of normalised keys [B, S, H, D]: the centroid [H, K, D] with the largest product."""
    check_labels("clusters", centroids.shape[1], k.shape[1])
    return clustering.nearest(clustering.affinities(k, centroids))[..., None]


def routing_strict(
    q: Array,
    k: Array,
    v: Array,
    *,
    centroids: Array,
    window: int,
    scale: float | None = 1.0,
    visibility: Visibility | None = None,
    terms: Terms = (),
    selection: Array | None = None,
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> Array:
    """Attention to the newest `window` keys of the query's own cluster, that of the nearest centroid, itself included.

    Queries and keys pass a layer norm without gain, as in `routing`. Later tokens change nothing, and no token is left
    out.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D], S >= T, the last T being the queries' own tokens. v: [B, S, H, E].
        centroids: [H, K, D].
        window: W, keys of a cluster, the query's own included.
        scale: of the logits, as of `routing`; None for 1/sqrt(D).
        selection: of `nearest_centroid`; None to find it here.
        visibility, terms, dropout, key, precision: as of `full`.

    Returns:
        [B, T, H, E] in v's dtype; exactly 0 where a query may read nothing.

    Raises:
        ValueError: a window below 1, shapes that do not fit.

    Example:
        >>> import jax, lra.attention
        >>> q = v = jax.random.normal(jax.random.key(0), (1, 17, 2, 8))
        >>> centroids = jax.random.normal(jax.random.key(1), (2, 4, 8))
        >>> lra.attention.routing_strict(q, q, v, centroids=centroids, window=6).shape
        (1, 17, 2, 8)
    """
    check_sizes(centroids.shape[1], window)
    visibility = visibility or Visibility()
    lengths(q, k, visibility)
    q, k = normalise(harmless(q, visibility.q_valid)), normalise(harmless(k, visibility.k_valid))
    if selection is None:
        selection = nearest_centroid(k, centroids)
    return sorted_window(
        q, k, v, labels=selection, window=window, scale=scale, visibility=visibility, terms=terms, dropout=dropout,
        key=key, precision=precision,
    )  # fmt: skip


class StrictRouting(Clustered):
    """See `routing_strict`, and `Clustered` for its arguments. Queries and keys are one projection."""

    projections = "shared_qk"

    def __init__(
        self,
        *,
        clusters: int | tuple[int, ...],
        window: int | tuple[int, ...],
        decay: float = 0.999,
        commitment: float = 1e-4,
        first_update: FirstUpdate = "corrected",
        space: Space = "normalised",
        logit_scale: float | None = 1.0,
        site: Site,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(
            clusters=clusters, window=window, decay=decay, commitment=commitment, first_update=first_update,
            space=space, logit_scale=logit_scale, site=site, rngs=rngs,
        )  # fmt: skip

    @property
    def promise(self) -> Promise:
        return STRICT

    @property
    def rule(self) -> Rule:
        return SortedWindowRule(self.window, 1)

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return ({"clusters": 3, "window": 4},)

    @classmethod
    def typical(cls, num_heads: int) -> dict[str, Any]:
        return {"clusters": 64, "window": 128}

    def select(
        self, q: Array, k: Array, *, visibility: Visibility | None = None, key: Array | None = None, train: bool = False
    ) -> Array:
        k = normalise(harmless(k, None if visibility is None else visibility.k_valid))
        return nearest_centroid(self.features(k), self.centroids)

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
        length, size = lengths(q, k, visibility)
        if selection is None:
            selection = self.select(q, k, visibility=visibility)
        q, k = self.prepare(harmless(q, visibility.q_valid), harmless(k, visibility.k_valid))
        out = sorted_window(
            q, k, v, labels=selection, window=self.window, scale=self.logit_scale, visibility=visibility, terms=terms,
            dropout=self.dropout_rate(train), key=key,
        )  # fmt: skip
        if not train:
            return Attended(out)
        own = slice(size - length, None)
        losses, updates = self.learn((self.features(k[:, own]), selection[:, own, :, 0], visibility.q_valid))
        return Attended(out, losses, updates=updates)
