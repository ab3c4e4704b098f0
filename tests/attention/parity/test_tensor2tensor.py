"""tensorflow/tensor2tensor: masked local attention, and memory-compressed attention as released."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import Attention, MemoryCompressed, Site, Visibility, block_local
from tests.attention.parity.fixtures import close, close_gradient, gradients, load

LENGTH, HEADS, WIDTH = 30, 2, 16
LOCAL = {
    "masked_local_1d_block8": {"block": 8, "look_back": 1},
    "masked_local_1d_block10": {"block": 10, "look_back": 1},
    "masked_local_1d_block16": {"block": LENGTH},  # shorter than two blocks: a single one
    "within_block_1d_block8": {"block": 8},
}
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("name", LOCAL)
def test_local(name):
    want = load("tensor2tensor")
    q, k, v, cotangent = (want[f"inputs/{x}"].swapaxes(1, 2) for x in ("q", "k", "v", "cotangent"))
    out, grads = gradients(functools.partial(block_local, **LOCAL[name], scale=1.0), (q, k, v), cotangent)
    close(out, want[f"outputs/{name}/out"].swapaxes(1, 2), 2e-5)
    for x, got in zip("qkv", grads, strict=True):
        if f"grads/{name}/{x}" in want:
            close_gradient(got, want[f"grads/{name}/{x}"].swapaxes(1, 2), 1e-4)


def compressed(factor, want):
    """The layer with the program's weights, and where each weight and its gradient lie."""
    pattern = functools.partial(MemoryCompressed, rate=factor, convolve="inputs", empty="first", bias=True)
    site = Site(num_heads=HEADS, head_dim=WIDTH // HEADS, width=WIDTH)
    layer = Attention(pattern=pattern, site=site, rngs=nnx.Rngs(0))
    places = {
        "conv_elems_1d/conv2d/kernel": layer.pattern.kernels[0],
        "conv_elems_1d/conv2d/bias": layer.pattern.biases[0],
        "multihead_attention/q/kernel": layer.query.kernel,
        "multihead_attention/k/kernel": layer.key.kernel,
        "multihead_attention/v/kernel": layer.value.kernel,
        "multihead_attention/output_transform/kernel": layer.output.kernel,
    }
    for name, place in places.items():
        place[...] = jnp.asarray(want[f"weights/reduced_factor{factor}/{name}"].reshape(place.shape))
    return layer


@pytest.mark.parametrize("factor", [3, 4])
def test_memory_compressed(factor):
    """Slot m, whose last token is m * factor - 1, is visible from position m * factor on: all that is strictly past.

    Here a query's own token counts as past, so that queries stand one position earlier, but for the first one, which
    reads the prepended vector only.
    """
    want = load("tensor2tensor")
    layer = compressed(factor, want)
    index = np.arange(LENGTH, dtype=np.int32)[None]
    visibility = Visibility(q_position=np.maximum(index - 1, 0), k_position=index)

    def value(layer, x):
        out = layer(x, LENGTH, visibility=visibility).out
        return jnp.sum(out * want["inputs/x_cotangent"]), out

    both = nnx.jit(nnx.value_and_grad(value, argnums=(0, 1), has_aux=True))
    (_, out), (weights, x) = both(layer, jnp.asarray(want["inputs/x"]))
    close(out, want[f"outputs/reduced_factor{factor}/out"], 2e-5)
    close_gradient(x, want[f"grads/reduced_factor{factor}/x"], 1e-4)
    got = {
        "conv_elems_1d/conv2d/kernel": weights["pattern"]["kernels"][0],
        "conv_elems_1d/conv2d/bias": weights["pattern"]["biases"][0],
        "multihead_attention/q/kernel": weights["query"]["kernel"],
        "multihead_attention/k/kernel": weights["key"]["kernel"],
        "multihead_attention/v/kernel": weights["value"]["kernel"],
        "multihead_attention/output_transform/kernel": weights["output"]["kernel"],
    }
    for name, gradient in got.items():
        stored = want.get(f"grads/reduced_factor{factor}/{name}")
        if stored is not None:
            close_gradient(gradient[...], stored.reshape(gradient.shape), 1e-4)
    assert LENGTH % 4  # tokens that fill no slot
