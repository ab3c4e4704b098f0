"""Memory-compressed attention: slots by hand, what is read before the first, and convolution of the inputs."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import Attention, Full, Heads, MemoryCompressed, Site, Visibility, dense, memory_compressed
from tests.attention import cases, oracle

pytestmark = pytest.mark.usefixtures("quick_compilation")

HEADS, WIDTH = 2, 3


def by_hand(q, k, v, rate, convolutions, first, causal, start=0, segment=None):
    """One row: a loop over queries and slots, float64. `start`: the first valid token."""
    length, heads, width = q.shape
    kernel = len(convolutions[0][0])
    slots = []  # last token, key, value
    if first:
        slots.append((start, k[start].ravel(), v[start].ravel()))
    for m in range(length):
        tokens = range(start + m * rate, start + m * rate + kernel)
        if tokens[-1] >= length or (segment is not None and len({segment[t] for t in tokens}) > 1):
            continue
        made = [
            sum(x[t].ravel() @ matrix[i] for i, t in enumerate(tokens)) + bias
            for x, (matrix, bias) in zip((k, v), convolutions, strict=True)
        ]
        slots.append((tokens[-1], *made))
    out = np.zeros(q.shape)
    for i in range(start, length):
        read = [s for s in slots if not causal or s[0] <= i]
        if segment is not None:
            read = [s for s in read if segment[s[0]] == segment[i]]
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            scores = np.array([q[i, h] @ key[part] for _, key, _ in read]) / np.sqrt(width)
            weights = np.exp(scores) / np.exp(scores).sum()
            out[i, h] = sum((w * value[part] for w, (_, _, value) in zip(weights, read, strict=True)), np.zeros(width))
    return out


def draw(rng, length, kernel):
    q, k, v = (cases.normal(rng, 2, length, HEADS, WIDTH) for _ in range(3))
    inner = HEADS * WIDTH
    convolutions = [(cases.normal(rng, kernel, inner, inner) * 0.4, cases.normal(rng, inner)) for _ in range(2)]
    return q, k, v, convolutions


def attend(q, k, v, rate, convolutions, **options):
    return memory_compressed(
        q, k, v, rate=rate, key_convolution=convolutions[0], value_convolution=convolutions[1], **options
    )


@pytest.mark.parametrize(
    ("length", "rate", "kernel"), [(13, 2, 5), (11, 4, 3), (5, 3, 7)], ids=["wider", "narrower", "no slot"]
)
@pytest.mark.parametrize(("empty", "causal"), [("nothing", True), ("first", False)])
def test_a_loop_over_slots(rng, length, rate, kernel, empty, causal):
    q, k, v, convolutions = draw(rng, length, kernel)
    out = attend(q, k, v, rate, convolutions, empty=empty, causal=causal)
    for row in range(2):
        want = by_hand(q[row], k[row], v[row], rate, convolutions, empty == "first", causal)
        assert oracle.error(out[row], want) < 1e-5


@pytest.mark.parametrize("empty", ["nothing", "first"])
def test_slots_count_from_the_first_valid_token(rng, empty):
    q, k, v, convolutions = draw(rng, 17, 3)
    starts = (5, 2)
    valid = np.arange(17)[None] >= np.array(starts)[:, None]
    q, k, v = (np.where(valid[..., None, None], x, np.nan).astype(np.float32) for x in (q, k, v))
    out = attend(q, k, v, 3, convolutions, empty=empty, visibility=Visibility.tokens(valid=jnp.asarray(valid)))
    for row, start in enumerate(starts):
        want = by_hand(q[row], k[row], v[row], 3, convolutions, empty == "first", True, start)
        assert oracle.error(out[row], want) < 1e-5


@pytest.mark.parametrize("causal", [True, False])
def test_no_slot_of_two_documents(rng, causal):
    """Slots 0-2, 3-5, ...; the second document starts at 8, in the middle of one, which nobody reads."""
    q, k, v, convolutions = draw(rng, 17, 3)
    segment = (np.arange(17) >= 8).astype(np.int32)
    visibility = Visibility.tokens(segment=jnp.asarray(segment[None]))
    out = attend(q, k, v, 3, convolutions, causal=causal, visibility=visibility)
    for row in range(2):
        want = by_hand(q[row], k[row], v[row], 3, convolutions, False, causal, segment=segment)
        assert oracle.error(out[row], want) < 1e-5
    grid = dense.reads(cases.build(MemoryCompressed, causal=causal, rate=3), 17, 17, visibility)[0, 0]
    assert not grid[:, 6:9].any()
    assert grid[16].nonzero()[0].tolist() == [*range(9, 15)]


def test_before_the_first_slot(rng):
    """Nothing, which is exactly 0, or the first token's value."""
    q, k, v, convolutions = draw(rng, 11, 4)
    nothing, first = (attend(q, k, v, 4, convolutions, empty=empty) for empty in ("nothing", "first"))
    np.testing.assert_array_equal(nothing[:, :3], 0)
    assert np.abs(nothing[:, 3:]).min() > 0
    assert oracle.error(first[:, :3], np.broadcast_to(v[:, :1], (2, 3, HEADS, WIDTH))) < 1e-6


def layer(kernel=3, convolve="projected", **arguments):
    pattern = functools.partial(MemoryCompressed, rate=3, kernel=kernel, convolve=convolve, **arguments)
    site = Site(num_heads=HEADS, head_dim=WIDTH, width=HEADS * WIDTH)
    return Attention(pattern=pattern, site=site, rngs=nnx.Rngs(0))


@nnx.jit
def forward(attention, x, visibility=None):
    return attention(x, x.shape[1], visibility=visibility).out


@pytest.mark.parametrize(("empty", "padded"), [("nothing", False), ("first", True)])
def test_convolving_inputs_equals_convolving_what_is_projected_where_they_commute(rng, empty, padded):
    """The same weight in all channels commutes with the projection."""
    weights = cases.normal(rng, 4)
    x = cases.normal(rng, 2, 14, HEADS * WIDTH)
    visibility = Visibility.tokens(valid=jnp.asarray(np.arange(14)[None] >= [[0], [4]])) if padded else None
    outs = []
    for convolve in ("projected", "inputs"):
        attention = layer(4, convolve, empty=empty)
        for kernel in attention.pattern.kernels:
            kernel[...] = jnp.asarray(weights[:, None, None] * np.eye(HEADS * WIDTH, dtype=np.float32))
        for name in ("query", "key", "value", "output"):
            getattr(attention, name).kernel[...] = jnp.asarray(
                np.random.default_rng(len(name)).normal(size=(6, 6)).astype(np.float32)
            )
        outs.append(forward(attention, x, visibility))
    assert len(layer(4, "inputs").pattern.kernels) == 1
    assert oracle.error(*outs) < 1e-6


@pytest.mark.parametrize("empty", ["nothing", "first"])
def test_convolving_inputs_reads_no_later_token(rng, empty):
    attention = layer(4, "inputs", empty=empty, bias=True)
    x = cases.normal(rng, 1, 14, HEADS * WIDTH)
    before = np.asarray(forward(attention, x))
    for t in (3, 6, 13):
        changed = x.copy()
        changed[:, t:] = rng.normal(size=changed[:, t:].shape)
        after = np.asarray(forward(attention, changed))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert np.abs(after - before).max() > 1e-3


def test_convolving_inputs_needs_them(rng):
    q, k, v, _ = draw(rng, 7, 3)
    pattern = MemoryCompressed(
        rate=3, convolve="inputs", site=Site(num_heads=HEADS, head_dim=WIDTH, width=6), rngs=nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match="needs the layer's inputs: call it through Attention"):
        pattern(q, k, v)


def test_heads_that_read_slots_have_no_grid_in_common_with_others():
    groups = ((1, functools.partial(MemoryCompressed, rate=3)), (2, Full))
    pattern = cases.build(Heads, groups=groups)
    with pytest.raises(ValueError, match=r"MemoryCompressed read entries of their own .*: ask each of Heads\.parts"):
        dense.visible(pattern, 7, 7)
    grid = dense.reads(pattern, 7, 7)[0]
    assert grid[0, 4].nonzero()[0].tolist() == [0, 1, 2]
    assert grid[1, 4].nonzero()[0].tolist() == [0, 1, 2, 3, 4]
