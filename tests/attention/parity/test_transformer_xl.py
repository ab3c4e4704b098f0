"""kimiyoung/transformer-xl, PyTorch half: whole models over segments, and the last segment's gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import Full, Recurrence, XLRelative
from lra.evaluation import Carried
from lra.models import Decoder, FeedForward, Softmax, Stack
from tests.attention.parity.fixtures import close, close_gradient, load

LAYERS, WIDTH, HEADS, DIM, VOCABULARY = 2, 16, 2, 8, 29
MEMORY = {"transformer_xl": 16, "transformer_xl_prenorm": 8, "transformer_xl_eval": 20}


def named(model):
    """Each array of ours with the original's name: those of layer l are `layers.l.`, stacked here along the first axis.

    What the adapter alone knows: norms with epsilon 1e-5, and no norm after the last pre-norm layer.
    """
    (layer,), (term,) = model.stack.layers, model.terms
    attention, forward = layer.attention, layer.feed_forward
    by_layer = {
        "dec_attn.o_net.weight": attention.output.kernel,
        "dec_attn.r_net.weight": term.projection,
        "dec_attn.layer_norm.weight": layer.attention_norm.scale,
        "dec_attn.layer_norm.bias": layer.attention_norm.bias,
        "pos_ff.CoreNet.0.weight": forward.inner.kernel,
        "pos_ff.CoreNet.0.bias": forward.inner.bias,
        "pos_ff.CoreNet.3.weight": forward.outer.kernel,
        "pos_ff.CoreNet.3.bias": forward.outer.bias,
        "pos_ff.layer_norm.weight": layer.feed_forward_norm.scale,
        "pos_ff.layer_norm.bias": layer.feed_forward_norm.bias,
    }
    shared = {
        "word_emb.emb_layers.0.weight": model.embedding.embedding,
        "crit.out_layers.0.bias": model.head.bias,
        "r_w_bias": term.content_bias,
        "r_r_bias": term.position_bias,
    }
    return by_layer, shared, (attention.query.kernel, attention.key.kernel, attention.value.kernel)


def stacked(arrays, prefix, name):
    parts = np.stack([arrays[f"{prefix}/layers.{i}.{name}"] for i in range(LAYERS)])
    return parts.swapaxes(1, 2) if name.endswith("weight") and parts.ndim == 3 else parts


def make(name, want):
    model = Decoder(
        num_layers=LAYERS, width=WIDTH, num_heads=HEADS, vocabulary_size=VOCABULARY, pattern=Full, terms=(XLRelative,),
        memory=functools.partial(Recurrence, length=MEMORY[name]), embedding_scale=True,
        feed_forward=functools.partial(FeedForward, hidden=32, activation="relu"),
        head=functools.partial(Softmax, bias=True),
        stack=functools.partial(Stack, norm="pre" if "prenorm" in name else "post"), rngs=nnx.Rngs(0),
    )  # fmt: skip
    model.stack.final_norm = None
    for layer in model.stack.layers:
        layer.attention_norm.epsilon = layer.feed_forward_norm.epsilon = 1e-5
    by_layer, shared, fused = named(model)
    for key, x in by_layer.items():
        x[...] = jnp.asarray(stacked(want, "weights", key).reshape(x.shape))
    for key, x in shared.items():
        x[...] = jnp.asarray(want[f"weights/{key}"].reshape(x.shape))
    for x, part in zip(fused, np.split(stacked(want, "weights", "dec_attn.qkv_net.weight"), 3, axis=-1), strict=True):
        x[...] = jnp.asarray(part)
    if name.endswith("eval"):
        options = {"memory_length": 20, "attention_length": 20, "clamp_length": 9}
        model = Carried(streams=2, segment=8, **options).adapt(model)
    return model


@pytest.mark.parametrize("name", MEMORY)
def test_segments_and_gradients(name, quick_compilation):
    want = load(name)
    model = make(name, want)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    data, target = (jnp.asarray(want[f"inputs/{x}"].swapaxes(1, 2)) for x in ("data", "target"))

    @jax.jit
    def segment(params, memory, tokens, targets):
        def loss(params):
            model = nnx.merge(graph, params, rest)
            _, output = model(tokens, memory=memory)
            scored = model.score(tokens, targets, memory=memory)
            return scored.nats.mean(), (scored.nats, output)

        (_, aux), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        return aux, gradient

    memory = model.initial_memory(2, train=False)
    for i in range(len(data)):
        (nats, output), gradient = segment(params, memory, data[i], target[i])
        memory = output.memory
        close(nats.T, want["outputs/nll"][i])
        close(output.x.swapaxes(0, 1), want["outputs/hidden"][i])
    mems = want[f"outputs/mems/seg{len(data) - 1}"]  # the last entry, of the stack's output, is never read
    close(memory[0].hidden.transpose(0, 2, 1, 3), mems[:-1])
    by_layer, shared, fused = named(nnx.merge(graph, gradient, rest))
    for key, x in by_layer.items():
        close_gradient(x[...], stacked(want, "grads", key).reshape(x.shape))
    for key, x in shared.items():
        close_gradient(x[...], want[f"grads/{key}"].reshape(x.shape))
    for x, part in zip(fused, np.split(stacked(want, "grads", "dec_attn.qkv_net.weight"), 3, axis=-1), strict=True):
        close_gradient(x[...], part)
