"""Adaptive spans against the paper's formula, which weighs after the softmax; windows, bounds, losses and metrics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import AdaptiveSpan, ALiBi, Heads, Recurrence, Site, SlidingWindow, adaptive_span, dense
from lra.attention.adaptive_span import _mean, log_weight
from lra.attention.pattern import Inputs
from lra.errors import UserError
from lra.models import Decoder, Stack
from tests.attention import cases, oracle
from tests.attention.cases import HEADS, WIDTH

LENGTH, EXTRA, MAX_SPAN = 13, 11, 17
SPANS = np.array([0.3, 3.7, 21.3])  # one that hardly has a plateau, one inside, one beyond the maximum; no ties


def formula(q, k, v, spans, ramp, own_key, causal):
    """Softmax over the keys within reach, times soft weights, normalised again. spans [B or 1, T, H]."""
    away = np.arange(LENGTH)[:, None] + EXTRA - np.arange(LENGTH + EXTRA)
    away = (away if causal else np.abs(away)) - (not own_key)
    inside = (away >= 0) & (away < MAX_SPAN)
    weight = np.clip((ramp + spans.swapaxes(1, 2)[..., None] - away) / ramp, 0, 1) * inside
    scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p = weight * p / p.sum(-1, keepdims=True)
    total = p.sum(-1, keepdims=True)
    return np.einsum("bhts,bshe->bthe", p / np.where(total > 0, total, 1), v)


@pytest.mark.parametrize(
    ("ramp", "own_key", "causal", "dynamic"),
    [(4, False, True, False), (1, True, False, False), (5, True, True, True), (3, False, False, True)],
)
def test_the_formula_and_its_slopes(ramp, own_key, causal, dynamic, rng, quick_compilation):
    with jax.enable_x64(True):
        q, k, v = (rng.normal(size=(2, n, HEADS, WIDTH)) for n in (LENGTH, LENGTH + EXTRA, LENGTH + EXTRA))
        spans = np.broadcast_to(SPANS, (1, LENGTH, HEADS)) + dynamic * rng.uniform(0, 5, (2, LENGTH, HEADS))
        options = {"ramp": ramp, "own_key": own_key, "causal": causal}
        cotangent = rng.normal(size=q.shape)

        def flat(spans):
            return spans if dynamic else spans[0, 0]

        @jax.jit
        def both(q, k, v, spans):
            run = functools.partial(adaptive_span, **options, max_span=MAX_SPAN)
            out, pull = jax.vjp(lambda q, k, v, spans: run(q, k, v, spans=spans), q, k, v, spans)
            return out, pull(cotangent)

        out, gradients = both(q, k, v, flat(spans))
        assert oracle.error(out, formula(q, k, v, spans, **options)) < 1e-12
        arrays = (q, k, v, spans)
        for n, gradient in enumerate(gradients):
            direction = rng.normal(size=gradient.shape)
            ends = [
                np.vdot(
                    formula(*(x + e * direction if i == n else x for i, x in enumerate(arrays)), **options), cotangent
                )
                for e in (1e-6, -1e-6)
            ]
            np.testing.assert_allclose(np.vdot(gradient, direction), (ends[0] - ends[1]) / 2e-6, rtol=1e-5)


def test_a_stored_quarter_of_a_hundred():
    """The stored z is a share of S = 100: weight 1 up to distance 25, a half at 41, nothing from 57 on."""
    pattern = cases.build(AdaptiveSpan, max_span=100, loss_coefficient=0.0, initial=0.25)
    seen = dense.visible(pattern, 1, 101)[0, :, 0, ::-1]  # by distance, from the query's own key on
    assert seen.sum(-1).tolist() == [57] * HEADS
    assert not seen[:, 0].any()
    weights = np.exp(log_weight(jnp.asarray(25.0), jnp.arange(57, dtype=jnp.int32), 32))
    np.testing.assert_allclose(weights[[0, 25, 41, 56]], [1, 1, 0.5, 1 / 32], rtol=1e-6)


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_in_a_model(dynamic, rng, quick_compilation):
    """Losses, metrics, gradients of z from both losses, causality; one pass equals segments with enough memory."""
    options = {"initial": (0.0, 0.06)} if not dynamic else {"dynamic": True}
    make = functools.partial(AdaptiveSpan, max_span=80, ramp=3, loss_coefficient=0.5, **options)
    model = Decoder(
        num_layers=2, width=8, num_heads=2, pattern=make, terms=(ALiBi,), vocabulary_size=17,
        memory=functools.partial(Recurrence, length=12), stack=functools.partial(Stack, scan=True),
        rngs=nnx.Rngs(3),
    )  # fmt: skip
    fitted = model.fitted()
    assert fitted.embedding.embedding[...] is model.embedding.embedding[...]
    windows = [each.stack.layers[0].attention.pattern.window for each in (model, fitted)]
    assert windows == [80, 80 if dynamic else 64]  # the model itself stays as it was
    model = fitted
    pattern = model.stack.layers[0].attention.pattern
    if dynamic:
        pattern.kernel[...] = jnp.asarray(rng.normal(size=pattern.kernel.shape), jnp.float32)
        pattern.bias[...] = jnp.full((2, 2), -0.5)
    tokens = rng.integers(0, 17, (2, 12)).astype(np.int32)
    targets = np.roll(tokens, -1, axis=1)
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def step(parameters, tokens, targets, memory):
        def both(parameters):
            scored = nnx.merge(graph, parameters, rest).score(tokens, targets, memory=memory, train=True)
            return (scored.nats.sum(), scored.losses["span"]), (scored.nats, scored.metrics, scored.memory)

        values, pull, more = jax.vjp(both, parameters, has_aux=True)
        one, zero = jnp.ones(()), jnp.zeros(())
        return values, pull((one, zero))[0], pull((zero, one))[0], more

    values, by_nats, by_span, (nats, metrics, _) = step(parameters, tokens, targets, model.initial_memory(2, True))
    owners = [nnx.merge(graph, g, rest).stack.layers[0].attention.pattern for g in (by_nats, by_span)]
    for owner in owners:
        for value in (owner.kernel, owner.bias) if dynamic else (owner.spans,):
            assert np.isfinite(value[...]).all()
            assert np.abs(value[...]).max() > 1e-6
    if not dynamic:
        np.testing.assert_allclose(values[1], 2 * 0.5 * 80 * 0.03, rtol=1e-6)
        np.testing.assert_array_equal(metrics["span"], [[3, 8]] * 2)  # ceil(4.8) + 3
        np.testing.assert_array_equal(metrics["span_average"], [6, 6])  # ceil(0.03 * 80) + 3
        np.testing.assert_array_equal(metrics["span_largest"], [8, 8])
        np.testing.assert_allclose(owners[1].spans[...], 0.5 * 80 / 2, rtol=1e-6)
    np.testing.assert_array_equal(metrics["span_window"], windows[1:] * 2)
    memory, parts = model.initial_memory(2, True), []
    for start in (0, 4, 8):
        here = slice(start, start + 4)
        *_, (part, _, memory) = step(parameters, tokens[:, here], targets[:, here], memory)
        parts.append(part)
    assert oracle.error(np.concatenate(parts, axis=1), nats) < 1e-5
    changed = tokens.copy()
    changed[:, 7:] = (changed[:, 7:] + 1) % 17
    *_, (other, _, _) = step(parameters, changed, targets, model.initial_memory(2, True))
    assert oracle.error(other[:, :7], nats[:, :7]) < 1e-6
    assert oracle.error(other[:, 7:], nats[:, 7:]) > 1e-3


def test_windows_follow_the_largest_span(rng, quick_compilation):
    """Rounded up to 64 keys, at most S; what is read is the same. Other patterns have nothing to fit."""
    q, k, v = (jnp.asarray(rng.normal(size=(1, 300, HEADS, WIDTH)), jnp.float32) for _ in range(3))
    for initial, window in ((0.0, 64), ((0.0, 0.16, 0.1), 64), (0.161, 128), (1.0, 200), (float("nan"), 200)):
        pattern = cases.build(AdaptiveSpan, max_span=200, ramp=32, loss_coefficient=0.0)
        pattern.spans[...] = jnp.broadcast_to(jnp.asarray(initial), (HEADS,))
        want = pattern(q, k, v).out
        assert pattern.window == 200
        assert pattern.fit()
        assert (pattern.window, pattern.reach) == (window, window)
        if window < 200:
            assert oracle.error(pattern(q, k, v).out, want) < 1e-6
    dynamic = cases.build(AdaptiveSpan, max_span=200, loss_coefficient=0.0, dynamic=True)
    assert not dynamic.fit()
    assert dynamic.window == 200
    assert not cases.build(SlidingWindow, window=3).fit()
    heads = cases.build(
        Heads,
        groups=(
            (1, functools.partial(SlidingWindow, window=99)),
            (2, functools.partial(AdaptiveSpan, max_span=200, loss_coefficient=0.0)),
        ),
    )
    assert heads.fit()
    assert heads.reach == 98


def test_spans_stay_in_their_bounds():
    pattern = cases.build(AdaptiveSpan, max_span=9, loss_coefficient=0.0)
    pattern.spans[...] = jnp.asarray([-0.1, 0.3, 1.2])
    pattern.project()
    np.testing.assert_allclose(pattern.spans[...], [0, 0.3, 1])


def test_dynamic_spans_begin_short():
    """z = sigmoid(-4) whatever the input."""
    pattern = AdaptiveSpan(
        max_span=1000, loss_coefficient=1.0, dynamic=True, site=Site(num_heads=2, head_dim=4, width=8), rngs=nnx.Rngs(0)
    )
    x = jnp.ones((1, 5, 8))
    q = jnp.ones((1, 5, 2, 4))
    attended = pattern(q, q, q, inputs=Inputs(x, x, lambda x: (q, q, q)))
    np.testing.assert_allclose(attended.losses["span"], 1000 / (1 + np.exp(4)), rtol=1e-5)
    with pytest.raises(ValueError, match="pass `inputs`"):
        pattern(q, q, q)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_span": 0}, "max_span counts tokens and needs to be at least 1, got 0"),
        ({"ramp": 0}, "ramp counts tokens and needs to be at least 1, got 0"),
        ({"initial": 1.5}, "initial needs a number in .0, 1., or one for each of 3 heads, got 1.5"),
        ({"initial": (0.1, 0.2)}, "one for each of 3 heads"),
        ({"initial": 0.5, "dynamic": True}, "initial has no effect on dynamic spans"),
        ({"loss_coefficient": -1.0}, "loss_coefficient needs to be at least 0 and finite, got -1.0"),
    ],
    ids=str,
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        cases.build(AdaptiveSpan, **{"max_span": 9, "loss_coefficient": 0.0, **options})


def test_a_maximum_other_than_the_trained_one_is_refused():
    trained = cases.build(AdaptiveSpan, max_span=9, loss_coefficient=0.0)
    other = cases.build(AdaptiveSpan, max_span=12, loss_coefficient=0.0)
    nnx.update(other, nnx.state(trained))
    with pytest.raises(UserError, match=r"max_span is 12, but .* shares of 9: set AdaptiveSpan.max_span = 9"):
        other.fit()


def test_spans_need_a_head_each(rng):
    q = jnp.zeros((1, 3, 2, 4))
    with pytest.raises(ValueError, match=r"spans need shape \[H\] or .* with H = 2, got \[3\]"):
        adaptive_span(q, q, q, spans=jnp.zeros(3), max_span=4)


def test_the_mean_span_with_one_validity_for_all_rows():
    """Validity [1, T] stands for B rows."""
    share = jnp.asarray([[[0.2], [0.6], [0.9]], [[0.4], [0.8], [0.1]]])
    valid = jnp.asarray([[True, True, False]])
    np.testing.assert_allclose(_mean(share, valid), 0.5, rtol=1e-6)
