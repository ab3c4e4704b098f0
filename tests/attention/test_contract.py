"""The contract of every pattern, over the registry and each class's examples: nothing here names a pattern."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra.attention import PATTERNS, Visibility, dense
from lra.attention.precision import accumulator
from tests.attention import cases, oracle

pytestmark = pytest.mark.usefixtures("quick_compilation")

CAUSAL = [p for p in cases.PATTERN_EXAMPLES if cases.make(*p, causal=True) is not None]
each_pattern = pytest.mark.parametrize(("name", "example"), cases.PATTERN_EXAMPLES)
first_else_slow = pytest.mark.parametrize(
    ("name", "example"),
    [pytest.param(name, n, marks=[pytest.mark.slow] if n else []) for name, n in cases.PATTERN_EXAMPLES],
)
"""For what takes seconds to compile: each pattern's first example always, the others in `make test-slow`."""
each_causal = pytest.mark.parametrize(("name", "example"), CAUSAL)


def run(pattern, q, k, v, visibility=None, terms=(), **options):
    return pattern(q, k, v, visibility=visibility, terms=terms, **options).out


def check(case, rng):
    """Arrangement == rules: output and gradients of q, k, v and the terms, against NumPy in float64."""
    with jax.enable_x64(case.dtype == "float64"):
        pattern = cases.make(case.pattern, case.example, case.causal, value_dim=case.values)
        a = cases.arrays(case, rng, pattern=pattern)
        selection = pattern.select(*map(jnp.asarray, (a.q, a.k)), visibility=a.visibility)
        want, gradients = expected(pattern, a, selection)

        @jax.jit
        def both(q, k, v, term, visibility, d_out, selection):
            def out(q, k, v, term):
                return run(pattern, q, k, v, visibility, term, selection=selection)

            value, pull = jax.vjp(out, q, k, v, term)
            return value, pull(d_out)

        arrays = map(jnp.asarray, (a.q, a.k, a.v))
        out, (dq, dk, dv, dt) = both(*arrays, a.term, a.visibility, jnp.asarray(a.d_out), selection)
        assert out.dtype == a.q.dtype
        got = {"q": dq, "k": dk, "v": dv}
        if a.term_arrays.kind in ("alibi", "table"):
            got |= {name: getattr(dt[0], name) for name in ("slopes", "scores", "values") if hasattr(dt[0], name)}
        tolerance = cases.TOLERANCE[case.dtype]
        assert oracle.error(out, want) < tolerance
        empty = ~dense.visible(pattern, a.q.shape[1], a.k.shape[1], a.visibility, selection).any(-1)
        np.testing.assert_array_equal(
            np.asarray(out)[np.broadcast_to(empty, (cases.BATCH, *empty.shape[1:])).swapaxes(1, 2)], 0
        )
        for part, value in got.items():
            assert oracle.error(value, gradients[part], floor=0.1) < tolerance, part


def expected(pattern, a, selection):
    """The oracle's output and gradients, for each of the pattern's parts by its own rules."""
    sizes, visibility, wide = (a.q.shape[1], a.k.shape[1]), a.visibility or Visibility(), accumulator(a.q.dtype)
    outs, gradients, first = [], {}, 0
    for part, own in zip(pattern.parts, pattern.selections(selection), strict=True):
        last = first + part.num_heads
        sets = dense.sets(part, *sizes, visibility, own)
        sets = [np.broadcast_to(each, (cases.BATCH, *each.shape[1:])) for each in sets]
        places = [np.asarray(side.position) for side in part.entries(*sizes, visibility, own)]
        weights = [term.score(None, *(jnp.asarray(x)[:, None, None] for x in places), 1.0) for term in part.own_terms]
        sets = [each * np.exp(sum(np.asarray(x)[:, 0] for x in weights)) for each in sets] if weights else sets

        def prepare(q, k, v, part=part):
            q, k = part.prepare(q, k)
            return (q, *part.summarise(k, v, visibility))

        # NaN in what nobody may read would be NaN in the gradient of `prepare`, which gets 0 for it.
        heads = [jnp.nan_to_num(jnp.asarray(x[:, :, first:last], wide)) for x in (a.q, a.k, a.v)]
        prepared, back = jax.vjp(prepare, *heads)
        scale = part.scale or cases.WIDTH**-0.5
        out, found = oracle.combined(
            *map(np.asarray, prepared), sets, part.combination, scale, a.term_arrays.heads(first, last),
            a.d_out[:, :, first:last], *places,
        )  # fmt: skip
        found |= dict(zip("qkv", back(tuple(jnp.asarray(found[name], wide) for name in "qkv")), strict=True))
        outs.append(out)
        for name, value in found.items():
            gradients.setdefault(name, []).append(np.asarray(value))
        first = last
    axes = {"q": 2, "k": 2, "v": 2, "slopes": 0, "scores": 0}
    joined = {
        name: np.concatenate(values, axes[name]) if name in axes else sum(values) for name, values in gradients.items()
    }
    return np.concatenate(outs, axis=2), joined


@pytest.mark.parametrize("case", [case for name in PATTERNS for case in cases.pairwise(name)], ids=str)
def test_arrangement_equals_rule(case, rng):
    check(case, rng)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for name in PATTERNS for case in cases.sampled(name, 60)], ids=str)
def test_arrangement_equals_rule_sampled(case, rng):
    check(case, rng)


def plain(name, example, rng, length, extra=0, padding="none", packed=False, causal=None, values=cases.WIDTH):
    causal = (name, example) in CAUSAL if causal is None else causal
    case = cases.Case(name, example, causal, str(length), str(extra), padding, packed, "none", "float32", values)
    pattern = cases.make(name, example, causal, value_dim=values)
    return pattern, cases.arrays(case, rng, poison=False, pattern=pattern)


@each_causal
def test_later_tokens_change_nothing(name, example, rng):
    """Where a pattern's selection may look at later tokens, with the selection kept: values never leak."""
    pattern, a = plain(name, example, rng, length=41, extra=5, causal=True)
    chosen = pattern.select(a.q, a.k)
    before, grid = np.asarray(run(pattern, a.q, a.k, a.v)), np.asarray(dense.visible(pattern, 41, 46, selection=chosen))
    for t in (0, 13, 39):
        q, k, v = a.q.copy(), a.k.copy(), a.v.copy()
        for x in (q[:, t + 1 :], k[:, t + 6 :], v[:, t + 6 :]):
            x[...] = rng.normal(size=x.shape) * 9
        q = cases.tied(pattern, q, k)
        if pattern.promise.causal == "strict":
            chosen = pattern.select(q, k)
            again = np.asarray(dense.visible(pattern, 41, 46, selection=chosen))
            np.testing.assert_array_equal(again[:, :, : t + 1], grid[:, :, : t + 1])
        after = np.asarray(run(pattern, q, k, v, selection=chosen))
        if pattern.promise.sorts:
            assert oracle.error(after[:, : t + 1], before[:, : t + 1]) < 1e-6
        else:
            np.testing.assert_array_equal(after[:, : t + 1], before[:, : t + 1])
        assert np.abs(after - before).max() > 0.1


@each_causal
def test_one_query_at_a_time_equals_the_full_pass(name, example, rng):
    pattern, a = plain(name, example, rng, length=13, causal=True)
    if pattern.promise.decode != "exact":
        pytest.skip("promises no exact decoding")
    places = (0, 12)

    @jax.jit
    def both(q, k, v):
        return run(pattern, q, k, v), [run(pattern, q[:, p : p + 1], k[:, : p + 1], v[:, : p + 1]) for p in places]

    whole, alone = both(a.q, a.k, a.v)
    for p, out in zip(places, alone, strict=True):
        assert oracle.error(out[:, 0], whole[:, p]) < 1e-6


@each_causal
def test_segments_after_memory_equal_one_pass(name, example, rng):
    """Borders stay where they are in the one pass, whatever the memory slots that are still empty hold."""
    pattern, a = plain(name, example, rng, length=24, causal=True)
    if not pattern.promise.memory:
        pytest.skip("promises no memory")
    if pattern.promise.causal == "selection":
        pytest.skip("what is chosen in a part of a row is not what is chosen in the whole row")
    attend = jax.jit(functools.partial(run, pattern))
    parts = []
    for start in (0, 8, 16):
        empty = 16 - start
        filled = jnp.broadcast_to(jnp.arange(16) >= empty, (cases.BATCH, 16))
        before = ((0, 0), (empty, 0), (0, 0), (0, 0))
        k, v = (np.pad(x[:, : start + 8], before, constant_values=np.nan) for x in (a.k, a.v))
        parts.append(attend(a.q[:, start : start + 8], k, v, Visibility().after(filled, 8)))
    assert oracle.error(np.concatenate(parts, axis=1), attend(a.q, a.k, a.v)) < 1e-6


@first_else_slow
@pytest.mark.parametrize("side", ["queries", "keys", "both"])
def test_rows_that_read_nothing_are_zero_and_pass_no_gradient(name, example, side, rng):
    pattern, a = plain(name, example, rng, length=17)
    valid = jnp.asarray(np.arange(17)[None] >= np.array([[17], [4]]))
    none = jnp.ones_like(valid)
    visibility = Visibility(q_valid=valid if side != "keys" else none, k_valid=valid if side != "queries" else none)
    out, pull = jax.vjp(lambda *x: run(pattern, *x, visibility), a.q, a.k, a.v)
    gradients = pull(jnp.ones_like(out))
    np.testing.assert_array_equal(out[0], 0)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient[0], 0)
        assert np.isfinite(gradient).all()
    assert np.abs(out[1]).max() > 0.1


@first_else_slow
def test_nan_in_entries_that_nobody_may_read(name, example, rng):
    pattern, a = plain(name, example, rng, length=3, extra=60)
    selection = pattern.select(a.q, a.k)
    if selection is not None:
        pytest.skip("looks at all valid keys to choose among them")
    read = dense.reads(pattern, 3, 63, selection=selection).any((0, 1, 2))
    poisoned = [np.where(read[None, :, None, None], x, np.nan).astype(np.float32) for x in (a.k, a.v)]
    attend = functools.partial(run, pattern, a.q, selection=selection)
    out, pull = jax.vjp(attend, a.k, a.v)
    bad, bad_pull = jax.vjp(attend, *poisoned)
    np.testing.assert_array_equal(out, bad)
    for x, y in zip(pull(jnp.ones_like(out)), bad_pull(jnp.ones_like(out)), strict=True):
        np.testing.assert_array_equal(x, y)


@each_pattern
def test_packed_documents_equal_themselves_alone(name, example, rng):
    pattern, a = plain(name, example, rng, length=43)
    if pattern.promise.packing != "equal":
        pytest.skip("promises packing no equality")
    segment = jnp.asarray(np.repeat([[0, 1, 2], [5, 0, 9]], [11, 19, 13], axis=1).astype(np.int32))
    together = run(pattern, a.q, a.k, a.v, Visibility.tokens(segment=segment))
    for first, last in ((0, 11), (11, 30), (30, 43)):
        alone = run(pattern, *(x[:, first:last] for x in (a.q, a.k, a.v)))
        assert oracle.error(together[:, first:last], alone) < 1e-6


@each_pattern
def test_the_amount_of_padding_changes_nothing(name, example, rng):
    pattern, a = plain(name, example, rng, length=19)
    want = run(pattern, a.q, a.k, a.v)
    for left, right in ((13, 0), (5, 31)):
        q, k, v = (np.pad(x, ((0, 0), (left, right), (0, 0), (0, 0)), constant_values=np.nan) for x in (a.q, a.k, a.v))
        valid = jnp.asarray(np.pad(np.ones((1, 19), bool), ((0, 0), (left, right))))
        out = run(pattern, q, k, v, Visibility.tokens(valid=valid))
        assert oracle.error(out[:, left : left + 19], want) < 1e-6
        np.testing.assert_array_equal(out[:, left + 19 :], 0)


@first_else_slow
def test_positions_that_are_given_decide(name, example, rng):
    """Contiguous positions from another origin give what the defaults give, for rules of distance."""
    pattern, a = plain(name, example, rng, length=23, extra=3)
    position = jnp.arange(26, dtype=jnp.int32)[None] + 24 * 13 * 5 * 7 * 11
    given = run(pattern, a.q, a.k, a.v, Visibility(q_position=position[:, 3:], k_position=position))
    assert oracle.error(given, run(pattern, a.q, a.k, a.v)) < 1e-6


@first_else_slow
def test_vmap_over_an_extra_axis_equals_a_loop(name, example, rng):
    pattern, a = plain(name, example, rng, length=21, extra=2)
    stacked = [jnp.stack([x, x[:, ::-1], -x]) for x in (a.q, a.k, a.v)]

    def value(q, k, v):
        return jnp.sum(run(pattern, q, k, v) ** 3)

    got = jax.vmap(jax.value_and_grad(value, argnums=(0, 1, 2)))(*stacked)
    for n in range(3):
        want = jax.value_and_grad(value, argnums=(0, 1, 2))(*(x[n] for x in stacked))
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert oracle.error(x[n], y) < 1e-5


@first_else_slow
def test_jit_and_remat_change_nothing(name, example, rng):
    pattern, a = plain(name, example, rng, length=29, extra=4)
    key = jax.random.key(7)
    options = {"train": True, "key": key} if pattern.promise.dropout else {}
    pattern = cases.make(name, example, (name, example) in CAUSAL, dropout=0.3 if options else 0.0)

    def value(q, k, v):
        return jnp.sum(run(pattern, q, k, v, **options) ** 2)

    want = jax.grad(value, argnums=(0, 1, 2))(a.q, a.k, a.v)
    got = jax.jit(jax.grad(jax.checkpoint(value), argnums=(0, 1, 2)))(a.q, a.k, a.v)
    for x, y in zip(got, want, strict=True):
        assert oracle.error(x, y) < 1e-6


@first_else_slow
def test_dropout_same_key_same_result_and_right_mean(name, example, rng):
    causal = (name, example) in CAUSAL
    if not cases.make(name, example, causal).promise.dropout:
        pytest.skip("promises no dropout")
    pattern = cases.make(name, example, causal, dropout=0.4)
    _, a = plain(name, example, rng, length=19)
    keys = jax.random.split(jax.random.key(3), 400)
    selection = pattern.select(a.q, a.k, train=True)
    draw = functools.partial(run, pattern, a.q, a.k, a.v, train=True, selection=selection)
    np.testing.assert_array_equal(draw(key=keys[0]), draw(key=keys[0]))
    assert np.abs(draw(key=keys[0]) - draw(key=keys[1])).max() > 0.1
    kept = run(pattern, a.q, a.k, a.v, key=keys[0], train=False, selection=selection)
    sample = jax.vmap(lambda key: draw(key=key))(keys)
    spread = np.asarray(sample.std(0)) / np.sqrt(len(keys))
    assert np.mean(np.abs(sample.mean(0) - kept) <= 4 * spread + 1e-6) > 0.99
    with pytest.raises(ValueError, match="random key"):
        draw(key=None)


@first_else_slow
def test_dropout_gradient_is_that_of_the_same_mask(name, example, rng):
    """Finite differences of the sampled function, with its key fixed."""
    causal = (name, example) in CAUSAL
    rate = 0.4 if cases.make(name, example, causal).promise.dropout else 0.0
    pattern = cases.make(name, example, causal, dropout=rate)
    with jax.enable_x64(True):
        _, a = plain(name, example, rng, length=17)
        q, k, v = (jnp.asarray(x, jnp.float64) for x in (a.q, a.k, a.v))
        key = jax.random.key(5)

        def value(q, k, v):
            return jnp.sum(run(pattern, q, k, v, train=True, key=key) ** 2)

        gradients = jax.grad(value, argnums=(0, 1, 2))(q, k, v)
        direction = [jnp.asarray(rng.normal(size=x.shape)) for x in (q, k, v)]
        slope = sum(jnp.vdot(g, d) for g, d in zip(gradients, direction, strict=True))
        up, down = (value(*(x + e * d for x, d in zip((q, k, v), direction, strict=True))) for e in (1e-5, -1e-5))
        np.testing.assert_allclose(slope, (up - down) / 2e-5, rtol=1e-6)


@first_else_slow
def test_no_second_compilation(name, example, rng):
    pattern, a = plain(name, example, rng, length=11)
    traces = []

    @jax.jit
    def call(q, k, v):
        traces.append(1)
        return run(pattern, q, k, v)

    for _ in range(3):
        call(a.q, a.k, a.v)
    assert len(traces) == 1
    run(pattern, a.q, a.k, a.v)  # outside jit the functions hold their own compiled form
    with compilations() as count:
        run(cases.make(name, example, (name, example) in CAUSAL), a.q + 1, a.k, a.v)
    assert count() == 0


@contextlib.contextmanager
def compilations():
    """Counts XLA compilations inside the block."""
    events = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lambda: len(events)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@first_else_slow
def test_memory_is_linear(name, example, rng):
    """No T x T: temporary bytes of a compiled gradient at most 2.2 times at twice the length."""
    pattern = cases.make(name, example, (name, example) in CAUSAL)

    def bytes_at(length):
        x = jax.ShapeDtypeStruct((1, length, cases.HEADS, cases.WIDTH), jnp.float32)
        gradient = jax.grad(lambda q, k, v: jnp.sum(run(pattern, q, k, v) ** 2), argnums=(0, 1, 2))
        return jax.jit(gradient).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert bytes_at(8192) <= 2.2 * bytes_at(4096)


@each_pattern
def test_what_is_not_promised_raises(name, example, rng):
    promise = cases.make(name, example, (name, example) in CAUSAL).promise
    for causal, kept in ((True, promise.causal), (False, promise.bidirectional)):
        if not kept:
            site = cases.Site(num_heads=cases.HEADS, causal=causal)
            with pytest.raises(ValueError, match=r"no causal form|no bidirectional form"):
                PATTERNS[name](**PATTERNS[name].examples()[example], site=site, rngs=None)
    pattern, a = plain(name, example, rng, length=5)
    with pytest.raises(ValueError, match="keys need to end"):
        run(pattern, a.q, a.k[:, :3], a.v[:, :3])
    with pytest.raises(ValueError, match="needs dtype bool"):
        run(pattern, a.q, a.k, a.v, Visibility(k_valid=jnp.ones((2, 5), jnp.int32)))
    with pytest.raises(ValueError, match="needs shape"):
        run(pattern, a.q, a.k, a.v, Visibility(k_valid=jnp.ones((2, 4), bool)))
    with pytest.raises(ValueError, match="give both or none"):
        run(pattern, a.q, a.k, a.v, Visibility(k_segment=jnp.ones((2, 5), jnp.int32)))


@each_pattern
def test_forward_mode_says_no(name, example, rng):
    pattern, a = plain(name, example, rng, length=5)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: run(pattern, q, a.k, a.v), (a.q,), (a.q,))


@first_else_slow
def test_finite_under_debug_flags_and_large_scores(name, example, rng):
    pattern, a = plain(name, example, rng, length=19, padding="ragged")
    with jax.debug_nans(True), jax.debug_infs(True):
        value = lambda q, k, v: jnp.sum(run(pattern, q, k, v, a.visibility))  # noqa: E731
        for size in (1.0, 300.0):
            for x in jax.grad(value, argnums=(0, 1, 2))(a.q * size, a.k * size, a.v):
                assert np.isfinite(x).all()
