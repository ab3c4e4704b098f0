"""HuggingFace Longformer: self-attention of each layer, with its local and global projections."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import Attention, Site, Visibility, WindowGlobal
from tests.attention.parity.fixtures import close, close_gradient, load

LOCAL = ("query", "key", "value")
HEADS, WIDTH, EPSILON = 2, 16, 1e-12
WINDOWS = {"mlm": (8, 16), "mlm_noglobal": (6, 6), "cls": (8, 16)}  # half of it on each side
pytestmark = pytest.mark.usefixtures("quick_compilation")


def places(layer):
    """Where each weight of the program lies: (kernel, bias) by name."""
    named = {name: (getattr(layer, name).kernel, getattr(layer, name).bias) for name in LOCAL}
    pairs = zip(layer.pattern.kernels, layer.pattern.biases, strict=True)
    return named | {f"{name}_global": pair for name, pair in zip(LOCAL, pairs, strict=True)}


def attention(want, n, window):
    """Layer n's self-attention: everything before the output projection, which is the identity here."""
    pattern = functools.partial(
        WindowGlobal, window=window // 2 + 1, window_right=window // 2, max_globals=2, own_projections=True
    )
    site = Site(num_heads=HEADS, head_dim=WIDTH // HEADS, width=WIDTH, causal=False)
    layer = Attention(bias=True, pattern=pattern, site=site, rngs=nnx.Rngs(0))
    layer.output.kernel[...] = jnp.eye(WIDTH)
    for name, (kernel, bias) in places(layer).items():
        if f"weights/layer.{n}.{name}.weight" in want:
            kernel[...] = jnp.asarray(want[f"weights/layer.{n}.{name}.weight"].T.reshape(kernel.shape))
            bias[...] = jnp.asarray(want[f"weights/layer.{n}.{name}.bias"].reshape(bias.shape))
    return layer


def seen(want):
    mask = want["outputs/extended_attention_mask"]  # -1 padding, 0 local, 1 global
    return Visibility.tokens(valid=jnp.asarray(mask >= 0), marked=jnp.asarray(mask > 0))


@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.parametrize("n", [0, 1])
def test_self_attention(case, n):
    want = load(f"longformer_{case}")
    x = jnp.asarray(want[f"outputs/layer{n}/self_in"])
    attend = nnx.jit(lambda layer, x, visibility: layer(x, x.shape[1], visibility=visibility).out)
    out = attend(attention(want, n, WINDOWS[case][n]), x, seen(want))
    close(out, want[f"outputs/layer{n}/self_out"])
    padded = want["outputs/extended_attention_mask"] < 0
    assert padded.any()
    np.testing.assert_array_equal(np.asarray(out)[padded], 0)


def test_gradients_of_the_last_layer():
    """Through the rest of the classifier, which reads token 0, a global one: local projections get exactly 0."""
    want = load("longformer_cls")
    layer, x = attention(want, 1, 16), jnp.asarray(want["outputs/layer1/self_in"])
    weight = lambda name: jnp.asarray(want[f"weights/{name}"])  # noqa: E731

    def dense(x, name):
        return jnp.dot(x, weight(f"{name}.weight").T, precision="highest") + weight(f"{name}.bias")

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
        return x * weight(f"{name}.weight") + weight(f"{name}.bias")

    def loss(layer):
        out = layer(x, x.shape[1], visibility=seen(want)).out
        a = norm(x + dense(out, "layer.1.attention.output.dense"), "layer.1.attention.output.LayerNorm")
        wide = jax.nn.gelu(dense(a, "layer.1.intermediate.dense"), approximate=False)
        h = norm(a + dense(wide, "layer.1.output.dense"), "layer.1.output.LayerNorm")
        logits = dense(jnp.tanh(dense(h[:, 0], "classifier.dense")), "classifier.out_proj")
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(x)), want["inputs/labels"]])

    value, gradient = nnx.jit(nnx.value_and_grad(loss))(layer)
    close(value, want["outputs/loss"][0])
    for name in LOCAL:
        np.testing.assert_array_equal(gradient[name]["kernel"][...], 0)
        np.testing.assert_array_equal(gradient[name]["bias"][...], 0)
        np.testing.assert_array_equal(want[f"grads/layer.1.{name}.weight"], 0)
    pattern = gradient["pattern"]
    for i, name in enumerate(LOCAL):
        kernel, bias = pattern["kernels"][i][...], pattern["biases"][i][...]
        stored = want[f"grads/layer.1.{name}_global.weight"].T
        close_gradient(kernel.reshape(WIDTH, WIDTH), stored)
        scale = np.abs(stored).max()  # keys' biases shift all scores: their gradient is 0 up to rounding
        assert np.abs(np.asarray(bias).ravel() - want[f"grads/layer.1.{name}_global.bias"]).max() <= 5e-5 * scale
