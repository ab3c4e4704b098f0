import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lra.data
from lra.data import Batch, Batches, BatchIterator, Streams, Windows
from lra.errors import UserError

START = 10
BATCH, SEGMENT = 6, 7
TOKENS = np.random.default_rng(0).integers(0, 256, 331, np.uint8)  # 7 segments a stream, 47 windows
BOTH = pytest.mark.parametrize("order", [Streams(BATCH, SEGMENT), Windows(BATCH, SEGMENT)], ids=["streams", "windows"])


def reader(order: Batches, tokens: np.ndarray = TOKENS, **options: Any) -> BatchIterator:
    return order.batches(tokens, **{"start": START, "seed": 3, **options})


def take(batches: BatchIterator, count: int) -> list[Batch]:
    return list(itertools.islice(batches, count))


def same(left: list[Batch], right: list[Batch]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        for field in ("inputs", "targets", "weights", "reset"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field), strict=True)


def windows_of(batches: list[Batch]) -> list[int]:
    """The number in the corpus of each window, found by its content."""
    numbers = {TOKENS[n * SEGMENT : (n + 1) * SEGMENT].tobytes(): n for n in range(len(TOKENS) // SEGMENT)}
    return [numbers[row.astype(np.uint8).tobytes()] for batch in batches for row in batch.targets]


@BOTH
def test_shapes_and_types(order: Batches) -> None:
    for batch in take(reader(order), 9):
        for array, kind in ((batch.inputs, np.int32), (batch.targets, np.int32), (batch.weights, np.float32)):
            assert isinstance(array, np.ndarray)
            assert array.shape == (BATCH, SEGMENT)
            assert array.dtype == kind
        assert batch.reset.shape == (BATCH,)
        assert batch.reset.dtype == np.bool_
        assert (batch.weights == 1).all()


@BOTH
def test_inputs_are_the_tokens_before_the_targets(order: Batches) -> None:
    before = np.concatenate([[START], TOKENS])
    places = {TOKENS[n : n + SEGMENT].tobytes(): n for n in range(0, len(TOKENS) - SEGMENT, SEGMENT)}
    for batch in take(reader(order), 9):
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            n = places[targets.astype(np.uint8).tobytes()]
            np.testing.assert_array_equal(inputs, before[n : n + SEGMENT])


def test_streams_go_on_and_start_again() -> None:
    order = Streams(BATCH, SEGMENT)
    length = order.epoch_length(TOKENS)
    assert length == 7
    batches = take(reader(order), 2 * length + 1)
    whole = TOKENS[: BATCH * length * SEGMENT].reshape(BATCH, -1)
    for epoch in (batches[:length], batches[length : 2 * length]):
        np.testing.assert_array_equal(np.concatenate([batch.targets for batch in epoch], axis=1), whole)
    assert [batch.reset.tolist() for batch in batches] == [[n % length == 0] * BATCH for n in range(2 * length + 1)]
    assert batches[0].inputs[0, 0] == batches[length].inputs[0, 0] == START
    np.testing.assert_array_equal(batches[0].inputs[1:, 0], whole[:-1, -1])


STARTS = np.asarray([0, 70, 72, 86, 120])
"""Of documents of 10 segments, of 2 tokens, of 2 segments, of 4 and a part, and of 30 and a part."""


@pytest.mark.parametrize("hosts", [1, 2])
def test_documents_are_kept_apart(hosts: int) -> None:
    """Each begins a segment, anew and behind the start id; no segment holds tokens of two."""
    order = Streams(BATCH, SEGMENT, documents=True)
    length = order.epoch_length(TOKENS, STARTS)
    assert length == (10 + 1 + 2 + 5 + 31) // BATCH
    parts = [take(reader(order, documents=STARTS, host=host, hosts=hosts), 2 * length) for host in range(hosts)]
    ends, place = np.append(STARTS[1:], TOKENS.size), 0
    for row in range(BATCH):
        host, own = divmod(row, BATCH // hosts)
        for step in range(length):
            batch, again = parts[host][step], parts[host][length + step]
            end = min(place + SEGMENT, ends[ends > place][0])
            filled = np.arange(SEGMENT) < end - place
            np.testing.assert_array_equal(batch.valid[own], filled)
            np.testing.assert_array_equal(batch.weights[own], filled)
            np.testing.assert_array_equal(batch.targets[own][filled], TOKENS[place:end])
            np.testing.assert_array_equal(batch.inputs[own][filled][1:], TOKENS[place : end - 1])
            assert batch.inputs[own, 0] == (START if place in STARTS else TOKENS[place - 1])
            assert batch.reset[own] == (step == 0 or place in STARTS)
            np.testing.assert_array_equal(again.targets[own], batch.targets[own])
            place = end


@pytest.mark.parametrize("taken", [0, 3, 11])
def test_documents_continue(taken: int) -> None:
    order = Streams(BATCH, SEGMENT, documents=True)
    batches = reader(order, documents=STARTS)
    take(batches, taken)
    continued = reader(order, documents=STARTS)
    continued.set_state(json.loads(json.dumps(batches.get_state())))
    same(take(continued, 11), take(batches, 11))
    with pytest.raises(UserError, match="saved data position"):
        reader(order).set_state(batches.get_state())


def test_windows_cover_each_epoch_in_another_order() -> None:
    order = Windows(BATCH, SEGMENT)
    assert order.epoch_length(TOKENS) == 8
    count = len(TOKENS) // SEGMENT
    batches = take(reader(order), 24)
    assert all(batch.reset.all() for batch in batches)
    seen = windows_of(batches)
    epochs = [seen[n * count : (n + 1) * count] for n in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(count))
    assert len({tuple(epoch) for epoch in [*epochs, range(count)]}) == 4


def test_seed_orders_the_windows() -> None:
    order = Windows(BATCH, SEGMENT)
    same(take(reader(order), 9), take(reader(order), 9))
    assert windows_of(take(reader(order, seed=4), 9)) != windows_of(take(reader(order), 9))


@BOTH
@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("taken", [0, 1, 7, 8, 13])
def test_fresh_iterator_continues(order: Batches, prefetch: int, taken: int) -> None:
    batches = reader(order, prefetch=prefetch)
    take(batches, taken)
    state = json.loads(json.dumps(batches.get_state()))
    continued = reader(order, prefetch=2)
    take(continued, 3)  # what this one had read and prefetched must not show
    continued.set_state(state)
    assert continued.get_state() == state
    same(take(continued, 11), take(batches, 11))
    assert continued.get_state() == batches.get_state()


@BOTH
def test_fresh_process_continues(order: Batches, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", TOKENS)
    batches = reader(order)
    take(batches, 5)
    program = (
        "import json, sys, numpy as np, lra.data as data\n"
        f"order = data.{type(order).__name__}({BATCH}, {SEGMENT})\n"
        f"batches = order.batches(np.load(sys.argv[1], mmap_mode='r'), start={START}, seed=3)\n"
        "batches.set_state(json.loads(sys.argv[2]))\n"
        "print(json.dumps([next(batches).inputs.tolist() for _ in range(5)]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(lra.data.__file__).parents[2])}
    command = [sys.executable, "-c", program, str(tmp_path / "tokens.npy"), json.dumps(batches.get_state())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [batch.inputs.tolist() for batch in take(batches, 5)]


@BOTH
def test_state_is_small_json(order: Batches) -> None:
    tokens = np.zeros(1_000_003, np.uint8)
    batches = reader(order, tokens=tokens)
    take(batches, 3)
    assert len(json.dumps(batches.get_state())) < 500


@BOTH
@pytest.mark.parametrize(
    "other", [{"seed": 4}, {"tokens": TOKENS[:-1]}, {"order": Streams(3, SEGMENT)}, {"order": Windows(BATCH, 11)}]
)
def test_state_of_another_order_raises(order: Batches, other: dict[str, Any]) -> None:
    state = reader(order).get_state()
    with pytest.raises(UserError, match="saved data position"):
        reader(**{"order": order, **other}).set_state(state)


@pytest.mark.parametrize("hosts", [2, 3])
def test_hosts_split_the_batch(hosts: int) -> None:
    for order in (Streams(BATCH, SEGMENT), Windows(BATCH, SEGMENT)):
        whole = take(reader(order), 17)
        parts = [take(reader(order, host=host, hosts=hosts), 17) for host in range(hosts)]
        for field in ("inputs", "targets", "weights", "reset"):
            for n, batch in enumerate(whole):
                rows = [getattr(part[n], field) for part in parts]
                assert all(len(row) == BATCH // hosts for row in rows)
                # Streams keep their rows together; windows are dealt out in turn.
                joined = (
                    np.concatenate(rows)
                    if isinstance(order, Streams)
                    else np.stack(rows, 1).reshape(BATCH, *rows[0].shape[1:])
                )
                np.testing.assert_array_equal(joined, getattr(batch, field))


@BOTH
def test_other_hosts_continue(order: Batches) -> None:
    batches = reader(order)
    take(batches, 10)
    continued = reader(order, host=1, hosts=2)
    continued.set_state(batches.get_state())
    expected = reader(order, host=1, hosts=2)
    take(expected, 10)
    same(take(continued, 8), take(expected, 8))


def rows_of(parts: list[Batch], order: Batches) -> np.ndarray:
    """The targets of one step of all hosts, in the order of the whole batch."""
    rows = [part.targets for part in parts]
    return np.concatenate(rows) if isinstance(order, Streams) else np.stack(rows, 1).reshape(-1, SEGMENT)


@BOTH
@pytest.mark.parametrize(("before", "after"), [(6, 2), (1, 3), (2, 1)])
def test_a_run_that_goes_on_with_another_number_of_hosts_keeps_its_order(
    order: Batches, before: int, after: int
) -> None:
    """No row is read twice or left out, and every batch holds the rows that one host would have read."""
    whole = take(reader(order), 21)
    first = [reader(order, host=host, hosts=before) for host in range(before)]
    seen = [rows_of([next(part) for part in first], order) for _ in range(10)]
    states = [part.get_state() for part in first]
    assert all(state == states[0] for state in states), "any host's state stands for all"
    second = [reader(order, host=host, hosts=after) for host in range(after)]
    for part in second:
        part.set_state(states[0])
    seen += [rows_of([next(part) for part in second], order) for _ in range(11)]
    for rows, batch in zip(seen, whole, strict=True):
        np.testing.assert_array_equal(rows, batch.targets)


@BOTH
def test_hosts_read_disjoint_rows_that_make_an_epoch(order: Batches) -> None:
    """47 windows are 8 batches, the last of which begins the next epoch; 7 batches of streams are 42 segments."""
    parts = [take(reader(order, host=host, hosts=3), 7) for host in range(3)]
    owned = [windows_of(part) for part in parts]
    assert sum(map(len, owned)) == len(set().union(*owned)) == 42


@BOTH
def test_exactly_one_batch_of_tokens_is_enough(order: Batches) -> None:
    needed = BATCH * SEGMENT
    assert order.epoch_length(TOKENS[:needed]) == 1
    assert sorted(next(reader(order, tokens=TOKENS[:needed])).targets.ravel()) == sorted(TOKENS[:needed])
    for ask in (order.epoch_length, lambda tokens: reader(order, tokens=tokens)):
        with pytest.raises(UserError, match=r"41 tokens.*needs 42: lower"):
            ask(TOKENS[: needed - 1])


@BOTH
def test_bad_arguments_raise(order: Batches) -> None:
    for host, hosts in ((0, 4), (2, 2), (0, 0), (-1, 1)):
        with pytest.raises(UserError, match="multiple of the number of hosts"):
            reader(order, host=host, hosts=hosts)
    for seed in (-1, 2**32):
        with pytest.raises(UserError, match="seed"):
            reader(order, seed=seed)
    with pytest.raises(ValueError, match=r"\(1, 331\)"):
        reader(order, tokens=TOKENS[None])


@pytest.mark.parametrize("order", [Streams, Windows])
@pytest.mark.parametrize("sizes", [(0, 7), (3, -7), (3.0, 7), (3, "7")])
def test_bad_sizes_raise(order: type[Batches], sizes: tuple[int, int]) -> None:
    with pytest.raises(UserError, match="at least 1"):
        order(*sizes)
