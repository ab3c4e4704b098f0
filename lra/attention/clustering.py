"""Online spherical k-means over queries and keys (Roy et al. 2020, arXiv:2003.05997, section 4).

A token's affinity to a cluster is its product with the centroid, as in the released code, which never puts centroids
back on the sphere. Centroids are ratios of two running averages: sums of vectors, and counts of tokens.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from lra.attention.pattern import Buffer, Pattern, Site
from lra.attention.precision import accumulator
from lra.attention.rows import harmless
from lra.attention.visibility import Array

FirstUpdate = Literal["corrected", "released"]
Space = Literal["normalised", "projected"]

NORM_EPSILON = 1e-6
SMOOTHING = 1e-5
"""Tokens that every cluster is counted to have at least, in relation to all."""


def normalise(x: Array) -> Array:
    """Layer norm without gain and bias over the last axis: mean 0, norm sqrt(D), in at least float32."""
    x = x.astype(accumulator(x.dtype))
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + NORM_EPSILON)


def affinities(x: Array, centroids: Array, valid: Array | None = None, precision: str = "highest") -> Array:
    """Products of tokens [B, L, H, D] with centroids [H, K, D]: [B, H, K, L], the lowest number for invalid tokens."""
    wide = accumulator(x.dtype)
    x, centroids = jax.lax.stop_gradient((x.astype(wide), centroids.astype(wide)))
    scores = jnp.einsum("blhd,hkd->bhkl", x, centroids, precision=precision)
    return scores if valid is None else jnp.where(valid[:, None, None], scores, jnp.finfo(wide).min)


def nearest(affinity: Array) -> Array:
    """The cluster of each token, [B, L, H] integers, from [B, H, K, L]."""
    return jnp.argmax(affinity, axis=2).astype(jnp.int32).swapaxes(1, 2)


def members(affinity: Array, window: int) -> Array:
    """The `window` tokens nearest to each centroid, in the order of the row: [B, H, K, W] from [B, H, K, L].

    All L tokens where there are no more. A token can be in several clusters, and in none.
    """
    _, index = jax.lax.top_k(affinity, min(window, affinity.shape[-1]))
    return jnp.sort(index.astype(jnp.int32), axis=-1)


def commitment(x: Array, centroids: Array, cluster: Array, valid: Array | None = None) -> Array:
    """Mean squared distance of tokens [B, L, H, D] to the centroids of their clusters [B, L, H], which stay put."""
    wide = accumulator(x.dtype)
    heads = jnp.arange(x.shape[2], dtype=jnp.int32)
    own = jax.lax.stop_gradient(centroids.astype(wide))[heads, cluster]
    away = ((harmless(x, valid).astype(wide) - own) ** 2).mean((2, 3))
    if valid is None:
        return away.mean()
    valid = jnp.broadcast_to(valid, away.shape)
    return jnp.where(valid, away, 0).sum() / jnp.maximum(valid.sum(), 1).astype(wide)


def centroids(sums: Array, counts: Array) -> Array:
    """[H, K, D]: sums [H, K, D] over Laplace-smoothed counts [H, K]; the sums themselves where nothing was counted."""
    total = counts.sum(-1, keepdims=True)
    smooth = (counts + SMOOTHING) / (total + counts.shape[-1] * SMOOTHING) * total
    return sums / jnp.where(total > 0, smooth, 1)[..., None]


def totals(x: Array, cluster: Array, clusters: int, valid: Array | None = None) -> tuple[Array, Array]:
    """Sums [H, K, D] and numbers [H, K] of the valid tokens of each cluster."""
    wide = accumulator(x.dtype)
    chosen = jax.nn.one_hot(cluster, clusters, dtype=wide)  # [B, L, H, K]
    chosen = chosen if valid is None else jnp.where(valid[:, :, None, None], chosen, 0)
    x = jax.lax.stop_gradient(harmless(x, valid)).astype(wide)
    return jnp.einsum("blhk,blhd->hkd", chosen, x, precision="highest"), chosen.sum((0, 1))


def averaged(old: Array, new: Array, decay: float) -> Array:
    """The exponential moving average."""
    return (decay * old + (1 - decay) * new.astype(old.dtype)).astype(old.dtype)


class Clustered(Pattern):
    """What patterns share whose heads cluster tokens: centroids as buffers, their updates, the commitment loss.

    `sums` and `counts` are exponential averages over training steps; under several micro-batches their new values are
    averaged, so that both count a micro-batch's tokens.

    Args:
        clusters: K, a head. window: W.
        decay: of the averages.
        commitment: weight of the loss that draws tokens to their centroids. The program of the authors has 1e-4 for
            queries and for keys, so 2e-4 where they are one.
        first_update: what counts before any token: "corrected", the initial centroid as one token; "released", nothing,
            so that the first step multiplies a centroid by up to decay / (1 - decay) over its number of tokens.
        space: what is clustered: "normalised" queries and keys, as in the released code, or the same "projected" by one
            fixed random orthogonal matrix, which amounts to other initial centroids.
        logit_scale: of the products of queries and keys, whose norms are sqrt(D); None for 1/sqrt(D).
        site: where the layer stands. rngs: random streams.
    """

    def __init__(
        self, *, clusters: int | tuple[int, ...], window: int | tuple[int, ...], decay: float, commitment: float,
        first_update: FirstUpdate, space: Space, logit_scale: float | None, site: Site, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        clusters, window = site.pick(f"{name}.clusters", clusters), site.pick(f"{name}.window", window)
        check_sizes(clusters, window)
        if not 0 <= decay < 1:
            raise ValueError(f"{name}.decay needs to be at least 0 and below 1, got {decay}")
        if commitment < 0:
            raise ValueError(f"{name}.commitment needs to be at least 0, got {commitment}")
        for option, value, known in (("first_update", first_update, FirstUpdate), ("space", space, Space)):
            if value not in get_args(known):
                raise ValueError(
                    f"{name}.{option} needs to be {' or '.join(map(repr, get_args(known)))}, got {value!r}"
                )
        self.clusters, self.window, self.logit_scale = clusters, window, logit_scale
        self.decay, self.commitment, self.space = decay, commitment, space
        super().__init__(site)
        shape = site.num_heads, clusters, site.head_dim
        self.sums = Buffer(normalise(jax.random.normal(rngs.params(), shape, jnp.float32)))
        self.counts = Buffer(jnp.full(shape[:2], 1.0 if first_update == "corrected" else 0.0, jnp.float32))
        if space == "projected":
            self.projection = Buffer(jax.random.orthogonal(rngs.params(), site.head_dim, dtype=jnp.float32))

    @property
    def scale(self) -> float | None:
        return self.logit_scale

    @property
    def centroids(self) -> Array:
        """[H, K, D]."""
        return centroids(self.sums[...], self.counts[...])

    def prepare(self, q: Array, k: Array) -> tuple[Array, Array]:
        return normalise(q), normalise(k)

    def features(self, x: Array) -> Array:
        """What is clustered, [B, L, H, D], of queries or keys that are normalised."""
        if self.space == "normalised":
            return x
        return jnp.einsum("blhd,de->blhe", x, self.projection[...].astype(x.dtype), precision="highest")

    def learn(self, *tokens: tuple[Array, Array, Array | None]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Losses and updates of a training step, from features, nearest clusters and validity of some tokens."""
        both = self.sums[...], self.counts[...]
        own = centroids(*both)
        loss = sum(commitment(x, own, cluster, valid) for x, cluster, valid in tokens)
        found = [totals(x, cluster, self.clusters, valid) for x, cluster, valid in tokens]
        new = [averaged(old, sum(parts), self.decay) for old, parts in zip(both, zip(*found, strict=True), strict=True)]
        return {"commitment": self.commitment * loss}, {"sums": new[0], "counts": new[1]}


def check_sizes(clusters: int, window: int) -> None:
    """Raises for sizes that make no sense."""
    if clusters < 1:
        raise ValueError(f"clusters needs to be at least 1, got {clusters}")
    if window < 1:
        raise ValueError(f"window counts tokens of a cluster and needs to be at least 1, got {window}")
