"""Angular locality-sensitive hashing (Andoni et al. 2015, arXiv:1509.02897), as the Reformer uses it.

Vectors at a small angle fall into the same bucket with a high probability; length plays no part. Kitaev et al. 2020,
arXiv:2001.04451, section 2: h(x) = argmax([xR; -xR]) with a random matrix R.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from lra.attention.precision import accumulator
from lra.attention.visibility import Array

Buckets = int | tuple[int, ...]
"""A number of buckets, or the factors of one: n x m buckets then cost (n + m) / 2 products a vector, not n m / 2."""


def factors(buckets: Buckets) -> tuple[int, ...]:
    """The factors of a number of buckets.

    Raises:
        ValueError: a factor that is odd or below 2.
    """
    each = buckets if isinstance(buckets, tuple) else (buckets,)
    for n in each:
        if n < 2 or n % 2:
            remedy = f"{max(2, n + 1)} would do"
            raise ValueError(
                f"buckets come in pairs, a direction and its opposite: each count needs to be even, got {n} ({remedy})"
            )
    if not each:
        raise ValueError("buckets needs an even number or a tuple of even factors, got ()")
    return each


def count(buckets: Buckets) -> int:
    """How many buckets there are."""
    return math.prod(factors(buckets))


def rotations(key: Array, buckets: Buckets, *, rounds: int, heads: int, width: int) -> Array:
    """Random directions for each head and round, standard normal: float32 [H, D, rounds, sum of factors / 2]."""
    return jax.random.normal(key, (heads, width, rounds, sum(factors(buckets)) // 2), jnp.float32)


@functools.partial(jax.jit, static_argnames=("buckets",))
def hashes(x: Array, rotations: Array, buckets: Buckets) -> Array:
    """The bucket of each vector in each round; no gradient passes.

    Args:
        x: [B, L, H, D], finite.
        rotations: [H, D, rounds, sum of factors / 2], see `rotations`; a factor's columns lie together.
        buckets: their number, or its factors, of which the first one runs fastest.

    Returns:
        int32 [B, L, H, rounds] in 0 .. count(buckets) - 1.

    Example:
        >>> import jax
        >>> from lra.attention.hashing import hashes, rotations
        >>> x = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
        >>> turned = rotations(jax.random.key(1), 4, rounds=3, heads=2, width=8)
        >>> bool((hashes(x, turned, 4) == hashes(3 * x, turned, 4)).all())
        True
    """
    wide = accumulator(x.dtype)
    x, rotations = jax.lax.stop_gradient((x.astype(wide), rotations.astype(wide)))

    def one_round(directions: Array) -> Array:
        y = jnp.einsum("blhd,hdc->blhc", x, directions, precision="highest")
        bucket, start, product = jnp.zeros(y.shape[:-1], jnp.int32), 0, 1
        for n in factors(buckets):
            bucket = bucket + product * _nearest(y[..., start : start + n // 2])
            start, product = start + n // 2, product * n
        return bucket

    # One round at a time: the products with all directions are far larger than what remains of them.
    return jnp.moveaxis(jax.lax.map(one_round, jnp.moveaxis(rotations, 2, 0)), 0, -1)


def _nearest(y: Array) -> Array:
    """argmax([y; -y]) without holding both."""
    ahead = jnp.argmax(y, axis=-1).astype(jnp.int32)
    behind = jnp.argmin(y, axis=-1).astype(jnp.int32) + y.shape[-1]
    return jnp.where(y.max(-1) >= -y.min(-1), ahead, behind)
