"""The whole model of facebookresearch/adaptive-span, with its cache carried over three blocks.

The adapter: the cache starts as zeros that are read, norms have torch's epsilon, and the position table is stored
by column. Not reproduced: the released code multiplies soft weights m into the softmax's weights p and divides by
sum(m p) + 1e-8, so that ours are (1 + 1e-8 / sum(m p)) times as large, which the tolerance does not see here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import AdaptiveSpan, LearnedDistance, Recurrence, Site, Visibility, dense
from lra.attention.adaptive_span import log_weight
from lra.models import Decoder, FeedForward, Softmax, Stack
from tests.attention.parity.fixtures import close, close_gradient, load

CASES = {
    "adaptive_span": {"max_span": 32, "block": 12, "loss_coefficient": 0.002},
    "adaptive_span_trim": {"max_span": 192, "block": 16, "loss_coefficient": 0.0001},
}
RAMP, LAYERS, HEADS, WIDTH, VOCABULARY = 8, 2, 2, 16, 27
each_case = pytest.mark.parametrize("case", CASES)

PLACES = {  # of a layer's parameters: their name in the released code, whose matrices are transposed
    "attention.query.kernel": "attn.proj_query.weight",
    "attention.key.kernel": "attn.proj_key.weight",
    "attention.value.kernel": "attn.proj_val.weight",
    "attention.output.kernel": "attn.proj_out.weight",
    "attention.pattern.spans": "attn.attn.adaptive_span._mask.current_val",
    "attention_norm.scale": "norm1.weight",
    "attention_norm.bias": "norm1.bias",
    "feed_forward.inner.kernel": "ff.fc1.weight",
    "feed_forward.inner.bias": "ff.fc1.bias",
    "feed_forward.outer.kernel": "ff.fc2.weight",
    "feed_forward.outer.bias": "ff.fc2.bias",
    "feed_forward_norm.scale": "norm2.weight",
    "feed_forward_norm.bias": "norm2.bias",
}


def parameter(tree, path):
    return functools.reduce(lambda x, name: getattr(x, name), path.split("."), tree)


def by_distance(columns):
    """[S + 1, D] from [1, D, S], whose last column is of distance 1; no key has distance 0."""
    return np.concatenate([np.zeros_like(columns[0, :, :1]), columns[0, :, ::-1]], axis=1).T


def stacked(want, kind, name):
    """[L, ...], in the layout of the library."""
    each = [want[f"{kind}/layers.{n}.{name}"] for n in range(LAYERS)]
    return np.stack([x.ravel() if x.ndim == 3 else x.T for x in each])


@functools.cache
def loaded(case):
    want, options = load(case), dict(CASES[case])
    options.pop("block")
    model = Decoder(
        num_layers=LAYERS, width=WIDTH, num_heads=HEADS, vocabulary_size=VOCABULARY,
        pattern=functools.partial(AdaptiveSpan, **options, ramp=RAMP),
        feed_forward=functools.partial(FeedForward, hidden=32, activation="relu"),
        stack=functools.partial(Stack, norm="post", scan=True),
        head=functools.partial(Softmax, tied=False, bias=True),
        terms=(functools.partial(LearnedDistance, length=options["max_span"] + 1),),
        memory=functools.partial(Recurrence, length=options["max_span"]),
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    (layers,) = model.stack.layers
    layers.attention_norm.epsilon = layers.feed_forward_norm.epsilon = 1e-5
    for path, name in PLACES.items():
        value = parameter(layers, path)
        value[...] = jnp.asarray(stacked(want, "weights", name)).reshape(value.shape)
    model.terms[0].table[...] = jnp.asarray(by_distance(want["weights/key_pe"]))
    model.embedding.embedding[...] = jnp.asarray(want["weights/in_emb.weight"])
    model.head.projection[...] = jnp.asarray(want["weights/out_emb.weight"].T)
    model.head.bias[...] = jnp.asarray(want["weights/out_emb.bias"])
    return model.fitted(), want


@each_case
def test_three_blocks(case, quick_compilation):
    model, want = loaded(case)
    block, data = CASES[case]["block"], want["inputs/data"]
    memory = jax.tree.map(lambda x: jnp.ones_like(x) if x.dtype == bool else x, model.initial_memory(len(data), True))
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def step(parameters, tokens, targets, memory):
        def loss(parameters):
            model = nnx.merge(graph, parameters, rest)
            scored = model.score(tokens, targets, memory=memory, train=True)
            return scored.nats.mean() + sum(scored.losses.values()), (scored, model(tokens, memory=memory)[1].x)

        return jax.value_and_grad(loss, has_aux=True)(parameters)

    with jax.default_matmul_precision("highest"):
        for n in range(3):
            tokens, targets = (data[:, n * block + i : (n + 1) * block + i] for i in (0, 1))
            (_, (scored, hidden)), gradient = step(parameters, tokens, targets, memory)
            memory = scored.memory
            close(hidden, want["outputs/hidden"][n])
            close(scored.nats.mean(), want["outputs/nll"][n])
    close(scored.losses["span"], want["outputs/span_loss_per_layer"].sum())
    np.testing.assert_array_equal(scored.metrics["span_largest"], want["outputs/current_max_span"])
    np.testing.assert_array_equal(scored.metrics["span_average"], want["outputs/current_avg_span"])
    if case == "adaptive_span":
        for n in range(LAYERS):
            close(memory[0].hidden[n], want[f"outputs/cache_after/block2/layer{n}"])
    gradient = nnx.merge(graph, gradient, rest)
    (layers,) = gradient.stack.layers
    for path, name in PLACES.items():
        stored = stacked(want, "grads", name)
        for n in range(LAYERS):
            close_gradient(parameter(layers, path)[...][n].reshape(stored[n].shape), stored[n])
    close_gradient(gradient.terms[0].table[...], by_distance(want["grads/key_pe"]))
    close_gradient(gradient.embedding.embedding[...], want["grads/in_emb.weight"])
    close_gradient(gradient.head.projection[...], want["grads/out_emb.weight"].T)
    close_gradient(gradient.head.bias[...], want["grads/out_emb.bias"])


@each_case
def test_windows_are_what_is_left_after_trimming(case):
    """The released code drops keys by layer, in multiples of 64; layers that are stored together keep the longest."""
    model, want = loaded(case)
    size, spans = CASES[case]["max_span"], model.stack.layers[0].attention.pattern.spans[...]
    windows = []
    for z in spans:
        pattern = AdaptiveSpan(
            max_span=size, ramp=RAMP, loss_coefficient=0.0, initial=tuple(z.tolist()),
            site=Site(num_heads=HEADS), rngs=nnx.Rngs(0),
        )  # fmt: skip
        assert pattern.fit()
        windows.append(pattern.window)
    np.testing.assert_array_equal(windows, size - want["outputs/trim_len"])
    assert model.stack.layers[0].attention.pattern.window == max(windows)


def test_attention_of_the_first_layer():
    """By the dense definition, of the last block, where the layer's inputs are embeddings."""
    model, want = loaded("adaptive_span")
    block, size, data = 12, 32, want["inputs/data"]
    known = want["weights/in_emb.weight"][data[:, : 3 * block]]
    inputs = np.pad(known, ((0, 0), (size + block - known.shape[1], 0), (0, 0)))
    weight = lambda name: want[f"weights/layers.0.attn.proj_{name}.weight"].T  # noqa: E731
    q, k, v = (jnp.asarray((inputs @ weight(name)).reshape(2, -1, HEADS, 8)) for name in ("query", "key", "val"))
    graph, state = nnx.split(model.stack.layers[0].attention.pattern)
    pattern = nnx.merge(graph, jax.tree.map(lambda x: x[0], state))
    terms = (model.terms[0](), *pattern.own_terms)
    allowed = dense.visible(pattern, block, size + block, Visibility())
    _, weights = dense.attend(q[:, size:], k, v, allowed=jnp.asarray(allowed), terms=terms)
    for t in range(block):  # a row of the fixture starts `size` steps before its query
        close(weights[:, :, t, t : t + size], want["outputs/attn/block2/layer0"][:, :, t])


def test_soft_weights():
    want = load("adaptive_span")
    for z, weights in zip(want["inputs/mask_z"], want["outputs/mask_for_z"], strict=True):
        away = jnp.arange(31, -1, -1, dtype=jnp.int32)
        reached = np.asarray(away) < np.ceil(z * 32) + RAMP
        close(np.where(reached, np.exp(log_weight(jnp.asarray(z * 32), away, RAMP)), 0), weights)
