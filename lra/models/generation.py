"""Generation: continues a text token by token, recomputing the last tokens at every step."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra.attention.precision import accumulator
from lra.attention.visibility import Array
from lra.errors import UserError
from lra.models.decoder import Decoder


def generate(
    model: Decoder,
    prompt_ids: Sequence[int] | np.ndarray,
    *,
    tokens: int,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    start: int,
) -> Iterator[int]:
    """Yields the ids that follow a prompt, one at a time. O(context) positions are computed for each.

    Memory starts empty at every token, so a token depends on the last `context` tokens and on nothing else.

    Args:
        model: the decoder.
        prompt_ids: the ids to continue; where there are none, the text begins after `start`.
        tokens: number of ids to generate.
        context: number of last tokens that are read; older ones are forgotten.
        temperature: divides the logits; 0 for the most likely id (greedy).
        top_k: draws from the k most likely ids only.
        top_p: draws from the most likely ids that together reach this probability only (after `top_k`).
        seed: the same seed gives the same text.
        start: the vocabulary's start id.

    Raises:
        UserError: a number out of range, or an id that the model does not know.
    """
    size = model.vocabulary_size
    _check("tokens", tokens, tokens >= 1, "at least 1")
    _check("context", context, context >= 1, "at least 1")
    positions = None if model.position is None else model.position.max_length
    if positions is not None:
        _check("context", context, context <= positions, f"at most {positions}, the number of the model's positions")
    _check("seed", seed, 0 <= seed < 2**32, "in [0, 2**32)")
    _check_sampling(temperature, top_k, top_p, size)
    ids = [int(token) for token in prompt_ids] or [start]
    for token in ids:
        _check("token id", token, 0 <= token < size, f"in [0, {size}): encode the text with the model's vocabulary")
    return _generate(model, ids, tokens, context, temperature, top_k, top_p, seed)


def _generate(
    model: Decoder,
    ids: list[int],
    tokens: int,
    context: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
) -> Iterator[int]:
    graph, state = nnx.split(model.fitted())
    model_key, sample_key = jax.random.split(jax.random.key(seed))
    for n in range(tokens):
        ids = ids[-context:]
        buffer = np.zeros((1, context), np.int32)
        buffer[0, : len(ids)] = ids
        logits = _next(graph, state, buffer, np.int32(len(ids)), model_key)
        key = jax.random.fold_in(sample_key, n)
        ids.append(int(sample(logits, key, temperature=temperature, top_k=top_k, top_p=top_p)))
        yield ids[-1]


@functools.partial(jax.jit, static_argnums=0)
def _next(graph: Any, state: Any, tokens: Array, count: Array, key: Array) -> Array:
    """Logits [V] after the first `count` of the tokens [1, T]; the others are padding."""
    model: Decoder = nnx.merge(graph, state)
    valid = jnp.arange(tokens.shape[1])[None] < count
    output = model.hidden(tokens, valid=valid, memory=model.initial_memory(1, train=False), key=key)
    return model.head.logits(output.x[:, count - 1], model.embedding)[0]  # of one position: V may be large


@functools.partial(jax.jit, static_argnames=("temperature", "top_k", "top_p"))
def sample(
    logits: Array, key: Array, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Array:
    """Draws an id from logits [..., V] (Holtzman et al. 2020, arXiv:1904.09751, section 3.1 for `top_p`).

    The order is temperature, `top_k`, `top_p` of what is left. Equal logits rank by id, so that `top_k=1` is greedy.

    Args:
        logits: [..., V]. key: random key.
        temperature: divides the logits; 0 for the most likely id.
        top_k: keeps the k most likely ids.
        top_p: keeps the most likely ids up to the one with which their probability reaches this; always at least one.

    Returns:
        [...] int32.

    Raises:
        UserError: a number out of range.
    """
    size = logits.shape[-1]
    _check_sampling(temperature, top_k, top_p, size)
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    ranked, order = jax.lax.top_k(logits.astype(accumulator(logits.dtype)), top_k or size)
    ranked = (ranked - ranked[..., :1]) / temperature  # the largest is 0: a small temperature cannot overflow
    if top_p is not None:
        weights = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(weights, axis=-1) - weights
        ranked = jnp.where((before < top_p) | (jnp.arange(ranked.shape[-1]) == 0), ranked, -jnp.inf)
    rank = jax.random.categorical(key, ranked, axis=-1)
    return jnp.take_along_axis(order, rank[..., None], axis=-1)[..., 0].astype(jnp.int32)


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None, size: int) -> None:
    _check("temperature", temperature, 0 <= temperature < float("inf"), "at least 0 and finite")
    if top_k is not None:
        _check("top_k", top_k, 1 <= top_k <= size, f"in [1, {size}], or left out to draw from all ids")
    if top_p is not None:
        _check("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1")


def _check(name: str, value: float, fits: bool, needed: str) -> None:
    if not fits:
        raise UserError(f"{name} is {value}, but must be {needed}")
