"""What models cost: the well-known figures of BERT-base, shapes counted by hand, and how patterns grow."""

import dataclasses
import functools
import io
import json
import math

import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from rich.console import Console

from lra.attention import (
    Attention,
    BlockLocal,
    Blockwise,
    Full,
    Heads,
    MemoryCompressed,
    Recurrence,
    Rotary,
    SlidingWindow,
    WindowGlobal,
)
from lra.errors import UserError
from lra.models import Decoder, FeedForward, LearnedPositions, Reversible, Softmax, Stack
from lra.models.cost import ATTENTION, PROJECTIONS, cost


def shapes(**options):
    sizes = {"num_layers": 2, "width": 24, "num_heads": 3, "pattern": Full, "vocabulary_size": 11}
    return nnx.eval_shape(lambda: Decoder(**sizes | options, rngs=nnx.Rngs(0)))


def bidirectional(pattern):
    """The pattern as an encoder has it."""
    return lambda *, site, rngs: pattern(site=dataclasses.replace(site, causal=False), rngs=rngs)


def bert(pattern=Full):
    """BERT-base: 12 layers, width 768, 12 heads of 64, 512 positions or more."""
    return shapes(
        num_layers=12, width=768, num_heads=12, vocabulary_size=30_522, pattern=bidirectional(pattern),
        attention=functools.partial(Attention, bias=True), feed_forward=functools.partial(FeedForward, hidden=3072),
        position=functools.partial(LearnedPositions, max_length=2048), stack=functools.partial(Stack, norm="post"),
    )  # fmt: skip


def test_bert_base():
    """Keys of 1.5 MiB and scores of 12 MiB a layer; 150 MB of scores for 12 layers."""
    counted = cost(bert(), length=512, batch=1)
    (layer,) = counted.layers
    assert layer.layers == tuple(range(12))
    assert layer.keys == 12 * 64 * 512 == 393_216 == 1.5 * 2**20 / 4
    assert layer.scores == layer.square == 12 * 512 * 512 == 3_145_728 == 12 * 2**20 / 4
    held = counted.bytes()
    assert held["as_run"]["scores"] == 0
    assert held["scores_stored"]["scores"] == held["square_stored"]["scores"] == 150_994_944
    # 12 layers of 4 C^2 + 8 C^2 multiply-adds a token, and T C each for scores and weighted sum.
    assert counted.by_rule[PROJECTIONS] == 2 * 12 * 4 * 768**2
    assert counted.by_rule["feed-forward"] == 2 * 12 * 8 * 768**2
    assert counted.by_rule[ATTENTION] == 2 * 12 * 2 * 512 * 768 == counted.as_run[ATTENTION]
    assert counted.by_rule["output head"] == 2 * 768 * 30_522
    assert counted.by_rule["embedding and others"] == 0
    layer_parameters = 4 * (768 * 768 + 768) + (768 * 3072 + 3072) + (3072 * 768 + 768) + 4 * 768
    assert held["as_run"]["model"] == 4 * (30_522 * 768 + 2048 * 768 + 12 * layer_parameters)


@pytest.mark.parametrize(("length", "about"), [(1024, 600e6), (2048, 2.4e9)])
def test_bert_base_at_greater_lengths(length, about):
    counted = cost(bert(), length=length, batch=1)
    scores = counted.bytes()["scores_stored"]["scores"]
    assert scores == 12 * 12 * length**2 * 4
    assert scores == pytest.approx(about, rel=0.01)
    assert counted.layers[0].growth == 2


@pytest.mark.parametrize(("blocks", "heads"), [(2, (10, 2)), (4, (9, 1, 1, 1))])
def test_blockwise_stores_an_nth_and_is_still_quadratic(blocks, heads):
    counted = cost(bert(functools.partial(Blockwise, blocks=blocks, heads=heads)), length=512, batch=1)
    (layer,) = counted.layers
    assert blocks * layer.scores == layer.square == 3_145_728
    assert layer.growth == 2
    held = counted.bytes()
    assert blocks * held["scores_stored"]["scores"] == held["square_stored"]["scores"]
    assert printed(counted) >= {f"{layer.scores:,}", "quadratic,"}


def test_slots_are_the_keys_of_memory_compressed_attention():
    groups = ((1, functools.partial(MemoryCompressed, rate=3)), (2, Full))
    (layer,) = cost(shapes(pattern=functools.partial(Heads, groups=groups)), length=31, batch=1).layers
    assert layer.keys == 8 * (10 + 2 * 31)
    assert layer.scores == sum((t + 1) // 3 for t in range(31)) + 2 * 31 * 32 // 2


def test_block_local_is_linear():
    counted = cost(bert(functools.partial(BlockLocal, block=128)), length=512, batch=1)
    (layer,) = counted.layers
    assert layer.scores == 12 * 512 * 128
    assert layer.growth == 1
    assert printed(counted) >= {f"{layer.scores:,}", "linear,"}


def printed(counted):
    """The words of the tables."""
    console = Console(width=300, file=io.StringIO())
    for table in counted.tables("model"):
        console.print(table)
    return set(console.file.getvalue().split())


def test_a_causal_model_has_half_of_the_square():
    (layer,) = cost(shapes(), length=101, batch=1).layers
    assert (layer.causal, layer.scores, layer.square) == (True, 3 * 101 * 102 // 2, 3 * 101 * 101)
    assert layer.growth == pytest.approx(2, abs=0.01)


def test_a_window_is_linear_and_a_square_root_is_neither():
    """`window` = 2 sqrt(T) has pairs ~ T^1.5 when the model is built anew for each length."""
    (layer,) = cost(shapes(pattern=functools.partial(SlidingWindow, window=7)), length=1009, batch=1).layers
    assert layer.scores == 3 * (1 + 2 + 3 + 4 + 5 + 6 + 1003 * 7)
    assert layer.growth == pytest.approx(1, abs=0.01)
    counts = [
        cost(shapes(pattern=functools.partial(SlidingWindow, window=2 * math.isqrt(n))), length=n, batch=1)
        for n in (1024, 4096)
    ]
    exponent = math.log(counts[1].layers[0].scores / counts[0].layers[0].scores, 4)
    assert exponent == pytest.approx(1.5, abs=0.02)
    work = [counted.as_run[ATTENTION] * counted.length for counted in counts]
    assert math.log(work[1] / work[0], 4) == pytest.approx(1.5, abs=0.15)


@pytest.mark.parametrize(
    ("pattern", "own"),
    [
        (functools.partial(WindowGlobal, window=5, global_positions=(0, 9)), 24 * 24 * (2 + 2 * 64)),
        (functools.partial(MemoryCompressed, rate=4), 2 * 16 * 4 * 24 * 24),
    ],
)
def test_what_a_pattern_projects_itself_counts_as_projections_by_rule_too(pattern, own):
    counted = cost(shapes(pattern=pattern), length=64, batch=1)
    for column in (counted.by_rule, counted.as_run):
        assert column[PROJECTIONS] * 64 == 2 * 2 * (4 * 64 * 24 * 24 + own)
    assert counted.by_rule[ATTENTION] <= counted.as_run[ATTENTION]


def test_layers_that_differ_have_rows_of_their_own():
    near = functools.partial(SlidingWindow, window=5)
    model = shapes(num_layers=4, pattern=(near, Full))
    counted = cost(model, length=64, batch=1)
    assert [(each.layers, each.pattern) for each in counted.layers] == [((0, 2), "SlidingWindow"), ((1, 3), "Full")]
    by_rule = sum(len(each.layers) * each.scores for each in counted.layers)
    assert counted.by_rule[ATTENTION] == 2 * 2 * 8 * by_rule / 64
    alone = [cost(shapes(num_layers=2, pattern=p), length=64, batch=1) for p in (near, Full)]
    assert counted.as_run[ATTENTION] == sum(each.as_run[ATTENTION] for each in alone)
    assert [each.flops for each in counted.layers] == [each.layers[0].flops for each in alone]


def test_parts_add_up():
    """Nothing is left over, with terms, heads that differ, memory and an output head of its own."""
    model = shapes(
        pattern=functools.partial(Heads, groups=((1, Full), (2, functools.partial(SlidingWindow, window=3)))),
        terms=(Rotary,), memory=functools.partial(Recurrence, length=13), vocabulary_size=29,
        head=functools.partial(Softmax, tied=False),
    )  # fmt: skip
    counted = cost(model, length=17, batch=5)
    (layer,) = counted.layers
    assert layer.keys == (17 + 13) * 24
    assert layer.square == 3 * 17 * 30
    assert layer.scores == (14 + 30) * 17 // 2 + 2 * 3 * 17  # full: 14 keys for the first query, 30 for the last
    assert counted.as_run["output head"] == 2 * 24 * 29
    assert counted.as_run["feed-forward"] == 2 * 2 * 8 * 24 * 24
    assert counted.as_run[PROJECTIONS] * 17 == 2 * 2 * 24 * 24 * (2 * 17 + 2 * 30)  # the memory is projected too
    assert counted.as_run["embedding and others"] == 0
    assert counted.held["carried memory"] >= 2 * 5 * 13 * 24 * 4


def test_recomputation_trades_operations_for_bytes():
    plain, recomputed = (
        cost(shapes(stack=functools.partial(Stack, remat=remat)), length=64, batch=3) for remat in ("none", "full")
    )
    assert plain.as_run == recomputed.as_run
    # The layers once more, but for the last product of each, which no gradient needs.
    run = plain.as_run
    again = run[ATTENTION] + run[PROJECTIONS] + run["feed-forward"] / 2
    assert recomputed.training - plain.training == again
    # A layer's input alone, and the random key of its dropout.
    assert 64 * 24 * 4 <= recomputed.layers[0].activations < 64 * 24 * 4 + 64
    assert plain.layers[0].activations > 10 * 64 * 24 * 4
    assert recomputed.held["activations"] < plain.held["activations"] / 3


def test_activations_grow_with_rows_and_layers():
    one, two = (cost(shapes(num_layers=n), length=32, batch=3).held["activations"] for n in (2, 4))
    (layer,) = cost(shapes(), length=32, batch=1).layers
    assert two - one == pytest.approx(2 * 3 * layer.activations, rel=0.02)


def test_bytes_of_the_optimizer():
    model = shapes()
    state = nnx.eval_shape(
        lambda: optax.adam(0.1).init(
            nnx.state(
                Decoder(num_layers=2, width=24, num_heads=3, pattern=Full, vocabulary_size=11, rngs=nnx.Rngs(0)),
                nnx.Param,
            )
        )
    )
    held = cost(model, length=8, batch=1, optimizer=state).held
    assert held["optimizer moments"] == 2 * held["model"] + jnp.int32(0).nbytes
    assert held["gradients"] == held["model"]


def test_json_holds_what_the_tables_say():
    counted = cost(shapes(), length=16, batch=2)
    shown = json.loads(json.dumps(counted.as_dict(), allow_nan=False))
    assert shown["flops_per_token"]["as_run"]["forward"] == sum(counted.as_run.values())
    assert shown["bytes"]["as_run"]["total"] == sum(counted.held.values())
    assert shown["bytes"]["square_stored"]["scores"] == 2 * 2 * 4 * 3 * 16 * 16
    assert shown["layers"][0]["scores"] == counted.layers[0].scores


@pytest.mark.parametrize(("length", "most"), [(0, 65_536), (65_537, 65_536), (8, 7)])
def test_lengths_that_cannot_be_counted(length, most):
    position = functools.partial(LearnedPositions, max_length=7) if most == 7 else None
    with pytest.raises(UserError, match=f"the length is {length}, but .* 1 to {most} tokens: change it"):
        cost(shapes(position=position), length=length, batch=1)


def test_reversible_layers_keep_nothing():
    """Neither of one layer nor, however many there are, of all."""
    counted = [
        cost(shapes(stack=Reversible, head=functools.partial(Softmax, tied=False), num_layers=n), length=64, batch=3)
        for n in (2, 8)
    ]
    assert [each.layers[0].activations for each in counted] == [0, 0]
    assert len({each.held["activations"] for each in counted}) == 1
    assert counted[0].layers[0].scores == cost(shapes(), length=64, batch=3).layers[0].scores
