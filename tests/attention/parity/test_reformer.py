"""Reformer attention of two released programs, whose first chunk of a round reads the last one of the round before."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra.attention import Visibility, block_local, hashing, lsh
from tests.attention.parity.fixtures import close, close_gradient, gradients, load
from tests.attention.parity.reformer import released

pytestmark = pytest.mark.usefixtures("quick_compilation")


LUCIDRAINS = {  # one bucket only, no key twice
    "causal": (False, False),
    "bidir": (False, False),
    "causal_nodup": (False, True),
    "causal_samebucket": (True, False),
    "bidir_strict": (True, True),
    "causal_perhead": (False, False),
}


@pytest.mark.parametrize("name", LUCIDRAINS)
def test_lucidrains(name):
    """Its keys have length 1, and its products another factor 1/sqrt(D)."""
    want = load("reformer_lucidrains")
    q, v, cotangent = (want[f"inputs/{x}"][:, :, None] for x in ("qk", "v", "cotangent"))  # rows are batch times head
    rotations = np.broadcast_to(want[f"inputs/{name}/rotations"], (2, 8, 2, 4))
    buckets = np.asarray(hashing.hashes(want["inputs/qk"].swapaxes(0, 1)[None], rotations, 8))  # [1, T, 2, rounds]
    np.testing.assert_array_equal(buckets[0].T.swapaxes(0, 1) + np.array([[0], [8]]), want[f"outputs/{name}/buckets"])
    buckets = buckets[0].swapaxes(0, 1)[:, :, None]
    within, once = LUCIDRAINS[name]
    attend = functools.partial(
        released, buckets=jnp.asarray(buckets), chunk=4, causal=name.startswith("causal"), scale=1 / 8,
        within=8 if within else None, once=once,
    )  # fmt: skip
    out, grads = gradients(attend, (q, v), cotangent)
    close(out[:, :, 0], want[f"outputs/{name}/out"])
    for x, got in zip(("qk", "v"), grads, strict=True):
        close_gradient(got[:, :, 0], want[f"grads/{name}/{x}"])


def test_lucidrains_strict_is_the_form_of_the_paper():
    """With the temperature bound, the public function itself."""
    want = load("reformer_lucidrains")
    q, v = (want[f"inputs/{x}"][:, :, None] for x in ("qk", "v"))
    buckets = want["outputs/bidir_strict/buckets"].transpose(0, 2, 1)[:, :, None] % 8
    out = lsh(q, q, v, chunk=4, buckets=8, rounds=2, causal=False, scale=1 / 8, selection=buckets)
    close(out[:, :, 0], want["outputs/bidir_strict/out"])


@pytest.mark.parametrize("name", ["full", "full_causal"])
def test_lucidrains_full(name):
    """Shared queries and keys without LSH: one chunk across all buckets."""
    want = load("reformer_lucidrains")
    q, v, cotangent = (want[f"inputs/{x}"][:, :, None] for x in ("qk", "v", "cotangent"))
    options = {"chunk": 32, "buckets": 2, "rounds": 1, "sets": "released", "causal": name == "full_causal"}
    out, grads = gradients(lambda q, v: lsh(q, q, v, **options, scale=1 / 8), (q, v), cotangent)
    close(out[:, :, 0], want[f"outputs/{name}/out"])
    for x, got in zip(("qk", "v"), grads, strict=True):
        close_gradient(got[:, :, 0], want[f"grads/{name}/{x}"])


def heads(x, want, name):
    """The projection of a HuggingFace layer, [B, T, H, D]."""
    y = np.einsum("btc,oc->bto", x.astype(np.float64), want[f"weights/{name}.weight"])
    return y.reshape(*x.shape[:2], 2, 8).astype(np.float32)


HUGGINGFACE = {"lm, layer 1": ("reformer_hf_lm", 1), "lm, layer 3": ("reformer_hf_lm", 3),
               "encoder, layer 0": ("reformer_hf_encoder", 0)}  # fmt: skip


@pytest.mark.parametrize("name", HUGGINGFACE)
def test_huggingface_lsh(name):
    file, layer = HUGGINGFACE[name]
    want, causal = load(file), file == "reformer_hf_lm"
    x = want[f"outputs/layer{layer}/self_attn_in"]
    q, v = (heads(x, want, f"layer{layer}.{part}") for part in ("query_key", "value"))
    buckets = np.asarray(hashing.hashes(q, want["inputs/random_rotations"], 8))
    valid = np.ones(x.shape[:2], bool) if causal else want["inputs/attention_mask"].astype(bool)
    stored = want[f"outputs/layer{layer}/buckets"].transpose(0, 3, 1, 2)
    extra = 8 if valid.all() else 9  # padding has a bucket of its own
    np.testing.assert_array_equal(buckets[valid], (stored % extra)[valid])
    visibility = None if causal else Visibility.tokens(valid=jnp.asarray(valid))
    attend = functools.partial(
        released, buckets=jnp.asarray(buckets), chunk=8, causal=causal, scale=8**-0.5, visibility=visibility
    )
    out = np.asarray(jax.jit(attend)(q, v)).reshape(x.shape)
    close(out[valid], want[f"outputs/layer{layer}/self_attn_out"][valid])


@pytest.mark.parametrize(("file", "layer"), [("reformer_hf_lm", 0), ("reformer_hf_encoder", 1)])
def test_huggingface_local(file, layer):
    """Chunks of 8 read the chunk before, and in encoders the one after: there the row is a ring."""
    want, causal = load(file), file == "reformer_hf_lm"
    x = want[f"outputs/layer{layer}/self_attn_in"]
    q, k, v = (heads(x, want, f"layer{layer}.{part}") for part in ("query", "key", "value"))
    visibility = None
    if not causal:
        ring = lambda y: np.concatenate([y[:, -8:], y, y[:, :8]], axis=1)  # noqa: E731
        q, k, v = ring(q), ring(k), ring(v)
        valid = ring(want["inputs/attention_mask"].astype(bool))
        visibility = Visibility.tokens(valid=jnp.asarray(valid))
    out = np.asarray(block_local(q, k, v, block=8, look_back=1, causal=causal, visibility=visibility))
    out = (out if causal else out[:, 8:-8]).reshape(x.shape)
    real = np.ones(x.shape[:2], bool) if causal else want["inputs/attention_mask"].astype(bool)
    close(out[real], want[f"outputs/layer{layer}/self_attn_out"][real])
