"""Tiny models and a corpus in memory."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from lra.attention import Full, Recurrence
from lra.models import Decoder, Stack

SIZE = 11


class Vocabulary:
    name, size, start = "toy", SIZE, 3

    @property
    def description(self) -> str:
        return f"toy ({self.size} ids)"

    def num_bytes(self, tokens: np.ndarray) -> int:
        """Id n stands for n + 1 bytes."""
        return int(np.sum(tokens, dtype=np.int64)) + int(tokens.size)

    def num_characters(self, tokens: np.ndarray) -> int:
        """One, but for id 0, which goes on with the character before it."""
        return int(np.count_nonzero(tokens))


class Corpus:
    name, description, digest = "toy", "toy, digest 0123", "0123"

    def __init__(self, tokens: np.ndarray) -> None:
        self.vocabulary, self._tokens = Vocabulary(), tokens

    def tokens(self, split: str) -> np.ndarray:
        assert split == "test"
        return self._tokens

    def scored(self, split: str) -> None:
        return None

    def num_bytes(self, split: str, limit: int | None = None) -> int:
        return self.vocabulary.num_bytes(self.tokens(split)[:limit])

    def num_characters(self, split: str, limit: int | None = None) -> int:
        return self.vocabulary.num_characters(self.tokens(split)[:limit])

    def num_words(self, split: str) -> int | None:
        return 53


@pytest.fixture
def corpus(rng: np.random.Generator) -> Corpus:
    """101 tokens."""
    return Corpus(rng.integers(0, SIZE, 101).astype(np.uint8))


@pytest.fixture
def make_corpus() -> Callable[[np.ndarray], Corpus]:
    return Corpus


@functools.cache
def _model(memory: int | None, kind: type[Decoder], options: tuple[tuple[str, Any], ...]) -> Decoder:
    model = kind(
        num_heads=2,
        memory=None if memory is None else functools.partial(Recurrence, length=2, evaluation_length=memory),
        stack=functools.partial(Stack, scan=True),  # compiles one layer
        vocabulary_size=SIZE,
        rngs=nnx.Rngs(0),
        **{"num_layers": 2, "width": 8, "pattern": Full, **dict(options)},
    )
    # Wider parameters than those at the start, so that a token's context matters to its score.
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda x: 3 * x, state))


@pytest.fixture
def make_model() -> Callable[..., Decoder]:
    """`make_model(memory=None, kind=Decoder, **options)`."""

    def make(memory: int | None = None, kind: type[Decoder] = Decoder, **options: Any) -> Decoder:
        return _model(memory, kind, tuple(options.items()))

    return make
