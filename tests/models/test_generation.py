"""Generation against a plain loop of forward passes, and sampling against known distributions."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import ALiBi, Full, Recurrence
from lra.errors import UserError
from lra.models import Decoder, LearnedPositions, Softmax, Stack
from lra.models.generation import generate, sample

SIZE = 13


@functools.cache
def make_model(memory: bool = False, positions: int | None = None) -> Decoder:
    model = Decoder(
        num_layers=2,
        width=8,
        num_heads=2,
        pattern=Full,
        terms=() if positions else (ALiBi,),
        memory=functools.partial(Recurrence, length=5) if memory else None,
        position=functools.partial(LearnedPositions, max_length=positions) if positions else None,
        stack=functools.partial(Stack, scan=True),
        vocabulary_size=SIZE,
        rngs=nnx.Rngs(1),
    )
    # Wider parameters than those at the start, so that the text does not settle on one id.
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda x: 5 * x, state))


def ids(*prompt: int, model: Decoder | None = None, **options: Any) -> list[int]:
    return list(generate(model or make_model(), prompt, **{"start": 3, "tokens": 11, "context": 7, **options}))


@functools.partial(nnx.jit)
def forward(model: Decoder, tokens: Any) -> Any:
    return model(tokens, memory=model.initial_memory(1, train=False))[0][0, -1]


@pytest.mark.parametrize("options", [{}, {"memory": True}, {"positions": 7}], ids=str)
@pytest.mark.parametrize("prompt", [(), (5, 2), (1, 12, 3, 4, 5, 6)], ids=len)
def test_greedy_equals_forward_passes_without_padding(options: dict[str, Any], prompt: tuple[int, ...]) -> None:
    model = make_model(**options)
    text = list(prompt) or [3]
    for _ in range(11):
        text.append(int(np.argmax(forward(model, np.asarray([text[-4:]], np.int32)))))
    assert ids(*prompt, model=model, context=4, temperature=0) == text[-11:]
    assert len(set(text[-11:])) > 1


class Counts(Decoder):
    """Its hidden vectors are one where the number of valid tokens is."""

    def hidden(self, tokens: Any, *, valid: Any = None, **options: Any) -> Any:
        output = super().hidden(tokens, valid=valid, **options)
        return dataclasses.replace(output, x=output.x * 0 + jax.nn.one_hot(valid.sum(axis=1)[:, None], SIZE))


def test_padding_is_marked() -> None:
    """Strictly causal patterns would not notice; those that select by content may."""
    head = functools.partial(Softmax, tied=False)
    options = {"num_heads": 1, "pattern": Full, "head": head, "vocabulary_size": SIZE, "rngs": nnx.Rngs(0)}
    model = Counts(num_layers=1, width=SIZE, **options)
    model.head.projection[...] = jnp.eye(SIZE)
    assert ids(5, 2, model=model, temperature=0, context=5, tokens=6) == [2, 3, 4, 5, 5, 5]


def test_the_seed_decides() -> None:
    assert ids(5, seed=1) == ids(5, seed=1)
    assert ids(5, seed=1) != ids(5, seed=2)
    assert ids(5, seed=1)[:4] == ids(5, seed=1, tokens=4)
    assert ids(5, temperature=0, seed=1) == ids(5, temperature=0, seed=2)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-6}], ids=str)
def test_what_equals_greedy(options: dict[str, Any]) -> None:
    assert ids(5, **options) == ids(5, temperature=0)


def test_only_the_last_tokens_are_read() -> None:
    assert ids(1, 2, 3, 4, 5, 6, 7, context=5, temperature=0) == ids(3, 4, 5, 6, 7, context=5, temperature=0)
    long = [ids(first, 2, 3, 4, 5, 6, 7, 8, context=8, temperature=0) for first in range(SIZE)]
    assert len({tuple(text) for text in long}) > 1


def test_ids_come_one_at_a_time() -> None:
    stream = generate(make_model(), np.asarray([5, 2]), tokens=10**9, context=7, start=3)
    first = [next(stream) for _ in range(3)]
    assert first == ids(5, 2, tokens=3)
    assert all(type(token) is int for token in first)


def test_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter and longer than the context, one shape; logits of one position alone."""
    shapes = []

    def spy(kind: type, name: str) -> None:
        plain = getattr(kind, name)

        def call(self: Any, x: Any, *args: Any, **options: Any) -> Any:
            shapes.append(x.shape)
            return plain(self, x, *args, **options)

        monkeypatch.setattr(kind, name, call)

    spy(Decoder, "hidden")
    spy(Softmax, "logits")
    ids(5, context=6, tokens=17)
    ids(*range(9), context=6, temperature=0)
    assert shapes == [(1, 6), (1, 8)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"context": 0}, "context is 0"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 14}, r"top_k is 14, but must be in \[1, 13\]"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"seed": -1}, "seed is -1"),
    ],
    ids=str,
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(make_model(), [5], **{"start": 3, "tokens": 11, "context": 7, **options})


def test_no_more_context_than_positions() -> None:
    with pytest.raises(UserError, match="context is 8, but must be at most 7"):
        generate(make_model(positions=7), [5], tokens=11, context=8, start=3)


def test_ids_that_the_model_does_not_know() -> None:
    for prompt, start in (([5, 13], 3), ([-1], 3), ([], 13)):
        with pytest.raises(UserError, match=r"token id is (13|-1), but must be in \[0, 13\)"):
            generate(make_model(), prompt, tokens=1, context=7, start=start)


PROBABILITIES = np.asarray([0.08, 0.4, 0.02, 0.3, 0.2])


def frequencies(count: int = 40_000, probabilities: Any = PROBABILITIES, **options: Any) -> np.ndarray:
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(probabilities, jnp.float32)) + 7, (count, len(probabilities)))
    drawn = np.asarray(sample(logits, jax.random.key(5), **options))
    assert drawn.shape == (count,)
    return np.bincount(drawn, minlength=len(probabilities)) / count


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, PROBABILITIES**2),
        ({"temperature": 3.0}, PROBABILITIES ** (1 / 3)),
        ({"top_k": 3}, [0, 0.4, 0, 0.3, 0.2]),
        ({"top_k": 5}, PROBABILITIES),
        ({"top_p": 1.0}, PROBABILITIES),
        ({"top_p": 0.69}, [0, 0.4, 0, 0.3, 0]),
        ({"top_p": 0.71}, [0, 0.4, 0, 0.3, 0.2]),
        ({"top_p": 0.39}, [0, 1, 0, 0, 0]),
        # Of the two that top_k leaves, the first has 4/7: below 0.58 it needs the second one.
        ({"top_k": 2, "top_p": 0.58}, [0, 0.4, 0, 0.3, 0]),
        ({"top_k": 2, "top_p": 0.56}, [0, 1, 0, 0, 0]),
        # The temperature comes first: squared, 0.4 and 0.3 have 0.16 and 0.09 of 0.2968.
        ({"temperature": 0.5, "top_p": 0.53}, [0, 1, 0, 0, 0]),
        ({"temperature": 0.5, "top_p": 0.55}, [0, 0.16, 0, 0.09, 0]),
        ({"temperature": 0}, [0, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_frequencies(options: dict[str, Any], expected: Any) -> None:
    expected = np.asarray(expected) / np.sum(expected)
    found = frequencies(**options)
    deviation = np.sqrt(expected * (1 - expected) / 40_000)
    assert (np.abs(found - expected) <= 4 * deviation).all()


def test_equal_logits_rank_by_id() -> None:
    for options in ({"top_k": 1}, {"temperature": 0}, {"top_p": 1e-9}):
        assert frequencies(101, [0.2, 0.4, 0.4], **options).tolist() == [0, 1, 0]
    assert frequencies(4_001, [0.2, 0.4, 0.4], top_k=2).min() == 0


def test_impossible_ids_are_never_drawn() -> None:
    assert frequencies(4_001, [0.0, 0.5, 0.0, 0.5], temperature=100.0)[[0, 2]].tolist() == [0, 0]
