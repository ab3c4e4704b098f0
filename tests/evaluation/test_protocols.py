"""Which (context, target) pairs each protocol scores, against an oracle that goes token by token."""

import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lra.errors import UserError
from lra.evaluation import Block, Carried, Protocol, Sliding

Pairs = dict[int, tuple[int, ...]]


def block_oracle(size: int, segment: int) -> Pairs:
    """Tokens are their own numbers; -1 stands before the first."""
    return {n: tuple(range(n - n % segment - 1, n)) for n in range(size)}


def carried_oracle(size: int, streams: int) -> Pairs:
    lengths = [0] * streams
    for n in range(size):
        lengths[n % streams] += 1
    pairs, n = {}, 0
    for length in lengths:
        first = n
        for n in range(first, first + length):
            pairs[n] = tuple(range(first - 1, n))
        n += 1
    return pairs


def sliding_oracle(size: int, window: int, stride: int) -> Pairs:
    """The first window that begins at a multiple of the stride and holds the token scores it."""
    begins = {n: next(begin for begin in range(0, n + 1, stride) if n < begin + window) for n in range(size)}
    return {n: tuple(range(begin - 1, n)) for n, begin in begins.items()}


def scored(protocol: Protocol, size: int) -> Pairs:
    """What the batches say: everything that a row has read since its last reset is the context."""
    pairs: Pairs = {}
    context: list[list[int]] = [[] for _ in range(protocol.batch_size)]
    for batch in protocol.batches(np.arange(size), start=-1):
        assert batch.inputs.shape == batch.targets.shape == batch.weights.shape
        assert batch.inputs.shape == (protocol.batch_size, protocol.segment)
        assert batch.reset.shape == (protocol.batch_size,)
        for row in range(protocol.batch_size):
            if batch.reset[row]:
                context[row] = []
            parts = (batch.inputs[row], batch.targets[row], batch.weights[row], batch.valid[row])
            for read, target, weight, valid in zip(*parts, strict=True):
                if not valid:
                    assert weight == 0
                    continue
                context[row].append(int(read))
                assert context[row][-1] == target - 1
                if weight == 0:
                    continue
                assert weight == 1
                assert int(target) not in pairs, "scored twice"
                pairs[int(target)] = tuple(context[row])
    return pairs


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
@pytest.mark.parametrize(("size", "segment"), [(101, 7), (35, 7), (5, 13), (1, 1), (29, 1)])
def test_block_pairs(size: int, segment: int, batch_size: int) -> None:
    assert scored(Block(segment=segment, batch_size=batch_size), size) == block_oracle(size, segment)


@pytest.mark.parametrize(("streams", "batch_size"), [(1, 1), (5, None), (5, 1), (5, 2), (5, 3), (7, 7)])
@pytest.mark.parametrize(("size", "segment"), [(101, 7), (35, 7), (36, 7), (11, 13), (7, 1)])
def test_carried_pairs(size: int, segment: int, streams: int, batch_size: int | None) -> None:
    protocol = Carried(streams=streams, segment=segment, batch_size=batch_size)
    assert scored(protocol, size) == carried_oracle(size, streams)


@given(st.integers(1, 67), st.integers(1, 17), st.integers(1, 17), st.integers(1, 5))
@settings(deadline=None, database=None)
def test_sliding_pairs(size: int, window: int, stride: int, batch_size: int) -> None:
    """Every token once, from as much context as is promised."""
    stride = min(stride, window)
    protocol = Sliding(window=window, stride=stride, batch_size=batch_size)
    pairs = scored(protocol, size)
    assert pairs == sliding_oracle(size, window, stride)
    assert {len(read) for n, read in pairs.items() if n >= window} <= set(range(window - stride + 1, window + 1))
    assert all(len(read) == n + 1 for n, read in pairs.items() if n < window)
    if stride == window:
        assert pairs == block_oracle(size, window)
        batches = zip(
            protocol.batches(np.arange(size), start=-1),
            Block(segment=window, batch_size=batch_size).batches(np.arange(size), start=-1),
            strict=True,
        )
        for sliding, block in batches:
            for one, other in zip(vars(sliding).values(), vars(block).values(), strict=True):
                assert (one == other).all()


@pytest.mark.parametrize("stride", [13, 7, 1, 5, 11])
def test_tokens_scored_for_any_stride(stride: int) -> None:
    """Of a text that no stride divides (U104)."""
    batches = Sliding(window=13, stride=stride, batch_size=3).batches(np.arange(101), start=-1)
    targets = np.concatenate([batch.targets[batch.weights > 0] for batch in batches])
    assert sorted(targets.tolist()) == list(range(101))


def test_tokens_that_the_corpus_does_not_score_are_read_by_sliding_windows() -> None:
    scored = np.arange(23) % 3 == 0
    batches = list(Sliding(window=7, stride=2, batch_size=3).batches(np.arange(23), start=-1, scored=scored))
    targets = np.concatenate([batch.targets[batch.weights > 0] for batch in batches])
    assert sorted(targets.tolist()) == list(range(0, 23, 3))
    assert sum(batch.valid.sum() for batch in batches) == 9 * 7  # windows that begin at 0, 2, ..., 16


@pytest.mark.parametrize("protocol", [Block(segment=7, batch_size=3), Carried(streams=5, segment=7, batch_size=3)])
def test_padding_stands_at_tails_of_weight_0(protocol: Protocol) -> None:
    batches = list(protocol.batches(np.arange(101), start=-1))
    assert sum(batch.weights.sum() for batch in batches) == 101
    for batch in batches:
        assert set(np.unique(batch.weights)) <= {0.0, 1.0}
        assert (np.diff(batch.weights, axis=1) <= 0).all()
        assert batch.reset.all() or not batch.reset.any()


def test_batches_are_made_when_asked_for() -> None:
    class Spy(np.ndarray):
        reads: ClassVar[list[Any]] = []

        def __getitem__(self, index: Any) -> Any:
            self.reads.append(index)
            return super().__getitem__(index)

    tokens = np.arange(10_007).view(Spy)
    for protocol in (Block(segment=7, batch_size=3), Sliding(window=7, stride=1, batch_size=3)):
        Spy.reads.clear()
        taken = list(itertools.islice(protocol.batches(tokens, start=-1), 2))
        assert len(taken) == 2
        assert 0 < len(Spy.reads) <= 2 * 2 * 3


def test_more_streams_than_tokens() -> None:
    with pytest.raises(UserError, match=r"Carried.streams is 13, but only 11 tokens"):
        next(Carried(streams=13, segment=7).batches(np.arange(11), start=-1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Block(segment=0), "Block.segment is 0"),
        (lambda: Block(segment=2.5), "Block.segment is 2.5"),
        (lambda: Block(segment=7, batch_size=-1), "Block.batch_size is -1"),
        (lambda: Sliding(window=0), "Sliding.window is 0"),
        (lambda: Sliding(window=7, stride=0), "Sliding.stride is 0"),
        (lambda: Sliding(window=7, stride=8), "Sliding.stride is 8, .* set it to at most 7, or raise Sliding.window"),
        (lambda: Sliding(window=7, stride=2, batch_size=0), "Sliding.batch_size is 0"),
        (lambda: Carried(streams=0, segment=7), "Carried.streams is 0"),
        (lambda: Carried(streams=True, segment=7), "Carried.streams is True"),
        (lambda: Carried(streams=1, segment=0), "Carried.segment is 0"),
        (lambda: Carried(streams=1, segment=7, memory_length=0), "Carried.memory_length is 0"),
        (lambda: Carried(streams=3, segment=7, batch_size=0), "Carried.batch_size is 0"),
        (lambda: Carried(streams=3, segment=7, batch_size=4), "at most 3"),
    ],
)
def test_ranges(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_descriptions_hold_every_number() -> None:
    assert Block(segment=7, batch_size=3).describe() == "block, segment 7, batch size 3"
    assert Sliding(window=7, stride=2, batch_size=3).describe() == "sliding, window 7, stride 2, batch size 3"
    assert [Sliding(window=window).stride for window in (256, 7, 3, 1)] == [64, 1, 1, 1]
    assert Carried(streams=5, segment=7).describe() == (
        "carried, streams 5, segment 7, memory length the model's, batch size 5"
    )
    assert Carried(streams=5, segment=7, memory_length=13, batch_size=2).describe() == (
        "carried, streams 5, segment 7, memory length 13, batch size 2"
    )
