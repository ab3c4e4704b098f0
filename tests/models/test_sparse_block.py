"""The block of Child et al. (2019): initial values, activation, positions, residual connections."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import Attention, Full
from lra.models import Decoder, Embedding, FeedForward, GridPositions, Softmax, Stack, parameters
from lra.models.cost import cost
from tests.attention import oracle

LAYERS, WIDTH, HIDDEN, VOCABULARY, GRID = 5, 96, 4 * 96, 101, (67, 61)
POSITION = functools.partial(GridPositions, shape=GRID)


def paper(layers=LAYERS, width=WIDTH, position=POSITION, heads=4, vocabulary=VOCABULARY):
    """A decoder with the paper's block, in the words that a configuration binds."""
    return Decoder(
        num_layers=layers, width=width, num_heads=heads, pattern=Full, vocabulary_size=vocabulary, position=position,
        attention=functools.partial(Attention, kernel="fan_in_0.125", bias=True),
        feed_forward=functools.partial(FeedForward, activation="quick_gelu", kernel="fan_in_0.125"),
        head=functools.partial(Softmax, tied=False, kernel="zeros"),
        stack=functools.partial(Stack, norm="pre", remat="full"),
        embedding=functools.partial(Embedding, table="fan_out_0.125"), scale_residual=True, rngs=nnx.Rngs(11),
    )  # fmt: skip


def expected():
    """The standard deviation of each weight by name; every other leaf is constant."""
    residual = 1 / math.sqrt(2 * LAYERS)
    inputs = {name: 0.125 / math.sqrt(WIDTH) for name in ("query", "key", "value")}
    layer = {f"attention.{name}.kernel": std for name, std in inputs.items()} | {
        "attention.output.kernel": 0.125 / math.sqrt(WIDTH) * residual,
        "feed_forward.inner.kernel": 0.125 / math.sqrt(WIDTH),
        "feed_forward.outer.kernel": 0.125 / math.sqrt(HIDDEN) * residual,
    }
    return {f"stack.layers.0.{name}": std for name, std in layer.items()} | {
        "embedding.embedding": 0.125 / math.sqrt(WIDTH),
        "position.tables.0.embedding": 0.125 / math.sqrt(WIDTH * 2),
        "position.tables.1.embedding": 0.125 / math.sqrt(WIDTH * 2),
    }


def test_initial_values_have_the_papers_statistics():
    """Of n normal samples the standard deviation is known to 1/sqrt(2 n); five of these are allowed."""
    leaves = parameters.named(nnx.state(paper(), nnx.Param))
    want = expected()
    assert want.keys() <= leaves.keys()
    for name, leaf in leaves.items():
        x = np.asarray(leaf, np.float64)
        if name not in want:
            assert (x == (1.0 if name.endswith("scale") else 0.0)).all(), name
            continue
        assert x.size > 5000
        assert abs(x.std() / want[name] - 1) < 5 / math.sqrt(2 * x.size), name
        assert abs(x.mean()) < 5 * want[name] / math.sqrt(x.size), name
        # Normal and not cut off, as a truncated or uniform one would be: 0.27 % lie beyond three deviations.
        assert np.mean(np.abs(x) > 3 * want[name]) == pytest.approx(0.0027, abs=5 * math.sqrt(0.0027 / x.size)), name


def test_the_papers_number_of_parameters():
    """95M: enwik8, 30 layers of width 512 with 8 heads, positions in rows of 128 (its table 1)."""
    position = functools.partial(GridPositions, shape=(96, 128))
    model = nnx.eval_shape(lambda: paper(layers=30, width=512, position=position, heads=8, vocabulary=256))
    assert sum(parameters.count(nnx.state(model, nnx.Param)).values()) == 94_949_376


def test_layers_start_from_different_values():
    kernels = parameters.named(nnx.state(paper(), nnx.Param))["stack.layers.0.attention.output.kernel"]
    assert len({np.asarray(kernel).tobytes() for kernel in kernels}) == LAYERS


def test_only_what_writes_to_the_residual_stream_is_scaled():
    def states(scale):
        model = Decoder(
            num_layers=3, width=6, num_heads=3, pattern=Full, vocabulary_size=11, scale_residual=scale,
            rngs=nnx.Rngs(4),
        )  # fmt: skip
        return parameters.named(nnx.state(model, nnx.Param))

    plain, scaled = states(False), states(True)
    for name, x in plain.items():
        factor = 6**-0.5 if name.endswith(("output.kernel", "outer.kernel")) else 1.0
        np.testing.assert_allclose(scaled[name], np.asarray(x) * factor, rtol=1e-6, err_msg=name)


def test_a_new_model_gives_every_token_the_same_probability(rng):
    """The logit matrix is zero: log V nats a token."""
    x = rng.integers(0, VOCABULARY, (2, 13))
    nats = nnx.jit(lambda model: model.score(x, x[:, ::-1]).nats)(paper(layers=2, width=12))
    np.testing.assert_allclose(nats, math.log(VOCABULARY), rtol=1e-6)


def test_recomputation_saves_memory_once_compiled():
    """And by about what `lra cost` says is kept."""

    def bytes_of(remat):
        model = Decoder(
            num_layers=6, width=32, num_heads=2, pattern=Full, vocabulary_size=11, rngs=nnx.Rngs(0),
            stack=functools.partial(Stack, remat=remat, scan=True),
        )  # fmt: skip
        graph, state = nnx.split(model)
        x = jnp.zeros((1, 512), jnp.int32)
        loss = jax.grad(lambda state: nnx.merge(graph, state).score(x, x, train=True).nats.sum())
        kept = cost(model, length=512, batch=1).held["activations"]
        return jax.jit(loss).lower(state).compile().memory_analysis().temp_size_in_bytes, kept

    (plain, plain_kept), (saved, saved_kept) = bytes_of("none"), bytes_of("full")
    assert saved < plain / 2
    assert plain - saved == pytest.approx(plain_kept - saved_kept, rel=0.25)


def test_quick_gelu_equals_numpy(rng):
    layer = FeedForward(hidden=7, activation="quick_gelu", width=5, rngs=nnx.Rngs(3))
    graph, state = nnx.split(layer)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 2, x.dtype), state)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(state))
    x = rng.normal(size=(2, 3, 5)).astype(np.float32)
    hidden = x.astype(np.float64) @ p["inner"]["kernel"] + p["inner"]["bias"]
    hidden = hidden / (1 + np.exp(-1.702 * hidden))
    assert oracle.error(nnx.merge(graph, state)(x), hidden @ p["outer"]["kernel"] + p["outer"]["bias"]) < 1e-5


def test_the_block_is_the_papers(rng):
    """H + a + b with a = attention(norm(H)) and b = feed-forward(norm(H + a))."""
    graph, state = nnx.split(paper(layers=1, width=12))
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.7, x.dtype), state)
    model = nnx.merge(graph, state)
    x = rng.normal(size=(2, 7, 12)).astype(np.float32)
    layer = nnx.merge(
        *nnx.split(model.stack.layers[0])[:1], jax.tree.map(lambda a: a[0], nnx.state(model.stack.layers[0]))
    )
    a = layer.attention(layer.attention_norm(x), 7).out
    b = layer.feed_forward(layer.feed_forward_norm(x + a))
    assert oracle.error(model.stack(x).x, model.stack.final_norm(x + a + b)) < 1e-6


def test_positions_equal_a_table_written_by_hand(rng):
    """A picture of 2 x 3 points with 2 channels: position 7 is row 1, column 0, channel 1."""
    layer = GridPositions(shape=(2, 3, 2), width=5, rngs=nnx.Rngs(3))
    tables = [rng.normal(size=(size, 5)).astype(np.float32) for size in (2, 3, 2)]
    for embed, table in zip(layer.tables, tables, strict=True):
        embed.embedding[...] = jnp.asarray(table)
    points = [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1),
        (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (1, 2, 0), (1, 2, 1),
    ]  # fmt: skip
    want = [tables[0][row] + tables[1][column] + tables[2][channel] for row, column, channel in points]
    assert layer.max_length == 12
    assert oracle.error(layer(np.arange(12, dtype=np.int32)[None])[0], np.asarray(want)) < 1e-6
    assert oracle.error(layer(np.asarray([[7, 2]], np.int32))[0], np.asarray([want[7], want[2]])) < 1e-6


@pytest.mark.parametrize("shape", [(), (0, 3), (4, -1)])
def test_a_grid_needs_points(shape):
    with pytest.raises(ValueError, match=r"GridPositions.shape needs one axis or more, of at least 1 point each, got "):
        GridPositions(shape=shape, width=4, rngs=nnx.Rngs(0))


def test_more_tokens_than_points():
    model = paper(layers=1, width=12, position=functools.partial(GridPositions, shape=(2, 3)))
    with pytest.raises(ValueError, match=r"the model has 6 positions, got 7 tokens: raise GridPositions.shape"):
        model(np.zeros((1, 7), np.int32))
