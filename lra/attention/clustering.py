"""Online spherical k-means over queries and keys (Roy et al. 2020, arXiv:2003.05997, section 4): what routing learns by.

A token's affinity to a cluster is its product with the centroid, as in the released code, which never puts centroids
back on the sphere. Centroids are ratios of two running averages: sums of vectors, and counts of tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lra.attention.precision import accumulator
from lra.attention.rows import harmless
from lra.attention.visibility import Array

NORM_EPSILON = 1e-6
SMOOTHING = 1e-5
"""Tokens that every cluster is counted to have at least, in relation to all."""


def normalise(x: Array) -> Array:
    """Layer norm without gain and bias over the last axis: mean 0, norm sqrt(D), in the same dtype."""
    wide = x.astype(accumulator(x.dtype))
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + NORM_EPSILON)).astype(x.dtype)


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
