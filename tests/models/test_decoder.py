"""The decoder against NumPy in float64; causality, padding and what its parts refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import PATTERNS, ALiBi, Attention, Full, Heads, Promise, Recurrence, Rotary, SlidingWindow
from lra.models import Decoder, Embedding, FeedForward, LearnedPositions, SinusoidalPositions, Softmax, Stack
from tests.attention import cases, oracle

VOCABULARY = 11
learned = functools.partial(LearnedPositions, max_length=7)


def make(**options):
    sizes = {"num_layers": 2, "width": 6, "num_heads": 3, "pattern": Full, "vocabulary_size": VOCABULARY}
    return Decoder(**sizes | options, rngs=nnx.Rngs(4))


def tokens(rng, *shape):
    return rng.integers(0, VOCABULARY, shape).astype(np.int32)


def norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def linear(x, p):
    return x @ p["kernel"] + p.get("bias", 0)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attention(x, p, heads):
    q, k, v = (linear(x, p[name]).reshape(*x.shape[:2], heads, -1) for name in ("query", "key", "value"))
    s = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    weights = np.where(np.tri(x.shape[1], dtype=bool), np.exp(s - s.max(-1, keepdims=True)), 0)
    out = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)
    return linear(out.reshape(*x.shape[:2], -1), p["output"])


def feed_forward(x, p, activation):
    x = linear(x, p["inner"])
    if activation == "geglu":
        gate, x = np.split(x, 2, axis=-1)
        return linear(gelu(gate) * x, p["outer"])
    return linear({"gelu": gelu, "relu": lambda x: np.maximum(x, 0)}[activation](x), p["outer"])


def reference(p, x, *, position, form, activation, tied):
    """Logits of a decoder of full attention with 3 heads, from its parameters as float64."""
    length, width = x.shape[1], p["embedding"]["embedding"].shape[1]
    x = p["embedding"]["embedding"][x]
    if position == "learned":
        x = x + p["position"]["embedding"]["embedding"][:length]
    if position == "sinusoidal":
        angle = np.arange(length)[:, None] / 10_000 ** (2 * np.arange(width // 2) / width)
        x = x + np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    layers = p["stack"]["layers"][0]
    for i in range(len(layers["attention_norm"]["scale"])):
        layer = jax.tree.map(lambda a, i=i: a[i], layers)
        if form == "pre":
            x = x + attention(norm(x, layer["attention_norm"]), layer["attention"], 3)
            x = x + feed_forward(norm(x, layer["feed_forward_norm"]), layer["feed_forward"], activation)
        else:
            x = norm(x + attention(x, layer["attention"], 3), layer["attention_norm"])
            x = norm(x + feed_forward(x, layer["feed_forward"], activation), layer["feed_forward_norm"])
    if form == "pre":
        x = norm(x, p["stack"]["final_norm"])
    head = p.get("head", {})
    return x @ (p["embedding"]["embedding"].T if tied else head["projection"]) + head.get("bias", 0)


@pytest.mark.parametrize(
    ("position", "form", "activation", "tied", "bias"),
    [
        ("learned", "pre", "gelu", True, False),
        ("sinusoidal", "post", "relu", False, True),
        (None, "pre", "geglu", False, False),
        ("learned", "post", "geglu", True, True),
        ("sinusoidal", "pre", "relu", True, True),
    ],
)
def test_logits_and_scores_equal_numpy(position, form, activation, tied, bias, rng):
    model = make(
        head_dim=5 if bias else None,
        position={"learned": learned, "sinusoidal": SinusoidalPositions, None: None}[position],
        attention=functools.partial(Attention, bias=bias),
        feed_forward=functools.partial(FeedForward, hidden=8, activation=activation, bias=bias),
        head=functools.partial(Softmax, tied=tied, bias=bias),
        stack=functools.partial(Stack, norm=form),
    )  # fmt: skip
    graph, state = nnx.split(model)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.7, x.dtype), state)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(state))
    x, targets = tokens(rng, 2, 7), tokens(rng, 2, 7)
    logits, nats = jax.jit(lambda s: (lambda m: (m(x)[0], m.score(x, targets).nats))(nnx.merge(graph, s)))(state)
    want = reference(p, x, position=position, form=form, activation=activation, tied=tied)
    assert oracle.error(logits, want) < 1e-5
    chosen = np.take_along_axis(want, targets[..., None], axis=-1)[..., 0]
    assert oracle.error(nats, np.log(np.exp(want).sum(-1)) - chosen) < 1e-5


STRICT = [
    p for p in cases.PATTERN_EXAMPLES if (made := cases.make(*p, causal=True)) and made.promise.causal == "strict"
]


@pytest.mark.parametrize(("name", "example"), STRICT)
def test_later_tokens_change_no_earlier_logits(name, example, rng):
    pattern = functools.partial(PATTERNS[name], **PATTERNS[name].examples()[example])
    model = make(pattern=pattern, num_heads=cases.HEADS, terms=(ALiBi,), position=SinusoidalPositions)
    run, x = nnx.jit(lambda model, x: model(x)[0]), tokens(rng, 2, 37)
    before = np.asarray(run(model, x))
    for t in (0, 20, 35):
        other = x.copy()
        other[:, t + 1 :] = (other[:, t + 1 :] + rng.integers(1, VOCABULARY, (2, 36 - t))) % VOCABULARY
        after = np.asarray(run(model, other))
        if cases.make(name, example, causal=True).promise.sorts:
            assert oracle.error(after[:, : t + 1], before[:, : t + 1]) < 1e-6
        else:
            np.testing.assert_array_equal(after[:, : t + 1], before[:, : t + 1])
        assert np.abs(after - before)[:, t + 1].max() > 1e-4


@pytest.mark.parametrize("pattern", [Full, functools.partial(SlidingWindow, window=3)], ids=["full", "window"])
def test_padding_changes_nothing(pattern, rng):
    """At the right with positions that count from the left; at either end with terms by distance."""
    x = tokens(rng, 2, 5)
    run = nnx.jit(lambda model, x, valid: model(x, valid=valid)[0])
    for options, sides in (({"position": learned}, [(0, 2)]), ({"terms": (Rotary, ALiBi)}, [(0, 2), (2, 0), (1, 1)])):
        model = make(pattern=pattern, **options)
        want = run(model, x, None)
        for before, after in sides:
            wide, other = (np.concatenate([tokens(rng, 2, before), x, tokens(rng, 2, after)], axis=1) for _ in range(2))
            valid = np.pad(np.ones((2, 5), bool), ((0, 0), (before, after)))
            got = run(model, wide, valid)[:, before : before + 5]
            assert oracle.error(got, want) < 1e-5
            np.testing.assert_array_equal(got, run(model, other, valid)[:, before : before + 5])
            assert not before or oracle.error(run(model, wide, None)[:, before : before + 5], want) > 1e-3


def test_number_of_parameters():
    """11 x 6 tokens, 7 x 6 positions, 2 layers, the last norm."""
    model = make(position=learned)
    layer = 4 * 6 * 6 + (6 * 24 + 24) + (24 * 6 + 6) + 2 * (6 + 6)  # attention without biases, feed-forward, norms
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))) == 66 + 42 + 2 * layer + 12 == 1092
    free = make(
        head=functools.partial(Softmax, tied=False, bias=True), stack=functools.partial(Stack, norm="post"),
        terms=(Rotary, ALiBi), memory=functools.partial(Recurrence, length=3),
    )  # fmt: skip
    assert sum(x.size for x in jax.tree.leaves(nnx.state(free))) == 66 + 2 * layer + 66 + 11


class Absolute(SlidingWindow):
    """Promises neither memory nor terms by distance, nor dropout."""

    promise = Promise(causal="strict")


part = functools.partial
MISTAKES = [
    ({"num_layers": 0}, "Decoder.num_layers needs to be at least 1, got 0"),
    ({"width": -6}, "Decoder.width needs to be at least 1, got -6"),
    ({"num_heads": 0}, "Decoder.num_heads needs to be at least 1, got 0"),
    ({"head_dim": 0}, "Decoder.head_dim needs to be at least 1, got 0"),
    ({"num_heads": 4}, "Decoder.num_heads=4 does not divide Decoder.width=6: .* or set Decoder.head_dim"),
    ({"dropout": 1.0}, "Decoder.dropout needs to be at least 0 and below 1, got 1.0"),
    ({"memory": part(Recurrence, length=3), "position": learned}, "set Decoder.position = None and use Decoder.terms"),
    ({"pattern": (Full, Full, Full)}, "Decoder.pattern needs a number of entries that divides 2 layers, got 3"),
    ({"pattern": ()}, "Decoder.pattern needs a number of entries that divides 2 layers, got 0"),
    (
        {"embedding": functools.partial(Embedding, table="normal_0.2")},
        "no initialiser is called 'normal_0.2': did you mean 'normal_0.02'",
    ),
    ({"pattern": part(SlidingWindow, window=0)}, "window counts keys up to .* at least 1, got 0"),
    (
        {"pattern": part(SlidingWindow, window=(1, 2, 3))},
        "SlidingWindow.window needs one entry for each of 2 layers, got 3",
    ),
    ({"pattern": part(SlidingWindow, window=2, dilation=0)}, "dilation is a step in tokens .* at least 1, got 0"),
    ({"pattern": part(SlidingWindow, window=2, window_right=-1)}, "window_right needs to be at least 0, got -1"),
    ({"pattern": part(SlidingWindow, window=2, window_right=1)}, "set window_right = 0, got 1"),
    ({"pattern": part(Heads, groups=((1, Full), (1, Full)))}, r"counts that add up to 3 heads, got \[1, 1\]"),
    ({"pattern": part(Absolute, window=2), "memory": part(Recurrence, length=3)}, "Absolute does not promise memory"),
    ({"pattern": part(Absolute, window=2), "terms": (ALiBi,)}, "Absolute does not promise distances"),
    ({"pattern": part(Absolute, window=2), "attention": part(Attention, dropout=0.1)}, "set Attention.dropout = 0"),
    ({"attention": part(Attention, dropout=-0.1)}, "Attention.dropout needs to be at least 0 and below 1, got -0.1"),
    ({"attention": part(Attention, kernel="zero")}, "no initialiser is called 'zero': did you mean 'zeros'"),
    ({"feed_forward": part(FeedForward, activation="swish")}, "FeedForward.activation needs to be .*, got 'swish'"),
    ({"feed_forward": part(FeedForward, hidden=0)}, "FeedForward.hidden needs to be at least 1, got 0"),
    (
        {"feed_forward": part(FeedForward, dropout=1.5)},
        "FeedForward.dropout needs to be at least 0 and below 1, got 1.5",
    ),
    ({"stack": part(Stack, norm="sandwich")}, "Stack.norm needs to be 'pre' or 'post', got 'sandwich'"),
    ({"stack": part(Stack, remat="all")}, "Stack.remat needs to be one of 'none', 'full', 'dots', got 'all'"),
    ({"stack": part(Stack, dropout=1.0)}, "Stack.dropout needs to be at least 0 and below 1, got 1.0"),
    ({"position": part(LearnedPositions, max_length=0)}, "LearnedPositions.max_length needs to be at least 1, got 0"),
    ({"position": part(SinusoidalPositions, base=1.0)}, "SinusoidalPositions.base needs to be above 1, got 1.0"),
    ({"position": SinusoidalPositions, "width": 9}, "SinusoidalPositions needs an even width, got 9"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_more_tokens_than_positions(rng):
    with pytest.raises(ValueError, match=r"the model has 7 positions, got 8 tokens: raise LearnedPositions.max_length"):
        make(position=learned)(tokens(rng, 1, 8))


def test_dropout_needs_a_key(rng):
    for options in (
        {"dropout": 0.1},
        {"stack": part(Stack, dropout=0.1)},
        {"feed_forward": part(FeedForward, dropout=0.1)},
    ):
        model, x = make(num_layers=1, **options), tokens(rng, 1, 3)
        with pytest.raises(ValueError, match=r"dropout=0.1 needs a random key"):
            model(x, train=True)
        np.testing.assert_array_equal(model(x)[0], model(x, key=jax.random.key(1))[0])
