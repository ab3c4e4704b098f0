"""Windows over tokens sorted by a label, and the patterns that are such windows, against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra.attention import (
    StrictLSH,
    StrictRouting,
    Visibility,
    dense,
    hashing,
    lsh_strict,
    routing_strict,
    sliding_window,
)
from lra.attention.sorted_window import sorted_window
from tests.attention import cases, oracle, routed

B, T, S, H, D = 2, 19, 23, 3, 6
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("rounds", [1, 3])
def test_loops(rounds, rng):
    """Memory in front, padding behind, two documents: output and gradients by the grid that the loops give."""
    valid = np.arange(S) < np.array([[S], [20]])
    segment = (np.arange(S)[None] >= np.array([[9], [12]])).astype(np.int32)
    labels = rng.integers(0, 4, (B, S, H, rounds)).astype(np.int32)
    q, k, v, d_out = (cases.normal(rng, B, n, H, D) for n in (T, S, S, T))
    read = routed.newest(labels, 3, T, valid, segment)
    index = np.arange(S)[None]
    want, gradients = oracle.attend(
        q, k, v, read, D**-0.5, oracle.TermArrays(), d_out, index[:, S - T :], index
    )  # fmt: skip
    visibility = Visibility(
        q_valid=jnp.asarray(valid[:, S - T :]), k_valid=jnp.asarray(valid), q_segment=jnp.asarray(segment[:, S - T :]),
        k_segment=jnp.asarray(segment),
    )  # fmt: skip

    @jax.jit
    def both(q, k, v):
        out, pull = jax.vjp(
            lambda *x: sorted_window(*x, labels=jnp.asarray(labels), window=3, visibility=visibility), q, k, v
        )
        return out, pull(jnp.asarray(d_out))

    out, got = both(q, k, v)
    assert oracle.error(out, want) < 1e-5
    for name, gradient in zip("qkv", got, strict=True):
        assert oracle.error(gradient, gradients[name]) < 1e-5, name


def test_one_label_is_a_sliding_window(rng):
    q, k, v = (cases.normal(rng, B, 300, H, D) for _ in range(3))
    labels = jnp.zeros((B, 300, H, 1), jnp.int32)
    assert oracle.error(sorted_window(q, k, v, labels=labels, window=9), sliding_window(q, k, v, window=9)) < 1e-6


def test_labels_are_the_nearest_centroid(rng):
    pattern = cases.build(StrictRouting, clusters=4, window=3)
    q, v = cases.normal(rng, B, T, H, D), cases.normal(rng, B, T, H, D)
    x, centroids = routed.normalised(q), np.asarray(pattern.centroids, np.float64)
    labels = np.einsum("blhd,hkd->blhk", x, centroids).argmax(-1)[..., None]
    np.testing.assert_array_equal(pattern.select(q, q), labels)
    index = np.arange(T)[None]
    want, _ = oracle.attend(x, x, v, routed.newest(labels, 3, T), 1.0, oracle.TermArrays(), v, index, index)
    assert oracle.error(pattern(q, q, v).out, want) < 1e-5
    assert oracle.error(routing_strict(q, q, v, centroids=pattern.centroids, window=3), want) < 1e-5


def test_labels_are_the_buckets_of_all_rounds(rng):
    q, v = cases.normal(rng, B, T, H, D), cases.normal(rng, B, T, H, D)
    turned = hashing.rotations(jax.random.key(3), 4, rounds=2, heads=H, width=D)
    labels = np.asarray(hashing.hashes(jnp.asarray(q), turned, 4))
    k = q / np.linalg.norm(q, axis=-1, keepdims=True)
    index = np.arange(T)[None]
    want, _ = oracle.attend(q, k, v, routed.newest(labels, 3, T), 1.0, oracle.TermArrays(), v, index, index)
    assert oracle.error(lsh_strict(q, q, v, rotations=turned, buckets=4, window=3), want) < 1e-5
    pattern = cases.build(StrictLSH, buckets=4, window=3, rounds=2)
    first, second = (pattern.select(q, q, key=jax.random.key(n)) for n in (1, 2))
    assert (np.asarray(first) != np.asarray(second)).any()  # directions are drawn from the key
    grid = dense.visible(pattern, T, T, selection=first)
    np.testing.assert_array_equal(grid, routed.newest(np.asarray(first), 3, T))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"window": 0}, "window counts keys of a label .* at least 1, got 0"),
        ({"rounds": 0}, "rounds needs to be at least 1, got 0"),
        ({"buckets": 3}, "each count needs to be even, got 3"),
    ],
)
def test_mistakes(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        cases.build(StrictLSH, **{"buckets": 4, "window": 3} | arguments)


def test_labels_that_32_bits_cannot_sort():
    k = jax.ShapeDtypeStruct((1, 1 << 16, 1, D), jnp.float32)
    pattern = cases.build(StrictLSH, buckets=(256, 256), window=3)
    with pytest.raises(ValueError, match=r"65536 buckets x 65536 keys exceed 32 bits: use at most 32766 buckets"):
        jax.eval_shape(pattern.select, k, k)
