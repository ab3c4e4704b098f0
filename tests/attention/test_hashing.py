"""Angular hashing against its formula, and what an angle does."""

import jax
import numpy as np
import pytest

from lra.attention import hashing
from tests.attention.cases import normal


def formula(x, rotations, factors):
    """h(x) = argmax([xR; -xR]) for each factor; the first factor runs fastest. NumPy, float64."""
    y = np.einsum("blhd,hdrc->blhrc", x.astype(np.float64), rotations.astype(np.float64))
    bucket, start, product = 0, 0, 1
    for n in factors:
        part = y[..., start : start + n // 2]
        bucket = bucket + product * np.concatenate([part, -part], -1).argmax(-1)
        start, product = start + n // 2, product * n
    return bucket


@pytest.mark.parametrize("buckets", [6, (4, 6)])
def test_the_formula(buckets, rng):
    x, key = normal(rng, 2, 29, 3, 8), jax.random.key(3)
    turned = hashing.rotations(key, buckets, rounds=5, heads=3, width=8)
    assert turned.shape == (3, 8, 5, 3 if buckets == 6 else 5)
    got = hashing.hashes(x, turned, buckets)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, formula(x, np.asarray(turned), hashing.factors(buckets)))
    assert {*np.asarray(got).ravel()} <= {*range(hashing.count(buckets))}


def test_the_opposite_is_half_the_buckets_away(rng):
    x = normal(rng, 1, 13, 2, 8)
    turned = hashing.rotations(jax.random.key(0), 6, rounds=2, heads=2, width=8)
    ahead, behind = (np.asarray(hashing.hashes(each, turned, 6)) for each in (x, -x))
    np.testing.assert_array_equal(behind, (ahead + 3) % 6)


def test_small_angles_share_buckets(rng):
    x, noise = normal(rng, 1, 400, 1, 16), normal(rng, 1, 400, 1, 16)
    turned = hashing.rotations(jax.random.key(1), 8, rounds=4, heads=1, width=16)
    shared = [np.mean(hashing.hashes(x, turned, 8) == hashing.hashes(x + size * noise, turned, 8)) for size in (0.1, 9)]
    assert shared[0] > 0.85
    assert shared[1] < 0.3


@pytest.mark.parametrize("buckets", [5, 0, (4, 3), ()])
def test_counts_are_even(buckets):
    with pytest.raises(ValueError, match="even"):
        hashing.factors(buckets)
