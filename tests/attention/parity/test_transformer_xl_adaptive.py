"""Transformer-XL with adaptive input and softmax in three programs: models over segments, the last one's gradients.

kimiyoung/transformer-xl in PyTorch (widths that shrink by cluster, and equal ones) and in TensorFlow, and HuggingFace.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import Full, Recurrence, XLRelative
from lra.evaluation import Carried
from lra.models import AdaptiveEmbedding, AdaptiveSoftmax, Decoder, FeedForward, Stack, parameters
from tests.attention.parity.fixtures import close, close_gradient, load

LAYERS, WIDTH, HEADS, SEGMENT = 2, 16, 2, 12
SETTINGS = {
    "transformer_xl_adaptive": {"ids": 40, "cutoffs": (8, 16, 28), "div": 2, "memory": 16, "eval": (16, 10)},
    "transformer_xl_adaptive_div1": {"ids": 36, "cutoffs": (9, 20), "div": 1, "memory": 16},
    "transformer_xl_tf": {"ids": 40, "cutoffs": (8, 16, 28), "div": 2, "memory": 14, "start": "zeros", "eps": 1e-12},
    "transformer_xl_hf": {
        "ids": 40, "cutoffs": (8, 16, 28), "div": 2, "memory": 16, "start": "zeros", "eval": (16, 10),
    },
}  # fmt: skip


def by_our_name(name, want, kind):
    """Their weights or gradients ("weights", "grads") under our names and in our layouts."""
    translate = tensorflow if name.endswith("_tf") else torch
    found = translate({key.removeprefix(f"{kind}/"): x for key, x in want.items() if key.startswith(kind)}, name)
    stack = "stack.layers.0."
    queries, keys, values = np.split(found.pop("qkv"), 3, axis=-1)
    for part, x in zip(("query", "key", "value"), (queries, keys, values), strict=True):
        found[f"{stack}attention.{part}.kernel"] = x
    return {key.replace("layer.", stack, 1) if key.startswith("layer.") else key: x for key, x in found.items()}


def torch(x, name):
    """PyTorch's: kernels [outputs, inputs]; the original alone reads the entries of clusters from the end."""
    hf = name.endswith("_hf")
    x = {key.removeprefix("transformer."): a for key, a in x.items()}
    clusters = len(SETTINGS[name]["cutoffs"]) + 1
    order = slice(None) if hf else slice(None, None, -1)

    def layers(key, axes=None):
        a = np.stack([x[f"layers.{i}.{key}"] for i in range(LAYERS)])
        return a if axes is None else a.transpose(axes)

    found = {
        "qkv": layers("dec_attn.qkv_net.weight", (0, 2, 1)),
        "layer.attention.output.kernel": layers("dec_attn.o_net.weight", (0, 2, 1)),
        "layer.attention_norm.scale": layers("dec_attn.layer_norm.weight"),
        "layer.attention_norm.bias": layers("dec_attn.layer_norm.bias"),
        "layer.feed_forward.inner.kernel": layers("pos_ff.CoreNet.0.weight", (0, 2, 1)),
        "layer.feed_forward.inner.bias": layers("pos_ff.CoreNet.0.bias"),
        "layer.feed_forward.outer.kernel": layers("pos_ff.CoreNet.3.weight", (0, 2, 1)),
        "layer.feed_forward.outer.bias": layers("pos_ff.CoreNet.3.bias"),
        "layer.feed_forward_norm.scale": layers("pos_ff.layer_norm.weight"),
        "layer.feed_forward_norm.bias": layers("pos_ff.layer_norm.bias"),
        "terms.0.projection": layers("dec_attn.r_net.weight", (0, 2, 1)),
        "terms.0.content_bias": layers("dec_attn.r_w_bias") if hf else x["r_w_bias"],
        "terms.0.position_bias": layers("dec_attn.r_r_bias") if hf else x["r_r_bias"],
        "head.clusters": x["crit.cluster_weight"][order],
        "head.cluster_bias": x["crit.cluster_bias"][order],
        "head.bias": np.concatenate(
            [x[f"crit.out_layers.{i}.bias"] for i in range(clusters) if f"crit.out_layers.{i}.bias" in x]
        ),
    }
    if SETTINGS[name]["div"] == 1:
        tables = np.split(x["word_emb.emb_layers.0.weight"], SETTINGS[name]["cutoffs"])
        return found | {f"embedding.tables.{i}": table for i, table in enumerate(tables)}
    for i in range(clusters):
        found[f"embedding.tables.{i}"] = x[f"word_emb.emb_layers.{i}.weight"]
        found[f"embedding.projections.{i}"] = x[f"word_emb.emb_projs.{i}"].T
    return found | {"head.projections.0": x["crit.out_projs.0"]}


def tensorflow(x, name):
    """TensorFlow's: kernels [inputs, outputs]; an output projection is applied as it embeds, from its second axis."""
    x = {key.removeprefix("transformer/"): a for key, a in x.items()}
    clusters = len(SETTINGS[name]["cutoffs"]) + 1

    def layers(key):
        return np.stack([x[f"layer_{i}/{key}"] for i in range(LAYERS)])

    found = {
        "qkv": layers("rel_attn/qkv/kernel"),
        "layer.attention.output.kernel": layers("rel_attn/o/kernel"),
        "layer.attention_norm.scale": layers("rel_attn/LayerNorm/gamma"),
        "layer.attention_norm.bias": layers("rel_attn/LayerNorm/beta"),
        "layer.feed_forward.inner.kernel": layers("ff/layer_1/kernel"),
        "layer.feed_forward.inner.bias": layers("ff/layer_1/bias"),
        "layer.feed_forward.outer.kernel": layers("ff/layer_2/kernel"),
        "layer.feed_forward.outer.bias": layers("ff/layer_2/bias"),
        "layer.feed_forward_norm.scale": layers("ff/LayerNorm/gamma"),
        "layer.feed_forward_norm.bias": layers("ff/LayerNorm/beta"),
        "terms.0.projection": layers("rel_attn/r/kernel"),
        "terms.0.content_bias": x["r_w_bias"],
        "terms.0.position_bias": x["r_r_bias"],
        "head.clusters": x["adaptive_softmax/cutoff_0/cluster_W"],
        "head.cluster_bias": x["adaptive_softmax/cutoff_0/cluster_b"],
        "head.bias": np.concatenate([x[f"adaptive_softmax/cutoff_{i}/b"] for i in range(clusters)]),
        "head.projections.0": x["adaptive_softmax/cutoff_0/proj"].T,
    }
    for i in range(clusters):
        found[f"embedding.tables.{i}"] = x[f"adaptive_embed/cutoff_{i}/lookup_table"]
        found[f"embedding.projections.{i}"] = x[f"adaptive_embed/cutoff_{i}/proj_W"]
    return found


def make(name, want):
    """The model with their weights; norms have their epsilon, 1e-5 in PyTorch."""
    setting = SETTINGS[name]
    count = len(setting["cutoffs"]) + 1
    model = Decoder(
        num_layers=LAYERS, width=WIDTH, num_heads=HEADS, vocabulary_size=setting["ids"], pattern=Full,
        terms=(functools.partial(XLRelative, untie="start" in setting),), embedding_scale=True,
        memory=functools.partial(Recurrence, length=setting["memory"], start=setting.get("start", "empty")),
        embedding=functools.partial(AdaptiveEmbedding, cutoffs=setting["cutoffs"], div_value=setting["div"]),
        head=functools.partial(AdaptiveSoftmax, bias=True, tied_projections=(False,) + (True,) * (count - 1), chunk=7),
        feed_forward=functools.partial(FeedForward, hidden=32, activation="relu"),
        stack=functools.partial(Stack, norm="post"), rngs=nnx.Rngs(0),
    )  # fmt: skip
    for layer in model.stack.layers:
        layer.attention_norm.epsilon = layer.feed_forward_norm.epsilon = setting.get("eps", 1e-5)
    ours, theirs = parameters.named(nnx.state(model, nnx.Param)), by_our_name(name, want, "weights")
    assert set(ours) == set(theirs)
    state = jax.tree.unflatten(
        jax.tree.structure(nnx.state(model, nnx.Param)),
        [jnp.asarray(theirs[key].reshape(x.shape), jnp.float32) for key, x in ours.items()],
    )
    nnx.update(model, state)
    if "eval" in setting:  # same_length and clamp_len
        keys, clamp = setting["eval"]
        model = Carried(streams=2, segment=SEGMENT, attention_length=keys, clamp_length=clamp).adapt(model)
    return model


@pytest.mark.parametrize("name", SETTINGS)
def test_segments_and_gradients(name, quick_compilation):
    want = load(name)
    hf = name.endswith("_hf")
    graph, params, rest = nnx.split(make(name, want), nnx.Param, ...)
    if hf:  # a segment predicts its own tokens, all but the first
        data = want["inputs/input_ids"].astype(np.int32)
        target = np.concatenate([data[:, :, 1:], data[:, :, :1]], axis=2)
    else:
        data, target = (want[f"inputs/{x}"].swapaxes(1, 2) for x in ("data", "target"))

    @jax.jit
    def segment(params, memory, tokens, targets):
        def loss(params):
            model = nnx.merge(graph, params, rest)
            logits, output = model(tokens, memory=memory)
            nats = model.score(tokens, targets, memory=memory).nats
            return nats[:, : SEGMENT - hf].mean(), (nats, jax.nn.log_softmax(logits), output)

        (_, aux), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        return aux, gradient

    memory = nnx.merge(graph, params, rest).initial_memory(2, train=False)
    for i in range(len(data)):
        (nats, logits, output), gradient = segment(params, memory, jnp.asarray(data[i]), jnp.asarray(target[i]))
        memory = output.memory
        if hf:
            close(logits, want["outputs/log_probs"][i])
            chosen = np.take_along_axis(want["outputs/log_probs"][i], target[i][..., None], -1)[..., 0]
            close(nats, -chosen)
        else:
            close(nats.T, want["outputs/nll"][i])
    last = len(data) - 1
    if hf:
        close(output.x, want[f"outputs/last_hidden/seg{last}"])
    elif "outputs/hidden" in want:
        close(output.x.swapaxes(0, 1), want["outputs/hidden"][last])
    close(memory[0].hidden.transpose(0, 2, 1, 3), want[f"outputs/mems/seg{last}"][:LAYERS])
    theirs = by_our_name(name, want, "grads")
    for key, x in parameters.named(gradient).items():
        close_gradient(x, theirs[key].reshape(x.shape))
