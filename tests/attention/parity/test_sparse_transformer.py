"""openai/sparse_attention: its dense reference, and what it asks of its block-sparse kernel."""

import functools

import numpy as np
import pytest
from flax import nnx

from lra.attention import Fixed, Site, SlidingWindow, Strided, dense, fixed, sliding_window, strided
from tests.attention.parity.fixtures import close, close_gradient, gradients, load

LENGTH, HEADS = 64, 2
DENSE = {
    "local_16": [(strided, Strided, {"stride": 16, "part": "local"}), (sliding_window, SlidingWindow, {"window": 16})],
    "strided_8": [(strided, Strided, {"stride": 8, "part": "column"})],
    "strided_16": [(strided, Strided, {"stride": 16, "part": "column"})],
}
BLOCK = {
    "local_ctx16_bs8": (Strided, {"stride": 16, "part": "local"}),
    "strided_ctx8_bs8": (Strided, {"stride": 8, "part": "column"}),
    "strided_ctx16_bs4": (Strided, {"stride": 16, "part": "column"}),
    "fixed_ctx32_bs8_v2x1": (Fixed, {"block": 32, "summary": 8, "groups": 2}),
    "fixed_ctx16_bs4_v1x2": (Fixed, {"block": 16, "summary": 8}),
}  # ctx: block or stride; bs: width of a sub-block; v2x1: two groups of heads, each with one sub-block
pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def stored():
    return load("sparse_attention")


def heads(x):
    return x.reshape(*x.shape[:2], HEADS, -1)


def visible(cls, arguments):
    pattern = cls(**arguments, site=Site(num_heads=HEADS), rngs=nnx.Rngs(0))
    return dense.visible(pattern, LENGTH, LENGTH)[0]


@pytest.mark.parametrize("name", DENSE)
def test_dense_reference(name):
    want = stored()
    q, k, v, cotangent = (heads(want[f"inputs/{x}"]) for x in ("q", "k", "v", "cotangent"))
    for function, cls, arguments in DENSE[name]:
        mask = want[f"outputs/dense_{name}/mask"]
        np.testing.assert_array_equal(visible(cls, arguments), np.broadcast_to(mask, (HEADS, LENGTH, LENGTH)))
        out, grads = gradients(functools.partial(function, **arguments), (q, k, v), cotangent)
        close(out, heads(want[f"outputs/dense_{name}/out"]))
        for x, got in zip("qkv", grads, strict=True):
            if f"grads/dense_{name}/{x}" in want:
                close_gradient(got, heads(want[f"grads/dense_{name}/{x}"]))


@pytest.mark.parametrize("name", BLOCK)
def test_block_sparse_masks(name):
    cls, arguments = BLOCK[name]
    np.testing.assert_array_equal(visible(cls, arguments), stored()[f"outputs/block_{name}/mask"])


@pytest.mark.parametrize("name", ["fixed_ctx32_bs8_v2x1", "fixed_ctx16_bs4_v1x2"])
def test_fixed_outputs(name):
    want = stored()
    q, k, v = (heads(want[f"inputs/{x}"]) for x in "qkv")
    close(fixed(q, k, v, **BLOCK[name][1]), heads(want[f"outputs/block_{name}/out"]))
