"""The duplication task: what its examples are, what is scored, what it refuses."""

import numpy as np
import pytest

from lra.data import SPLITS, Duplication, Streams, Windows
from lra.errors import UserError


def make(**options) -> Duplication:
    return Duplication(**{"example": 14, "symbols": 5, "train": 40, "held_out": 7} | options)


def test_every_example_is_a_word_twice() -> None:
    corpus = make()
    for split, count in zip(SPLITS, (40, 7, 7), strict=True):
        halves = corpus.tokens(split).reshape(count, 2, 7)
        np.testing.assert_array_equal(halves[:, 0], halves[:, 1])
        np.testing.assert_array_equal(halves[:, :, 0], 0)
        words = halves[:, 0, 1:]
        assert set(np.unique(words)) == {1, 2, 3, 4, 5} if count > 7 else set(np.unique(words)) <= {1, 2, 3, 4, 5}
        assert len(np.unique(words, axis=0)) == count
        np.testing.assert_array_equal(corpus.scored(split).reshape(count, 2, 7), np.indices((count, 2, 7))[1] == 1)


def test_the_seed_makes_the_examples() -> None:
    assert make().digest == make().digest
    assert len({make(seed=seed).digest for seed in (0, 1)} | {make(symbols=6).digest}) == 3
    assert "0w0w with words of 6 of 5 symbols, second half scored, seed 0" in make().description
    text = [b"".join(text for _, text in make().documents(split)) for split in SPLITS]
    assert text[1] != text[2]
    large = list(make(example=1024, symbols=127, train=2500).documents("train"))
    assert [len(text) // 1024 for _, text in large] == [1024, 1024, 452]


@pytest.mark.parametrize("order", [Windows, Streams])
def test_batches_score_second_halves_and_hide_nothing(order) -> None:
    corpus = make()
    batches = order(batch_size=2, segment=14).batches(
        corpus.tokens("train"), start=10, seed=0, prefetch=0, scored=corpus.scored("train")
    )
    batch = next(batches)
    np.testing.assert_array_equal(batch.weights, np.tile([[0] * 7 + [1] * 7], (2, 1)))
    assert batch.valid.all()
    np.testing.assert_array_equal(batch.targets[:, :7], batch.targets[:, 7:])
    np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"example": 15}, "duplication.example is 15, but both halves 0w are equal: make it even"),
        ({"example": 2}, "duplication.example is 2, but must be at least 4"),
        ({"symbols": 256}, "duplication.symbols is 256, but must be at least 1 and at most 255"),
        ({"train": 0}, "duplication.train is 0, but must be at least 1"),
        ({"seed": -1}, "duplication.seed is -1, but must be at least 0"),
    ],
)
def test_mistakes(options, message) -> None:
    with pytest.raises(UserError, match=message):
        make(**options)
