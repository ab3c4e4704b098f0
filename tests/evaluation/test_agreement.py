"""Protocols agree, token by token, where they give tokens the same context."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lra.attention import XLRelative
from lra.data import Batch
from lra.evaluation import Block, Breakdown, Carried, Protocol, Sliding, evaluate
from lra.models import Decoder

Make = Callable[..., Decoder]


class Each(Breakdown):
    """The nats of all tokens in the order in which they were scored."""

    name = "token"

    def __init__(self) -> None:
        self.nats: list[np.ndarray] = []

    def begin(self, model: Decoder, corpus: Any, protocol: Protocol, reach: int) -> None:
        pass

    def add(self, batch: Batch, nats: np.ndarray, metrics: Mapping[str, Any]) -> None:
        self.nats.append(nats[batch.weights > 0])

    def as_dict(self) -> Any:
        raise NotImplementedError

    table = png = as_dict  # type: ignore[assignment]


def each(model: Decoder, corpus: Any, protocol: Protocol) -> np.ndarray:
    """Nats of the tokens, in text order for protocols that read one stream or windows as long as each other."""
    seen = Each()
    report = evaluate(model, corpus, "test", protocol, breakdown=seen)
    nats = np.concatenate(seen.nats)
    assert report.tokens_scored == report.tokens_expected == nats.size == corpus.tokens("test").size
    return nats


def test_sliding_by_one_is_a_fresh_window_for_every_token(make_model: Make, corpus: Any) -> None:
    """By a loop over tokens that knows nothing of protocols, in float64 from the logits on."""
    window, tokens = 7, corpus.tokens("test")
    read = np.concatenate([[corpus.vocabulary.start], tokens]).astype(np.int32)
    model, expected = make_model(), []
    forward = nnx.jit(lambda model, read: model(read)[0][0])
    for n in range(tokens.size):
        begin = max(n - window + 1, 0)
        logits = np.asarray(forward(model, read[None, begin : begin + window]), np.float64)[n - begin]
        expected.append(np.log(np.exp(logits).sum()) - logits[tokens[n]])
    found = each(model, corpus, Sliding(window=window, stride=1, batch_size=5))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    wider = each(model, corpus, Sliding(window=window, stride=3, batch_size=5))
    assert np.abs(wider - expected).max() > 0.1  # context matters to this model


def test_sliding_by_a_window_is_block(make_model: Make, corpus: Any) -> None:
    """Bit for bit, with memory too, which starts empty in each window."""
    model = make_model(memory=5)
    sliding = each(model, corpus, Sliding(window=7, stride=7, batch_size=3))
    assert (sliding == each(model, corpus, Block(segment=7, batch_size=3))).all()


def test_all_protocols_are_one_when_all_of_the_text_is_context(make_model: Make, corpus: Any) -> None:
    """Full attention with terms by distance reads layer inputs of all earlier tokens, remembered or at hand."""
    plain, remembering = make_model(terms=(XLRelative,)), make_model(memory=101, terms=(XLRelative,))
    whole = each(plain, corpus, Block(segment=101, batch_size=1))
    np.testing.assert_allclose(each(plain, corpus, Sliding(window=103, stride=7, batch_size=1)), whole, rtol=1e-5)
    np.testing.assert_allclose(each(remembering, corpus, Carried(streams=1, segment=7)), whole, rtol=1e-5)
    assert np.abs(each(remembering, corpus, Carried(streams=1, segment=7, memory_length=2)) - whole).max() > 0.1


def test_one_layer_has_no_context_beyond_its_keys(make_model: Make, corpus: Any) -> None:
    """Keys of one layer depend on their own token alone, so that the last w keys, carried, are a window of w.

    A second layer's keys have read w tokens more, which a fresh window has not.
    """
    for layers, agree in ((1, True), (2, False)):
        options = {"terms": (XLRelative,), "num_layers": layers}
        sliding = each(make_model(**options), corpus, Sliding(window=5, stride=1))
        carried = each(make_model(memory=5, **options), corpus, Carried(streams=1, segment=7, attention_length=5))
        assert np.allclose(sliding, carried, rtol=1e-5) == agree


def test_golden_scores(make_model: Make, make_corpus: Any) -> None:
    """Of parameters and tokens by formula (U65): if these move, so does every score that was ever reported."""
    graph, state = nnx.split(make_model(memory=5))
    waves = jax.tree.map(lambda x: jnp.sin(1 + jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), state)
    model, corpus = nnx.merge(graph, waves), make_corpus((np.arange(101) ** 2 % 11).astype(np.uint8))
    for protocol, bits in (
        (Block(segment=7, batch_size=3), 7.736692),
        (Sliding(window=7, stride=3, batch_size=3), 7.744720),
        (Carried(streams=3, segment=7), 7.745815),
    ):
        report = evaluate(model, corpus, "test", protocol)
        assert report.nats_per_token / math.log(2) == pytest.approx(bits, rel=1e-6), protocol.describe()


def test_context_is_promised_and_stated(make_model: Make, corpus: Any) -> None:
    report = evaluate(make_model(memory=5), corpus, "test", Sliding(window=7, stride=3, batch_size=3))
    assert report.protocol == "sliding, window 7, stride 3, batch size 3"
    assert report.context == (
        "windows of 7 tokens, one every 3, each read from the token before it on; the first scores all its tokens, "
        "from 1 token on, the others their last 3, from 5 to 7 tokens; memory starts empty in each; "
        "id 3 stands before the first token"
    )


@pytest.mark.slow
def test_more_context_scores_a_trained_model_no_worse(make_model: Make, make_corpus: Any) -> None:
    """By smaller strides and by longer memory, up to the score of one long window (U55, U57, U104).

    Most tokens repeat the one five before them, which a model with terms by distance learns in seconds.
    """
    tokens = np.random.default_rng(0).integers(0, 11, 21_001)
    for n in np.flatnonzero(np.random.default_rng(1).random(tokens.size) < 0.9)[5:]:
        tokens[n] = tokens[n - 5]
    options = {"terms": (XLRelative,), "num_layers": 1, "width": 32}
    model = trained(make_model(**options), tokens[:20_000], segment=16, steps=200)
    corpus = make_corpus(tokens[20_000:].astype(np.uint8))
    remembering = nnx.merge(nnx.graphdef(make_model(memory=64, **options)), nnx.state(model))

    def perplexity(model: Decoder, protocol: Protocol) -> float:
        return evaluate(model, corpus, "test", protocol).perplexity

    strides = [perplexity(model, Sliding(window=8, stride=stride, batch_size=64)) for stride in (8, 4, 2, 1)]
    lengths = [
        perplexity(remembering, Carried(streams=1, segment=4, memory_length=length, attention_length=length + 1))
        for length in (1, 5, 12)
    ]
    for worse, better in itertools.pairwise(strides):
        assert better < 1.005 * worse
    for worse, better in itertools.pairwise([perplexity(model, Block(segment=4, batch_size=64)), *lengths]):
        assert better < 1.005 * worse
    assert strides[-1] < 0.7 * strides[0]
    assert lengths[-1] == pytest.approx(perplexity(model, Sliding(window=13, stride=1, batch_size=64)), rel=1e-5)


def trained(model: Decoder, tokens: np.ndarray, *, segment: int, steps: int) -> Decoder:
    """The model, from the values that parameters usually start with, after so many steps of Adam on random windows."""
    graph, state = nnx.split(model)
    state, optimizer = jax.tree.map(lambda x: x / 3, state), optax.adam(0.003)

    @jax.jit
    def step(state: Any, moments: Any, inputs: Any, targets: Any) -> Any:
        gradient = jax.grad(lambda state: nnx.merge(graph, state).score(inputs, targets).nats.mean())(state)
        change, moments = optimizer.update(gradient, moments)
        return optax.apply_updates(state, change), moments

    moments, rng = optimizer.init(state), np.random.default_rng(2)
    for _ in range(steps):
        begins = rng.integers(0, tokens.size - segment, (32, 1))
        windows = tokens[begins + np.arange(segment + 1)].astype(np.int32)
        state, moments = step(state, moments, windows[:, :-1], windows[:, 1:])
    return nnx.merge(graph, state)
