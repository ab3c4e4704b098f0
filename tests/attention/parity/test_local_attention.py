"""lucidrains/local-attention: whole windows around a query's own, and exact windows."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from lra.attention import Visibility, block_local, sliding_window
from tests.attention.parity.fixtures import close, close_gradient, gradients, load

WINDOW = 8
VARIANTS = {
    "causal": functools.partial(block_local, block=WINDOW, look_back=1),
    "causal_back2": functools.partial(block_local, block=WINDOW, look_back=2),
    "causal_exact": functools.partial(sliding_window, window=WINDOW + 1),
    "causal_exact_back2": functools.partial(sliding_window, window=2 * WINDOW + 1),
    "bidir": functools.partial(block_local, block=WINDOW, look_back=1, causal=False),
    "bidir_exact": functools.partial(sliding_window, window=WINDOW + 1, window_right=WINDOW, causal=False),
    "causal_mask": functools.partial(block_local, block=WINDOW, look_back=1),
}
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("name", VARIANTS)
def test_outputs_and_gradients(name):
    want = load("local_attention")
    arrays = [want[f"inputs/{x}"].swapaxes(1, 2) for x in ("q", "k", "v", "cotangent")]
    length = arrays[0].shape[1]
    visibility = Visibility(k_valid=jnp.asarray(want["inputs/key_mask"])) if name == "causal_mask" else None
    added = -length % WINDOW if "bidir" in name else 0  # zero keys in the last window, which are read

    def attend(q, k, v):
        q, k, v = (jnp.pad(x, ((0, 0), (0, added), (0, 0), (0, 0))) for x in (q, k, v))
        return VARIANTS[name](q, k, v, visibility=visibility)[:, :length]

    out, grads = gradients(attend, arrays[:3], arrays[3])
    close(out, want[f"outputs/{name}/out"].swapaxes(1, 2))
    for x, got in zip("qkv", grads, strict=True):
        if f"grads/{name}/{x}" in want:
            close_gradient(got, want[f"grads/{name}/{x}"].swapaxes(1, 2))


def test_the_fixture_has_a_key_mask_and_an_odd_length():
    want = load("local_attention")
    assert not want["inputs/key_mask"].all()
    assert want["inputs/q"].shape[2] % WINDOW
    assert np.abs(want["outputs/causal/out"] - want["outputs/causal_mask/out"]).max() > 0.1
