"""LSH attention: a brute-force oracle of buckets, sorted ranks and rounds; rounds; seeds; mistakes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import LSH, Attention, Site, Visibility, full, lsh
from lra.attention.lsh import select, unit
from lra.attention.terms import ALiBiTerm
from lra.errors import UserError
from tests.attention.cases import build, normal
from tests.attention.hashed import reads
from tests.attention.oracle import error

KEY = jax.random.key(4)


def dense(q, k, v, times, slopes=None):
    """Softmax of unit keys, each as often as it is read; float64."""
    k = k / jnp.sqrt((k**2).mean(-1, keepdims=True) + 1e-6)
    s = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    if slopes is not None:
        index = np.arange(k.shape[1])
        s = s - slopes[:, None, None] * np.abs(index[-q.shape[1] :, None] - index)
    weights = jnp.asarray(times, s.dtype) * jnp.exp(s)
    return jnp.einsum("bhts,bshe->bthe", weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30), v)


CASES = {
    "causal": {},
    "bidirectional, factors": {"causal": False, "buckets": (2, 4)},
    "released": {"sets": "released"},
    "released, bidirectional, memory": {"sets": "released", "causal": False, "queries": 20},
    "one round, memory, padded": {"rounds": 1, "queries": 20, "padded": True},
    "packed, padded": {"packed": True, "padded": True},
    "released, packed, ALiBi": {"sets": "released", "packed": True, "alibi": True},
    "one chunk": {"chunk": 64, "rounds": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_the_definition(name, rng, quick_compilation):
    options = {"chunk": 5, "buckets": 6, "rounds": 3, "queries": 37} | CASES[name]
    queries, padded, packed, alibi = (options.pop(x, None) for x in ("queries", "padded", "packed", "alibi"))
    k, v = normal(rng, 2, 37, 3, 8), normal(rng, 2, 37, 3, 5)
    q, d_out = k[:, -queries:] + normal(rng, 2, queries, 3, 8), normal(rng, 2, queries, 3, 5)
    index = np.arange(37)[None]
    valid = (index >= [[4], [0]]) & (index < [[37], [31]]) if padded else None
    segment = np.repeat([[3, 0, 7]], [9, 17, 11], axis=1) if packed else None
    slopes = np.array([0.1, 0.2, 0.4], np.float32) if alibi else None
    fields = {}
    if padded:
        fields |= {"k_valid": jnp.asarray(valid), "q_valid": jnp.asarray(valid[:, -queries:])}
    if packed:
        fields |= {"k_segment": segment.astype(np.int32), "q_segment": segment[:, -queries:].astype(np.int32)}
    terms = (ALiBiTerm(jnp.asarray(slopes)),) if alibi else ()
    attend = functools.partial(lsh, **options, visibility=Visibility(**fields), terms=terms, key=KEY)
    buckets = select(k, buckets=options["buckets"], rounds=options["rounds"], visibility=Visibility(**fields), key=KEY)
    times = reads(
        np.asarray(buckets), options["chunk"], options.get("sets", "paper"), options.get("causal", True), queries,
        valid, None if segment is None else np.broadcast_to(segment, (2, 37)),
    )  # fmt: skip
    out, pull = jax.vjp(attend, q, k, v)
    gradients = pull(jnp.asarray(d_out))
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in (q, k, v)]
        want, pull = jax.vjp(lambda *x: dense(*x, times, slopes), *wide)
        wanted = pull(jnp.asarray(d_out, jnp.float64))
    assert error(out, want) < 1e-5
    for got, wish in zip(gradients, wanted, strict=True):
        assert error(got, wish) < 1e-5


def test_one_chunk_across_buckets_is_full_attention_to_all_others(rng, quick_compilation):
    """No approximation remains: dense shared-QK attention without the token itself."""
    k, v = normal(rng, 1, 23, 2, 8), normal(rng, 1, 23, 2, 8)
    got = lsh(k, k, v, chunk=23, buckets=4, rounds=2, sets="released", causal=False, key=KEY)
    times = np.broadcast_to(1 - np.eye(23), (1, 2, 23, 23))
    assert error(got, dense(k, k, v, times)) < 1e-5
    with_itself = full(k, unit(jnp.asarray(k)), v, causal=False)
    assert error(got, with_itself) > 0.01


def test_more_rounds_find_more(rng, quick_compilation):
    """The error against full attention falls with rounds on vectors that lie in clusters."""
    centres = normal(rng, 12, 16)
    k = 3 * (centres[rng.integers(0, 12, 96)] + 0.3 * normal(rng, 96, 16))[None, :, None]
    v = normal(rng, 1, 96, 1, 16)
    want = dense(k, k, v, np.tril(np.ones((96, 96)), -1)[None, None] + np.eye(96) * (np.arange(96) == 0))
    errors = []
    for rounds in (1, 2, 6):
        tries = [lsh(k, k, v, chunk=16, buckets=12, rounds=rounds, key=jax.random.key(n)) for n in range(6)]
        errors.append(np.mean([error(out, want) for out in tries]))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]


def test_same_key_same_buckets(rng):
    k = normal(rng, 1, 40, 2, 8)
    one, same, other = (select(k, buckets=8, rounds=2, key=jax.random.key(n)) for n in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert np.mean(one != other) > 0.5
    assert np.mean(one[:, :, 0] != one[:, :, 1]) > 0.5
    assert np.mean(one[..., 0] != one[..., 1]) > 0.5


def test_rounds_in_evaluation_can_be_more(rng, quick_compilation):
    pattern = build(LSH, chunk=4, buckets=4, rounds=1, evaluation_rounds=3)
    k, v = jnp.asarray(normal(rng, 2, 1, 20, 3, 6))
    train, test = (pattern.select(k, k, key=KEY, train=each) for each in (True, False))
    assert (train.shape[-1], test.shape[-1]) == (1, 3)
    for each, chosen in ((True, train), (False, test)):
        out = pattern(k, k, v, key=KEY, train=each).out
        np.testing.assert_array_equal(out, pattern(k, k, v, selection=chosen, train=each).out)


def test_rows_shorter_than_a_chunk_are_said(rng):
    layer = Attention(
        pattern=functools.partial(LSH, chunk=9, buckets=4, rounds=1), site=Site(num_heads=2, head_dim=4, width=8),
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    with pytest.raises(UserError, match=r"LSH.chunk is 9, but rows have 8 tokens.*lower it to 2"):
        layer(jnp.ones((1, 8, 8)), 8)
    assert layer.key is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"buckets": 7}, r"even, got 7 \(8 would do\)"),
        ({"buckets": (4, 3)}, "even"),
        ({"chunk": 0}, "chunk"),
        ({"rounds": 0}, "rounds"),
        ({"sets": "both"}, '"paper" or "released"'),
        ({"buckets": (2**16, 2**14)}, "fewer buckets"),
    ],
)
def test_mistakes(arguments, words):
    x = jnp.ones((1, 9, 1, 4))
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(functools.partial(lsh, **{"chunk": 2, "buckets": 4, "rounds": 1} | arguments), x, x, x)


def test_a_training_selection_is_read_without_train(rng, quick_compilation):
    """A memory that asks for the weights of its slots reads the buckets of the training step with `train=False`."""
    train, test = (build(LSH, chunk=4, buckets=4, rounds=2, evaluation_rounds=n) for n in (2, 4))
    k, v = jnp.asarray(normal(rng, 2, 1, 20, 3, 6))
    chosen = test.select(k, k, key=KEY, train=True)
    np.testing.assert_array_equal(test(k, k, v, selection=chosen).out, train(k, k, v, selection=chosen).out)
