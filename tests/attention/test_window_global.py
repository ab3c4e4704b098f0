"""Window and globals: how they are named, who reads them, projections of their own, and too many of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import Attention, Site, Visibility, WindowGlobal, dense, sliding_window, window_global
from lra.models import Decoder
from tests.attention import cases, oracle

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTH = 19
TOKENS = np.array([[7, 1, 2, 3, 9, 2, 5, 9, 6, 1, 2, 3, 4, 5, 6, 1, 8, 3, 4]], np.int32)  # 9 at 4 and 7
MARKS = np.isin(np.arange(LENGTH), [4, 7])[None]


SIZES = ("window", "global_positions", "global_tokens", "max_globals", "read_through", "causal")
attend = jax.jit(window_global, static_argnames=SIZES)  # compiled as a whole, which is quicker than piece by piece


def draw(rng, length=LENGTH, batch=2):
    return [cases.normal(rng, batch, length, cases.HEADS, cases.WIDTH) for _ in range(3)]


def layer(causal=True, **arguments):
    pattern = functools.partial(WindowGlobal, **{"window": 3, "max_globals": 2} | arguments)
    site = Site(num_heads=3, head_dim=4, width=10, causal=causal)
    return Attention(bias=True, pattern=pattern, site=site, rngs=nnx.Rngs(0))


@nnx.jit(static_argnames="length")
def forward(attention, x, length=LENGTH, visibility=None):
    return attention(x, length, visibility=visibility).out


def test_positions_tokens_and_marks_name_the_same_globals(rng):
    q, k, v = draw(rng)
    read = functools.partial(attend, q, k, v, window=3, causal=False)
    want = read(global_positions=(4, 7))
    assert oracle.error(want, sliding_window(q, k, v, window=3, causal=False)) > 0.1
    by_token = read(global_tokens=(9, 11), max_globals=2, visibility=Visibility.tokens(token=jnp.asarray(TOKENS)))
    by_mark = read(max_globals=3, visibility=Visibility.tokens(marked=jnp.asarray(MARKS)))
    mixed = read(global_positions=(7,), max_globals=2, visibility=Visibility.tokens(marked=jnp.asarray(MARKS)))
    for out in (by_token, by_mark, mixed):
        assert oracle.error(out, want) < 1e-6


def test_globals_read_all_and_are_read_by_all():
    grid = dense.visible(cases.build(WindowGlobal, causal=False, window=2, global_positions=(4, 7)), 11, 11)[0, 0]
    assert grid[[4, 7]].all()
    assert grid[:, [4, 7]].all()
    assert grid[9].nonzero()[0].tolist() == [4, 7, 8, 9]
    causal = dense.visible(cases.build(WindowGlobal, window=2, global_positions=(4, 7)), 11, 11)[0, 0]
    np.testing.assert_array_equal(causal, grid & np.tri(11, dtype=bool))


def test_rows_have_globals_of_their_own_and_fewer_than_there_is_room_for(rng):
    q, k, v = draw(rng, batch=3)
    marked = np.zeros((3, LENGTH), bool)
    marked[0, [0, 18]], marked[1, 5] = True, True
    out = attend(q, k, v, window=3, max_globals=2, visibility=Visibility.tokens(marked=jnp.asarray(marked)))
    for row, positions in enumerate(((0, 18), (5,))):
        one = (x[row : row + 1] for x in (q, k, v))
        assert oracle.error(out[row : row + 1], attend(*one, window=3, global_positions=positions)) < 1e-6
    assert oracle.error(out[2:], sliding_window(q[2:], k[2:], v[2:], window=3)) < 1e-6


def test_equal_scores_count_no_key_twice():
    """Globals 0 and 8 lie in the windows of some."""
    q = np.zeros((1, 11, 1, 4), np.float32)
    v = np.eye(11, dtype=np.float32)[None, :, None]
    weights = np.asarray(attend(q, q, v, window=3, global_positions=(0, 8)))[0, :, 0]
    for query, want in ((1, [0, 1]), (5, [0, 3, 4, 5]), (8, range(9)), (10, [0, 8, 9, 10])):
        np.testing.assert_allclose(weights[query, list(want)], 1 / len(want), rtol=1e-6)
        np.testing.assert_allclose(weights[query].sum(), 1, rtol=1e-6)


def test_later_tokens_change_nothing_even_when_one_becomes_global(rng):
    attention = layer(global_tokens=(9,))
    x = cases.normal(rng, 1, LENGTH, 10)
    seen = lambda tokens: Visibility.tokens(token=jnp.asarray(tokens))  # noqa: E731
    none = np.where(TOKENS == 9, 0, TOKENS)
    before = forward(attention, x, visibility=seen(none))
    for t in (6, 13):
        tokens, changed = none.copy(), x.copy()
        tokens[0, t], changed[0, t:] = 9, rng.normal(size=changed[0, t:].shape)
        after = forward(attention, changed, visibility=seen(tokens))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert np.abs(after - before)[:, t:].max() > 0.1


def test_own_projections_start_equal_to_the_local_ones(rng):
    """And learn by themselves: at the start both together have the gradient that shared ones would have."""
    own, shared = layer(False, global_positions=(4, 7)), layer(False, global_positions=(4, 7), own_projections=False)
    x = cases.normal(rng, 2, LENGTH, 10)
    assert oracle.error(forward(own, x), forward(shared, x)) < 1e-6

    @nnx.jit
    def gradient(attention, x):
        return nnx.grad(lambda attention: jnp.sum(attention(x, LENGTH).out ** 2))(attention)

    got, whole = gradient(own, x), gradient(shared, x)
    for n, name in enumerate(("query", "key", "value")):
        for kind in ("kernel", "bias"):
            extra = got["pattern"]["kernels" if kind == "kernel" else "biases"][n][...].reshape(
                got[name][kind][...].shape
            )
            together = whole[name][kind][...]
            scale = np.abs(whole[name]["kernel"][...]).max()
            assert np.abs(got[name][kind][...] + extra - together).max() < 1e-5 * scale
            if (name, kind) != ("key", "bias"):  # shifts all scores of a query
                assert np.abs(extra).max() > 1e-3 * scale
                assert np.abs(got[name][kind][...]).max() > 1e-3 * scale


def test_own_projections_are_used_by_global_queries_only(rng):
    own, x = layer(False, global_positions=(4, 7)), cases.normal(rng, 2, LENGTH, 10)
    before = np.asarray(forward(own, x))
    for kernel in own.pattern.kernels:
        kernel[...] += 1
    changed = (np.asarray(forward(own, x)) != before).any((0, 2)).nonzero()[0].tolist()
    assert changed == [4, 7]


def test_read_through_the_projections_of_globals(rng):
    """By "global", others read globals through keys and values of the globals' own projections."""
    arguments = {"window": 3, "global_positions": (4, 7), "causal": False}
    q, k, v = draw(rng)
    other = draw(rng)
    local = attend(q, k, v, own=other, **arguments)
    through = attend(q, k, v, own=other, read_through="global", **arguments)
    mixed = [np.where(MARKS[0][:, None, None], y, x) for x, y in zip((k, v), other[1:], strict=True)]
    want = attend(q, *mixed, own=other, **arguments)
    others = ~MARKS[0]
    assert oracle.error(through[:, others], want[:, others]) < 1e-6
    assert oracle.error(local[:, others], want[:, others]) > 0.1
    np.testing.assert_array_equal(through[:, ~others], local[:, ~others])


def test_in_a_decoder_tokens_choose_the_globals(rng):
    """A token that is global is read from far away, and nothing else is."""
    pattern = functools.partial(WindowGlobal, window=2, global_tokens=(9,), max_globals=3)
    model = Decoder(num_layers=1, width=8, num_heads=2, pattern=pattern, vocabulary_size=11, rngs=nnx.Rngs(3))
    logits = nnx.jit(lambda model, tokens: model(tokens)[0])
    tokens = np.array([[1, 2, 9, 3, 4, 5, 6, 7, 8]], np.int32)
    changed = tokens.copy()
    changed[0, [0, 1, 3]] += 1
    before = logits(model, tokens)[0, -1]
    np.testing.assert_array_equal(logits(model, changed)[0, -1], before)
    changed[0, 2] = 10
    assert np.abs(logits(model, changed)[0, -1] - before).max() > 1e-4


def test_globals_in_memory_are_read(rng):
    """Keys before the segment: one pass over 19 tokens equals its last 8 after 11 as memory, globals in both."""
    q, k, v = draw(rng)
    marked = np.isin(np.arange(LENGTH), [4, 14])[None]
    own = draw(rng)
    whole = attend(q, k, v, own=own, window=3, max_globals=2, visibility=Visibility.tokens(marked=jnp.asarray(marked)))
    late = attend(
        q[:, 11:], k, v, own=(own[0][:, 11:], *own[1:]), window=3, max_globals=2,
        visibility=Visibility(k_global=jnp.asarray(marked)),
    )  # fmt: skip
    assert oracle.error(late, whole[:, 11:]) < 1e-6


def test_packed_rows_have_globals_in_each_document(rng):
    q, k, v = draw(rng)
    segment = np.repeat([[0, 1]], [9, 10], axis=1).astype(np.int32)
    marked = np.isin(np.arange(LENGTH), [4, 11])[None]
    visibility = Visibility.tokens(segment=jnp.asarray(segment), marked=jnp.asarray(marked))
    out = attend(q, k, v, window=3, max_globals=2, causal=False, visibility=visibility)
    for first, last, position in ((0, 9, 4), (9, 19, 2)):
        alone = attend(*(x[:, first:last] for x in (q, k, v)), window=3, global_positions=(position,), causal=False)
        assert oracle.error(out[:, first:last], alone) < 1e-6


def sizes(jaxpr):
    """Numbers of elements of all arrays of a program."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.size for v in eqn.outvars if hasattr(v.aval, "size"))
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from sizes(inner)


def test_nothing_as_large_as_all_scores():
    """Gradients of one head over 1024 tokens, with projections of their own: no array of T x T / 8 elements."""
    length = 1024
    x = jax.ShapeDtypeStruct((1, length, 1, 4), jnp.float32)

    def value(q, k, v):
        return jnp.sum(window_global(q, k, v, own=(q, k, v), window=9, global_positions=(0, 5, 600)) ** 2)

    found = [*sizes(jax.make_jaxpr(jax.grad(value, argnums=(0, 1, 2)))(x, x, x).jaxpr)]
    assert length * 4 < max(found) < length**2 / 8
    dense_scores = jax.make_jaxpr(lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k))(x, x)
    assert max(sizes(dense_scores.jaxpr)) == length**2


MANY = r"a row has 3 global tokens, but max_globals is 2: raise it"


def test_more_globals_than_the_maximum(rng):
    q, k, v = draw(rng)
    marked = jnp.asarray(np.isin(np.arange(LENGTH), [1, 4, 7])[None])
    with pytest.raises(ValueError, match=MANY):
        window_global(q, k, v, window=3, max_globals=2, visibility=Visibility.tokens(marked=marked))
    with pytest.raises(ValueError, match=MANY):
        cases.build(WindowGlobal, window=3, max_globals=2, own_projections=False)(
            q, k, v, visibility=Visibility.tokens(marked=marked)
        )

    def compiled(marked):
        attend(q, k, v, window=3, max_globals=2, visibility=Visibility.tokens(marked=marked)).block_until_ready()
        jax.effects_barrier()

    compiled(jnp.asarray(MARKS))
    with pytest.raises(jax.errors.JaxRuntimeError, match=MANY):
        compiled(marked)


def test_compiled_code_calls_the_host_only_where_there_may_be_too_many(rng):
    q, k, v = draw(rng)
    for marks, calls in ((None, False), (jnp.asarray(MARKS), True)):
        seen = Visibility.tokens(marked=marks)
        jaxpr = jax.make_jaxpr(
            lambda q, seen: window_global(q, k, v, window=3, global_positions=(4,), max_globals=2, visibility=seen)
        )(q, seen)
        assert ("debug_callback" in str(jaxpr)) == calls


def test_a_position_outside_the_row(rng):
    q, k, v = draw(rng)
    with pytest.raises(ValueError, match=r"global_positions \(4, 19\) need a row of at least 20 tokens, got 19: lower"):
        window_global(q, k, v, window=3, global_positions=(4, 19))
    for positions in ((-1,), (4, 4)):
        with pytest.raises(ValueError, match=r"global_positions needs different numbers of at least 0, got"):
            window_global(q, k, v, window=3, global_positions=positions)


def test_tokens_without_ids(rng):
    q, k, v = draw(rng)
    with pytest.raises(ValueError, match=r"global_tokens need token ids: give visibility\.k_token"):
        window_global(q, k, v, window=3, global_tokens=(9,), max_globals=2)
