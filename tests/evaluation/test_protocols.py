"""Which (context, target) pairs each protocol scores, against an oracle that goes token by token."""

import itertools
from typing import Any, ClassVar

import numpy as np
import pytest

from lra.errors import UserError
from lra.evaluation import Block, Carried, Protocol

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
            for read, target, weight in zip(batch.inputs[row], batch.targets[row], batch.weights[row], strict=True):
                if weight == 0:
                    continue
                context[row].append(int(read))
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
    taken = list(itertools.islice(Block(segment=7, batch_size=3).batches(tokens, start=-1), 2))
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
    assert Carried(streams=5, segment=7).describe() == (
        "carried, streams 5, segment 7, memory length the model's, batch size 5"
    )
    assert Carried(streams=5, segment=7, memory_length=13, batch_size=2).describe() == (
        "carried, streams 5, segment 7, memory length 13, batch size 2"
    )
