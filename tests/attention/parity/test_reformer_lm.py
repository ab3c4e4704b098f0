"""HuggingFace Reformer, the language model: reversible layers, axial positions, chunked feed-forward, both streams out.

Attention to buckets is `lsh` and what the program reads besides (`released`).
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import BlockLocal, Pattern, Promise, hashing
from lra.attention.full import FullRule
from lra.attention.pattern import Attended
from lra.models import AxialPositions, Decoder, FeedForward, Reversible, Softmax, parameters
from tests.attention.parity.fixtures import close, close_gradient, load
from tests.attention.parity.reformer import released

LENGTH, CHUNK, BUCKETS, EPSILON = 64, 8, 8, 1e-12
pytestmark = pytest.mark.usefixtures("quick_compilation")


class Released(Pattern):
    """Chunks of all rounds in one row, which wraps; everything in two chunks is read, as often as it is there."""

    projections = "shared_qk"
    promise = Promise(causal="selection")
    rule = FullRule(causal=True)

    def __init__(self, *, site, rngs):
        super().__init__(site)

    @classmethod
    def examples(cls):
        return ({},)

    def select(self, q, k, *, visibility=None, key=None, train=False):
        return hashing.hashes(k, jnp.asarray(load("reformer_lm")["inputs/random_rotations"]), BUCKETS)

    def __call__(self, q, k, v, *, selection=None, **_):
        return Attended(released(q, v, selection, chunk=CHUNK, causal=True, scale=q.shape[-1] ** -0.5))


def make():
    local = functools.partial(BlockLocal, block=CHUNK, look_back=1)
    model = Decoder(
        num_layers=4, width=16, num_heads=2, pattern=(local, Released),
        feed_forward=functools.partial(FeedForward, hidden=32, activation="relu", chunk=16), stack=Reversible,
        position=functools.partial(AxialPositions, shape=(8, 8), widths=(4, 12)),
        head=functools.partial(Softmax, tied=False, bias=True), vocabulary_size=32, rngs=nnx.Rngs(0),
    )  # fmt: skip
    for layer in model.stack.layers:
        layer.attention_norm.epsilon = layer.feed_forward_norm.epsilon = EPSILON
    model.stack.final_norm.epsilon = EPSILON
    return model


LAYER = {
    "attention_norm": "attention.layer_norm", "attention.query": "attention.self_attention.query",
    "attention.key": "attention.self_attention.key", "attention.value": "attention.self_attention.value",
    "attention.output": "attention.output.dense", "feed_forward_norm": "feed_forward.layer_norm",
    "feed_forward.inner": "feed_forward.dense.dense", "feed_forward.outer": "feed_forward.output.dense",
}  # fmt: skip
OTHERS = {
    "embedding.embedding": "word_embeddings.weight", "stack.final_norm.scale": "layer_norm.weight",
    "stack.final_norm.bias": "layer_norm.bias", "head.bias": "lm_head.bias",
    "head.projection": "lm_head.decoder.weight",
}  # fmt: skip


def theirs(want, kind, name):
    """The program's weights or gradients in place of the parameter of that name."""
    if stored := re.fullmatch(r"stack\.layers\.(\d)\.(.*)\.(kernel|scale|bias)", name):
        r, part, leaf = int(stored[1]), LAYER[stored[2]], "bias" if stored[3] == "bias" else "weight"
        if part.endswith("query") and r == 1:
            part += "_key"
        arrays = [want[f"{kind}/layer.{i}.{part}.{leaf}"] for i in (r, r + 2)]
        return np.stack([a.T if stored[3] == "kernel" else a for a in arrays])
    if table := re.fullmatch(r"position\.tables\.(\d)\.embedding", name):
        return want[f"{kind}/position_embeddings.weights.{table[1]}"].reshape(8, -1)
    array = want[f"{kind}/{OTHERS[name]}"]
    return array.T if name == "head.projection" else array


def test_language_model():
    """Logits, loss and the gradients of every parameter, through the custom backward pass."""
    want = load("reformer_lm")
    graph, state = nnx.split(make())
    names = parameters.named(state)
    values = [jnp.asarray(theirs(want, "weights", name)) for name in names]
    assert [x.shape for x in values] == [x.shape for x in names.values()]
    state = jax.tree.unflatten(jax.tree.structure(state), values)
    tokens = want["inputs/input_ids"]

    @jax.jit
    def run(state):
        def loss(state):
            scored = nnx.merge(graph, state).score(tokens, np.roll(tokens, -1, axis=1), train=True)
            return scored.nats[:, :-1].mean()

        return nnx.merge(graph, state)(tokens)[0], jax.value_and_grad(loss)(state)

    logits, (loss, gradients) = run(state)
    close(logits, want["outputs/logits"])
    close(loss[None], want["outputs/loss"])
    for name, gradient in parameters.named(gradients).items():
        close_gradient(gradient, theirs(want, "grads", name))
