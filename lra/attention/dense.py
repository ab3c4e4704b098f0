"""The definition of every pattern, held as a T x S grid: the oracle of the tests and the source of the drawings."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lra.attention.core import Terms
from lra.attention.pattern import Pattern, aligned, default_scale
from lra.attention.visibility import Array, Entry, Visibility

_ROWS = 64
"""Queries whose pairs are counted together."""


def visible(
    pattern: Pattern, queries: int, keys: int, visibility: Visibility | None = None, key: Array | None = None
) -> np.ndarray:
    """Which keys each query reads, by the pattern's rule alone, on the host: booleans [B or 1, H, T, S].

    Args:
        pattern: an instance, for its rule, labels and number of heads.
        queries: T. keys: S >= T, the last T being the queries' own tokens.
        visibility: positions, validity, segments.
        key: random key of patterns whose labels need one.
    """
    visibility = visibility or Visibility()
    q_position, k_position = visibility.positions(queries, keys)
    q_labels, k_labels = pattern.labels(queries, keys, visibility, key)
    heads = np.arange(pattern.num_heads, dtype=np.int32)[None, :, None, None]

    def rows(x: Array) -> np.ndarray:
        return np.asarray(x)[:, None, :, None]

    def columns(x: Array) -> np.ndarray:
        return np.asarray(x)[:, None, None, :]

    q = Entry(rows(q_position), heads, {name: rows(x) for name, x in q_labels.items()})
    k = Entry(columns(k_position), heads, {name: columns(x) for name, x in k_labels.items()})
    allowed = np.asarray(pattern.rule(q, k))
    if visibility.q_valid is not None:
        allowed = allowed & rows(visibility.q_valid)
    if visibility.k_valid is not None:
        allowed = allowed & columns(visibility.k_valid)
    if visibility.q_segment is not None and visibility.k_segment is not None:
        allowed = allowed & (rows(visibility.q_segment) == columns(visibility.k_segment))
    return np.broadcast_to(allowed, (allowed.shape[0], pattern.num_heads, queries, keys))


def pairs(pattern: Pattern, queries: int, keys: int | None = None, key: Array | None = None) -> int:
    """How many pairs of a query and a key the rule allows, over all heads, never holding T x S of them.

    Args:
        pattern: an instance, for its rule, labels and number of heads.
        queries: T. keys: S >= T, the last T being the queries' own tokens; None for T.
        key: random key of patterns whose labels need one.
    """
    keys = queries if keys is None else keys
    q_position, k_position = Visibility().positions(queries, keys)
    q_labels, k_labels = pattern.labels(queries, keys, Visibility(), key)
    heads = np.arange(pattern.num_heads, dtype=np.int32)[None, :, None, None]

    k = Entry(k_position[0], heads, {name: jnp.asarray(x)[0] for name, x in k_labels.items()})

    def row(query: tuple[Array, Mapping[str, Array]]) -> Array:
        allowed = pattern.rule(Entry(query[0], heads, query[1]), k)
        equal = pattern.num_heads * keys // allowed.size  # heads that read the same are counted once
        return allowed.sum(dtype=jnp.int32) * equal

    @jax.jit
    def reads(position: Array, labels: Mapping[str, Array]) -> Array:
        return jax.lax.map(row, (position, labels), batch_size=_ROWS)

    rows = reads(jnp.asarray(q_position)[0], {name: jnp.asarray(x)[0] for name, x in q_labels.items()})
    return int(np.asarray(rows, np.int64).sum())


def attend(
    q: Array, k: Array, v: Array, *, allowed: Array, scale: float | None = None, terms: Terms = (),
    visibility: Visibility | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Softmax attention by a boolean grid, holding all scores: for small sizes only.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D]. v: [B, S, H, E].
        allowed: [B or 1, H, T, S].
        scale: None for 1/sqrt(D). terms: additions by position. visibility: for their positions.

    Returns:
        out [B, T, H, E] and weights [B, H, T, S], 0 where a query reads nothing.
    """
    scale = default_scale(scale, q.shape[-1])
    q, k, visibility = aligned(terms, q, k, visibility)
    q_position, k_position = visibility.positions(q.shape[1], k.shape[1])
    where = q_position[:, None, None], k_position[:, None, None]
    s = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") * scale
    for term in terms:
        extra = term.score(q.swapaxes(1, 2)[:, None], *where, scale)
        s = s if extra is None else s + extra.reshape(-1, *extra.shape[-3:])
    weights = jax.nn.softmax(s, axis=-1, where=allowed)
    weights = jnp.where(allowed, weights, 0)
    out = jnp.einsum("bhts,bshe->bthe", weights, v, precision="highest")
    for term in terms:
        extra = term.value(weights[:, None], *where)
        out = out if extra is None else out + extra[:, 0].swapaxes(1, 2)
    return out, weights
