"""Rotary and ALiBi against what their papers say, and the two forms in which a block gets its positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import ALiBi, Full, Heads, Rotary, Site, SlidingWindow, Visibility
from lra.attention.terms import Range, distances
from tests.attention import oracle

HEADS, WIDTH = 3, 10
SIZES = {"num_layers": 2, "width": HEADS * WIDTH, "num_heads": HEADS, "head_dim": WIDTH, "rngs": nnx.Rngs(0)}


def rotated(x, position, base, fraction):
    """Features j and j + pairs are one complex number, turned by `position * base ** (-j / pairs)` radians."""
    pairs = int(x.shape[-1] * fraction) // 2
    numbers = x[..., :pairs] + 1j * x[..., pairs : 2 * pairs]
    numbers = numbers * np.exp(1j * position[:, :, None, None] * base ** (-np.arange(pairs) / pairs))
    return np.concatenate([numbers.real, numbers.imag, x[..., 2 * pairs :]], axis=-1)


@pytest.mark.parametrize(("base", "fraction"), [(10_000.0, 1.0), (100.0, 0.5), (7.0, 0.8)])
def test_rotary_is_a_product_of_complex_numbers(base, fraction, rng):
    term = Rotary(base=base, fraction=fraction, **SIZES)()
    x, position = rng.normal(size=(2, 5, HEADS, WIDTH)), rng.integers(0, 100, (2, 5))
    for method in (term.query, term.key):
        got = method(jnp.asarray(x, jnp.float32), jnp.asarray(position, jnp.int32))
        assert oracle.error(got, rotated(x, position, base, fraction)) < 3e-6


def test_rotary_scores_depend_on_distance_only(rng):
    term = Rotary(**SIZES)()
    q, k = (jnp.asarray(np.tile(rng.normal(size=(1, 1, HEADS, WIDTH)), (1, 40, 1, 1)), jnp.float32) for _ in range(2))
    position = jnp.arange(40, dtype=jnp.int32)[None]
    scores = np.asarray(
        jnp.einsum("bthd,bshd->hts", term.query(q, position), term.key(k, position), precision="highest")
    )
    diagonals = np.stack(
        [scores[:, d : 20 + d, :20].diagonal(axis1=1, axis2=2) for d in range(20)]
    )  # [distance, H, 20]
    assert np.ptp(diagonals, axis=2).max() < 1e-5
    assert np.abs(np.diff(diagonals[:, :, 0], axis=0)).max(0).min() > 0.1


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [1 / 256]),
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),
        # The released code: those of 8 heads, then every second one of 16 heads from the first on.
        (
            12,
            [
                1 / 2,
                1 / 4,
                1 / 8,
                1 / 16,
                1 / 32,
                1 / 64,
                1 / 128,
                1 / 256,
                0.70710678,
                0.35355339,
                0.1767767,
                0.08838835,
            ],
        ),
    ],
)
def test_alibi_slopes(heads, slopes):
    term = ALiBi(num_layers=1, width=4 * heads, num_heads=heads, head_dim=4, rngs=nnx.Rngs(0))()
    np.testing.assert_allclose(term.slopes, slopes, rtol=1e-7)
    position = jnp.asarray([[[[4, 9]]]], jnp.int32)
    away = -np.asarray([[0, 5], [5, 0]])
    np.testing.assert_allclose(
        term.score(None, position, position, 0.3)[0, 0], np.multiply.outer(slopes, away), rtol=1e-7
    )


def test_range_equals_arrays():
    """Ranges that start anywhere, as long as the differences are those of the arrays."""
    term = ALiBi(**SIZES)()
    q, k = Range(jnp.int32(50), 4, 3), Range(jnp.int32(32), 7, 3)
    q_pos, k_pos = np.asarray([21, 24, 27, 30]), np.asarray([3, 6, 9, 12, 15, 18, 21])
    np.testing.assert_array_equal(distances(q, k), q_pos[:, None] - k_pos)
    np.testing.assert_array_equal(q.positions, [50, 53, 56, 59])
    arrays = (jnp.asarray(x, jnp.int32)[None, None, None] for x in (q_pos, k_pos))
    np.testing.assert_array_equal(term.score(None, q, k, 1.0), term.score(None, *arrays, 1.0)[0, 0])


@pytest.mark.parametrize(
    "pattern", [Full, functools.partial(SlidingWindow, window=4, dilation=3)], ids=["full", "dilated"]
)
def test_positions_by_index_equal_positions_given(pattern, rng):
    """Blocks of ranges and blocks of arrays; rows may start anywhere, since only distances count."""
    pattern = pattern(site=Site(num_heads=HEADS, head_dim=WIDTH), rngs=None)
    q, k, v = (jnp.asarray(rng.normal(size=(2, n, HEADS, WIDTH)), jnp.float32) for n in (37, 43, 43))
    terms = (Rotary(**SIZES)(), ALiBi(**SIZES)())
    position = jnp.arange(43, dtype=jnp.int32) + jnp.asarray([[17], [60]], jnp.int32)
    given = Visibility(q_position=position[:, 6:], k_position=position)
    want = pattern(q, k, v, terms=terms).out
    assert oracle.error(pattern(q, k, v, terms=terms, visibility=given).out, want) < 1e-5
    for n in range(2):
        assert oracle.error(pattern(q, k, v, terms=terms[n : n + 1]).out, want) > 1e-2


def test_heads_take_their_own_slopes(rng):
    term = ALiBi(**SIZES)()
    np.testing.assert_array_equal(term.heads(1, 3).slopes, np.asarray(term.slopes)[1:3])
    q, k, v = (jnp.asarray(rng.normal(size=(1, 9, HEADS, WIDTH)), jnp.float32) for _ in range(3))
    site = Site(num_heads=HEADS, head_dim=WIDTH)
    together, apart = (
        make(site=site, rngs=None) for make in (Full, functools.partial(Heads, groups=((1, Full), (2, Full))))
    )
    want = together(q, k, v, terms=(term,)).out
    assert oracle.error(apart(q, k, v, terms=(term,)).out, want) < 1e-6
    assert oracle.error(together(q, k, v, terms=(term.heads(2, 3),)).out, want) > 1e-2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": 1.0}, "Rotary.base needs to be above 1, got 1.0"),
        ({"fraction": 0.0}, "Rotary.fraction needs to be above 0 and at most 1, got 0.0"),
        ({"fraction": 1.5}, "Rotary.fraction needs to be above 0 and at most 1, got 1.5"),
        ({"fraction": 0.1}, "at least 2 rotated features a head, got head_dim=10 x 0.1"),
    ],
    ids=str,
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        Rotary(**options, **SIZES)


def test_under_jit_the_start_of_a_range_is_traced():
    scores = jax.jit(lambda q, k: ALiBi(**SIZES)().score(None, Range(q, 2), Range(k, 2), 1.0))
    np.testing.assert_allclose(scores(7, 7)[0], [[0, -(2**-4)], [-(2**-4), 0]])
