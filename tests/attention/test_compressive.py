"""Compressive memory: the queues, what slots hold, who learns from which loss, where weights go, where slots stand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import (
    ALiBi,
    Attention,
    CompressiveMemory,
    Full,
    MemoryCompressed,
    ShawRelative,
    Site,
    SlidingWindow,
    Strided,
    Visibility,
    dense,
    draw,
)
from lra.attention.compressive import COMPRESSIONS, CompressiveState
from lra.attention.memory import Attending, Slots
from lra.models import Decoder, Stack
from tests.attention import oracle

pytestmark = pytest.mark.usefixtures("quick_compilation")
VOCABULARY, SEGMENT = 17, 6


def compressive(width=1, **options):
    return CompressiveMemory(
        **{"length": 6, "compressed_length": 6, "rate": 3, **options}, width=width, rngs=nnx.Rngs(0)
    )


def unlearned(compression, **options):
    return compressive(compression=compression, loss="none", **options)


def held(slots):
    return slots.hidden[0, :, 0][slots.valid[0]].tolist()


def test_the_queues_of_the_paper():
    """Its figure: segments of 3, memory of 6, compressed memory of 6, 3 to 1; a slot holds the mean of its numbers."""
    memory = unlearned("mean")
    state, queues = memory.initial(1, train=True), []
    for start in range(0, 30, 3):
        x = jnp.arange(start, start + 3, dtype=jnp.float32).reshape(1, 3, 1)
        state, losses, _ = memory.update(state, x, None, None, True)
        assert not losses
        queues.append((held(state.compressed), held(state.memory)))
    assert queues == [
        ([], [0, 1, 2]),
        ([], [0, 1, 2, 3, 4, 5]),
        ([1], [3, 4, 5, 6, 7, 8]),
        ([1, 4], [6, 7, 8, 9, 10, 11]),
        ([1, 4, 7], [9, 10, 11, 12, 13, 14]),
        ([1, 4, 7, 10], [12, 13, 14, 15, 16, 17]),
        ([1, 4, 7, 10, 13], [15, 16, 17, 18, 19, 20]),
        ([1, 4, 7, 10, 13, 16], [18, 19, 20, 21, 22, 23]),
        ([4, 7, 10, 13, 16, 19], [21, 22, 23, 24, 25, 26]),
        ([7, 10, 13, 16, 19, 22], [24, 25, 26, 27, 28, 29]),
    ]
    past = memory.read(state)
    assert past.inputs[0, :, 0].tolist() == [*queues[-1][0], *queues[-1][1]]
    assert (past.parts, past.positions) == ((("compressed", 6), ("memory", 6)), None)
    emptied = memory.reset(state, jnp.asarray([True]))
    assert (held(emptied.compressed), held(emptied.memory)) == ([], [])


def test_a_segment_longer_than_memory_is_compressed_in_part_at_once():
    memory = unlearned("max", length=2, compressed_length=3)
    state, _, _ = memory.update(memory.initial(1, train=True), jnp.arange(6.0).reshape(1, 6, 1), None, None, True)
    assert (held(state.compressed), held(state.memory)) == ([0, 3], [4, 5])  # 0 left with two empty slots


DRAWN = """\
full

segment 1, 0 of 3 compressed and 0 of 3 memory slots filled, all heads: 6 of 27 pairs, sparsity 0.778
      ┊      │██· ·
      ┊      │████·
      ┊      │██████

segment 2, 0 of 3 compressed and 3 of 3 memory slots filled, all heads: 15 of 27 pairs, sparsity 0.444
      ┊██████│██· ·
      ┊██████│████·
      ┊██████│██████

segment 3, 1 of 3 compressed and 3 of 3 memory slots filled, all heads: 18 of 27 pairs, sparsity 0.333
    ██┊██████│██· ·
    ██┊██████│████·
    ██┊██████│██████"""


@pytest.mark.parametrize("compression", ["convolution", "most_used"])
def test_both_memories_are_drawn_as_they_fill(compression):
    loss = "none" if compression == "most_used" else "auto_encoding"
    options = {"compression": compression, "loss": loss, "positions": "centre"}
    memory = compressive(width=4, length=3, compressed_length=3, **options)
    site = Site(num_heads=2, head_dim=2, width=4)
    drawings = draw.carried(Full(site=site, rngs=nnx.Rngs(0)), memory, length=3, segments=3)
    assert draw.text(drawings, "full") == DRAWN
    assert drawings[2].as_dict()["parts"] == {"compressed": 3, "memory": 3}


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_a_slot_holds(compression, rng):
    """By loops over slots, with empty ones in front, one within a group, and a row that is empty."""
    x = rng.normal(size=(3, 12, 4)).astype(np.float32)
    valid = np.ones((3, 12), bool)
    valid[0, :4] = valid[1] = valid[2, 7] = False
    memory = unlearned(compression, width=4)
    weights = rng.uniform(size=(3, 12)).astype(np.float32)
    got = memory.compress(Slots(jnp.asarray(np.where(valid[..., None], x, np.nan)), jnp.asarray(valid)), weights)
    full = np.where(valid[..., None], x, 0)
    if compression == "dilated_convolution":
        wide, kernel = np.zeros_like(full), np.asarray(memory.dilated.kernel).reshape(3, 4, 4)
        for t in range(12):
            for tap, at in enumerate((t - 2, t, t + 2)):
                wide[:, t] += full[:, at] @ kernel[tap] if 0 <= at < 12 else 0
        full = np.where(valid[..., None], np.maximum(wide, 0), 0)
    for row in range(3):
        if compression == "most_used":
            best = sorted(sorted(range(12), key=lambda i, row=row: (valid[row, i], weights[row, i]))[-4:])
            np.testing.assert_array_equal(got.valid[row], valid[row, best])
            np.testing.assert_array_equal(np.asarray(got.hidden)[row][valid[row, best]], x[row, best][valid[row, best]])
            continue
        for slot in range(4):
            group, there = full[row, 3 * slot : 3 * slot + 3], valid[row, 3 * slot : 3 * slot + 3]
            assert bool(got.valid[row, slot]) == there.any()
            if there.any():
                want = {
                    "mean": lambda group, there: group[there].mean(0),
                    "max": lambda group, there: group[there].max(0),
                }.get(compression, lambda group, there: group.ravel() @ np.asarray(memory.convolution.kernel))
                np.testing.assert_allclose(got.hidden[row, slot], want(group, there), rtol=1e-5, atol=1e-6)
            else:
                np.testing.assert_array_equal(got.hidden[row, slot], 0)


def make(terms=(), layers=1, stack=None, pattern=Full, **memory):
    return Decoder(
        num_layers=layers, width=8, num_heads=2, pattern=pattern, terms=terms,
        memory=functools.partial(CompressiveMemory, **{"length": 6, "compressed_length": 5, "rate": 3, **memory}),
        stack=functools.partial(Stack, **(stack or {"norm": "post"})), vocabulary_size=VOCABULARY, rngs=nnx.Rngs(3),
    )  # fmt: skip


def filled(model, rng, rows=2):
    """A state in training, all slots of which hold something."""
    fill = lambda x: np.ones_like(x) if x.dtype == bool else rng.normal(size=x.shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(lambda x: jnp.asarray(fill(x)), model.initial_memory(rows, True))


LEARNING = [
    ("convolution", "attention_reconstruction", {"convolution"}),
    ("dilated_convolution", "auto_encoding", {"convolution", "dilated", "decoder"}),
    ("convolution", "none", {"convolution"}),
    ("most_used", "none", set()),
]


@pytest.mark.parametrize(("compression", "loss", "parts"), LEARNING)
def test_which_loss_reaches_what(compression, loss, parts, rng):
    """Gradients of the language model's loss and of the compression's: one of them reaches the compression, alone."""
    model = make(compression=compression, loss=loss)
    graph, values = nnx.split(model, nnx.Param)
    memory, tokens = filled(model, rng), rng.integers(0, VOCABULARY, (2, SEGMENT)).astype(np.int32)

    @jax.jit
    def gradients(values, hidden):
        def losses(values, hidden):
            state = jax.tree.map(lambda x, h: x if h is None else h, memory, hidden, is_leaf=lambda x: x is None)
            scored = nnx.merge(graph, values).score(tokens, tokens, memory=state, train=True)
            return scored.nats.mean(), jnp.asarray(sum(scored.losses.values()), jnp.float32)

        values, pull = jax.vjp(losses, values, hidden)
        one, zero = jnp.ones((), jnp.float32), jnp.zeros((), jnp.float32)
        return values, pull((one, zero)), pull((zero, one))

    hidden = jax.tree.map(lambda x: None if x.dtype == bool else x, memory)
    (_, own_loss), (by_model, into_memory), (by_own, into_memory_too) = gradients(values, hidden)
    assert (float(own_loss) > 0) == (loss != "none")
    for gradient in jax.tree.leaves((into_memory, into_memory_too)):
        np.testing.assert_array_equal(gradient, 0)

    def reached(gradient):
        flat = jax.tree_util.tree_leaves_with_path(gradient)
        return {jax.tree_util.keystr(path) for path, x in flat if np.abs(np.asarray(x)).max() > 0}

    names = reached(jax.tree.map(jnp.ones_like, by_own))
    own = {name for name in names if "memory" in name}
    assert {part for part in ("convolution", "dilated", "decoder") if any(part in name for name in own)} == parts
    assert reached(by_own) == (set() if loss == "none" else own)
    assert reached(by_model) == (names if loss == "none" else names - own)


def test_losses_by_hand(rng):
    """Attention reconstruction and auto-encoding in float64, with a token that is padding and slots that are empty."""
    h, old = (rng.normal(size=(2, n, 4)).astype(np.float32) for n in (3, 3))
    kernels = rng.normal(size=(3, 4, 4)).astype(np.float32)

    def project(x):
        return tuple(jnp.einsum("blc,cd->bld", x, w, precision="highest").reshape(*x.shape[:2], 2, 2) for w in kernels)

    valid, there = np.array([[True, True, False]] * 2), np.array([[False, True, True], [False] * 3])
    for loss in ("attention_reconstruction", "auto_encoding"):
        memory = compressive(width=4, length=3, loss=loss)
        state = CompressiveState(Slots(jnp.asarray(old), jnp.asarray(there)), memory.initial(2, True).compressed)
        _, losses, _ = memory.update(state, jnp.asarray(h), jnp.asarray(valid), Attending(project, None), True)
        kept = np.where(there[..., None], old, 0)[0]  # the other row has lost nothing
        slot = kept.ravel().astype(np.float64) @ np.asarray(memory.convolution.kernel)
        if loss == "auto_encoding":
            want = (slot @ np.asarray(memory.decoder.kernel)).reshape(3, 4) - kept
            want = np.linalg.norm(want[there[0]], axis=-1).mean()
        else:
            q, k, v = (
                np.einsum("lc,cd->ld", x, w).reshape(-1, 2, 2) for x, w in zip((h[0], kept, kept), kernels, strict=True)
            )
            s = np.einsum("thd,shd->hts", q, k) / np.sqrt(2)
            p = np.exp(s) * there[0]
            read = np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), v)
            read = read - (slot @ kernels[2]).reshape(1, 2, 2)  # the one slot has all the weight
            want = np.linalg.norm(read.reshape(3, 4)[valid[0]], axis=-1).mean()
        np.testing.assert_allclose(losses[loss], want, rtol=1e-5)


def test_without_a_loss_what_left_memory_is_compressed_again(rng):
    """Once read, the slots are those that were stored, whatever part of memory the segment took."""
    for segment in (6, 3, 9):
        memory = compressive(width=4, loss="none")
        state = memory.initial(2, True)
        for _ in range(5):
            state, _, _ = memory.update(
                state, jnp.asarray(rng.normal(size=(2, segment, 4)), jnp.float32), None, None, True
            )
        past = memory.read(state)
        np.testing.assert_allclose(past.inputs[:, :6], state.compressed.hidden, rtol=1e-6)
        changed = state.evicted.hidden + 1
        other = memory.read(CompressiveState(state.memory, state.compressed, Slots(changed, state.evicted.valid)))
        moved = np.abs(np.asarray(other.inputs - past.inputs)).max((0, 2)) > 0
        np.testing.assert_array_equal(moved[:6], np.arange(6) >= 6 - min(segment, 6) // 3)
    assert memory.initial(2, False).evicted is None


@pytest.mark.parametrize(
    ("pattern", "term"), [(Full, ShawRelative), (functools.partial(SlidingWindow, window=8), ALiBi)]
)
def test_where_weights_go(pattern, term, rng):
    """Shares by part and weights by slot against dense attention, where a term adds to values too."""
    site = Site(num_heads=2, head_dim=4, width=8)
    options = {"max_distance": 5, "values": True} if term is ShawRelative else {}
    terms = (term(**options, num_heads=2, head_dim=4, num_layers=1, width=8, rngs=nnx.Rngs(1))().layer(0),)
    layer = Attention(pattern=pattern, site=site, memory=True, distances=True, rngs=nnx.Rngs(0))
    x = jnp.asarray(rng.normal(size=(2, 16, 8)), jnp.float32)
    there = np.ones((2, 11), bool)
    there[0, 2] = False
    valid = np.array([[True] * 5, [True] * 3 + [False] * 2])
    seen = Visibility.tokens(valid=jnp.asarray(valid)).after(jnp.asarray(there), 5)
    parts = (("compressed", 4), ("memory", 7))

    @nnx.jit
    def run(layer, x):
        out = layer(x, 5, visibility=seen, terms=terms, train=True, parts=parts)
        plain = layer(x, 5, visibility=seen, terms=terms)
        about = {"visibility": seen, "terms": terms, "span": None, "key": None, "selection": None}
        return out, plain, layer.received(x, 5, **about)

    out, plain, received = run(layer, x)
    assert oracle.error(out.out, plain.out) < 1e-6
    q, k, v = layer.project(x, 5)
    ready = tuple(each.within(0, 15) for each in terms)
    allowed = dense.visible(layer.pattern, 5, 16, seen)
    _, weights = dense.attend(q, k, v, allowed=allowed, terms=ready, visibility=seen)
    assert oracle.error(received, weights.mean((1, 2))) < 1e-6
    of_valid = np.asarray(weights.swapaxes(1, 2))[valid].mean((0, 1))
    shares = {"compressed": of_valid[:4], "memory": of_valid[4:11], "segment": of_valid[11:]}
    for name, share in shares.items():
        np.testing.assert_allclose(out.metrics[f"share/{name}"], share.sum(), rtol=1e-5)
    assert not plain.metrics


def test_slots_at_the_centres_of_what_they_hold():
    """Numbers of what memory holds, from the newest back: rate 3 and, the later of two in the middle, rate 2 and 4."""
    for rate, length in ((3, 6), (2, 4), (4, 4)):
        memory = compressive(rate=rate, length=length, compressed_length=2, positions="centre")
        slots = [[-length - rate * n + i for i in range(rate)] for n in (2, 1)]
        centres = [slot[rate // 2] for slot in slots]
        past = memory.read(memory.initial(1, True))
        assert past.positions == (*centres, *range(-length, 0))
        assert past.span == -centres[0]
        assert memory.gaps


def test_terms_read_the_centres(rng):
    """A decoder whose ALiBi counts from centres, against positions by hand in dense attention."""
    model = make((ALiBi,), stack={"norm": "post"}, positions="centre")
    memory, tokens = filled(model, rng), rng.integers(0, VOCABULARY, (2, 3)).astype(np.int32)
    layer, (state,) = model.stack.layers[0], memory
    graph, values = nnx.split(layer)
    layer = nnx.merge(graph, jax.tree.map(lambda x: x[0], values))
    state = jax.tree.map(lambda x: x[0], state)
    x = model.embedding.embedding[...][tokens]
    (out, _), told = layer(x, state, None, (model.terms[0](),), None, False), layer.memory.read(state)
    inputs = jnp.concatenate([told.inputs, x], axis=1)
    position = np.array([[-20, -17, -14, -11, -8, *range(-6, 3)]], np.int32)
    seen = Visibility(q_position=position[:, -3:], k_position=position)
    allowed = dense.visible(layer.attention.pattern, 3, 14, seen)
    q, k, v = layer.attention.project(inputs, 3)
    read, _ = dense.attend(q, k, v, allowed=allowed, terms=(model.terms[0](),), visibility=seen)
    y = layer.attention_norm(x + layer.attention.output(read.reshape(2, 3, 8)))
    assert oracle.error(out, layer.feed_forward_norm(y + layer.feed_forward(y, key=None, train=False))) < 1e-5


MOST_USED = pytest.param({"compression": "most_used", "loss": "none"}, marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [{"loss": "none"}, MOST_USED], ids=str)
def test_scan_and_rematerialisation_change_nothing(options, rng):
    """Two segments, with a row that begins anew before the second: scores, memory, metrics and gradients."""
    tokens = rng.integers(0, VOCABULARY, (2, 2 * SEGMENT)).astype(np.int32)

    def run(**stack):
        model = make((ALiBi,), 2, {"norm": "post", **stack}, **options)
        graph, values = nnx.split(model, nnx.Param)
        start = filled(model, np.random.default_rng(0))

        @jax.jit
        def gradient(values):
            def loss(values):
                model = nnx.merge(graph, values)
                first = model.score(tokens[:, :SEGMENT], tokens[:, :SEGMENT], memory=start, train=True)
                memory = model.reset_memory(first.memory, jnp.asarray([True, False]))
                second = model.score(tokens[:, SEGMENT:], tokens[:, SEGMENT:], memory=memory, train=True)
                return second.nats.mean(), (second.nats, second.memory, second.metrics)

            return jax.grad(loss, has_aux=True)(values)

        return gradient(values)

    want, got = run(), run(scan=True, remat="full")
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    (state,) = want[1][1]
    assert not state.compressed.valid[:, 0].any()  # of the row that began anew, one segment has been seen
    assert state.compressed.valid[:, 1].all()


def test_evaluation_has_its_own_sizes():
    model = make(evaluation_length=9, evaluation_compressed_length=4)
    for options, sizes in (((True,), (6, 5)), ((False,), (9, 4)), ((False, 3), (3, 4))):
        (state,) = model.initial_memory(2, *options)
        assert (state.memory.hidden.shape, state.compressed.valid.shape) == ((1, 2, sizes[0], 8), (1, 2, sizes[1]))
        memory = model.stack.layers[0].memory
        said = f"{sizes[0]} tokens of memory and {sizes[1]} compressed slots of 3 tokens"
        assert memory.describe(*options) == said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, r"CompressiveMemory\.length needs to be at least 1 .*@Recurrence.*got 0"),
        ({"compressed_length": 0}, r"compressed_length needs to be at least 1"),
        ({"evaluation_length": 0}, r"evaluation_length needs"),
        ({"evaluation_compressed_length": -1}, r"evaluation_compressed_length needs .*got -1"),
        ({"rate": 1}, r"rate needs to be at least 2 tokens a slot .*got 1"),
        ({"compression": "conv"}, r"compression needs to be one of 'mean', .*got 'conv'"),
        ({"loss": "bptt"}, r"loss needs to be one of 'none', .*got 'bptt'"),
        ({"positions": "middle"}, r"positions needs to be one of 'slot', 'centre', got 'middle'"),
        ({"compression": "mean"}, r"'mean' has no parameters .*loss = \"none\", or choose one of 'convolution'"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        compressive(**options)


def test_what_a_segment_or_a_pattern_cannot_do():
    memory = compressive()
    with pytest.raises(ValueError, match=r"rate is 3, which does not divide a segment of 4 tokens: choose a rate"):
        memory.update(memory.initial(1, True), jnp.zeros((1, 4, 1)), None, None, False)
    with pytest.raises(ValueError, match="Strided does not promise gaps"):
        make(pattern=functools.partial(Strided, stride=3), positions="centre")
    with pytest.raises(
        ValueError, match=r"CompressiveMemory asks for the weights .* MemoryCompressed reads values of its own"
    ):
        make(pattern=functools.partial(MemoryCompressed, rate=3), compression="most_used", loss="none")
