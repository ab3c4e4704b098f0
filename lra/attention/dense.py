"""The definition of every pattern, held as a T x S grid: the oracle of the tests and the source of the drawings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra.attention.core import Rule, Terms
from lra.attention.pattern import Pattern, aligned, default_scale
from lra.attention.visibility import Array, Entry, Visibility

_ROWS = 64
"""Queries whose pairs are counted together."""


def visible(
    pattern: Pattern, queries: int, keys: int, visibility: Visibility | None = None, selection: Any = None
) -> np.ndarray:
    """Which entries each query reads, by the pattern's rule alone, on the host: booleans [B or 1, H, T, S'].

    The entries are the keys themselves, S' = S, but for patterns that summarise them.

    Args:
        pattern: an instance, for its rule, labels and number of heads.
        queries: T. keys: S >= T, the last T being the queries' own tokens.
        visibility: positions, validity, segments.
        selection: the pattern's `select` of some queries and keys, for patterns that depend on content.
    """
    return _grid(pattern, pattern.rule, queries, keys, visibility or Visibility(), selection)


def sets(
    pattern: Pattern, queries: int, keys: int, visibility: Visibility | None = None, selection: Any = None
) -> list[np.ndarray]:
    """The same for each of the pattern's `rules`."""
    return [_grid(pattern, rule, queries, keys, visibility or Visibility(), selection) for rule in pattern.rules]


def _grid(pattern: Pattern, rule: Rule, queries: int, keys: int, visibility: Visibility, selection: Any) -> np.ndarray:
    asking, known = pattern.entries(queries, keys, visibility, selection)
    heads = np.arange(pattern.num_heads, dtype=np.int32)[None, :, None, None]

    def by_head(x: Array) -> np.ndarray:
        """[B or 1, L] or [B or 1, L, H] to [B or 1, 1 or H, L]."""
        x = np.asarray(x)
        return x[:, None] if x.ndim == 2 else x.swapaxes(1, 2)

    def rows(x: Array) -> np.ndarray:
        return by_head(x)[..., :, None]

    def columns(x: Array) -> np.ndarray:
        return by_head(x)[..., None, :]

    q = Entry(rows(asking.position), heads, {name: rows(x) for name, x in asking.labels.items()})
    k = Entry(columns(known.position), heads, {name: columns(x) for name, x in known.labels.items()})
    allowed = np.asarray(rule(q, k))
    if asking.valid is not None:
        allowed = allowed & rows(asking.valid)
    if known.valid is not None:
        allowed = allowed & columns(known.valid)
    if asking.segment is not None and known.segment is not None:
        allowed = allowed & (rows(asking.segment) == columns(known.segment))
    return np.broadcast_to(allowed, (allowed.shape[0], pattern.num_heads, queries, k.position.shape[-1]))


def reads(
    pattern: Pattern, queries: int, keys: int, visibility: Visibility | None = None, selection: Any = None
) -> np.ndarray:
    """Which tokens each query reads, if only through an entry that is made of them: booleans [B or 1, H, T, S]."""
    visibility = visibility or Visibility()
    grids = []
    for part, own in zip(pattern.parts, pattern.selections(selection), strict=True):
        held = part.holds(keys, visibility)[:, None]
        grids.append(np.matmul(visible(part, queries, keys, visibility, own).astype(np.float32), held) > 0)
    batch = max(len(grid) for grid in grids)
    return np.concatenate([np.broadcast_to(grid, (batch, *grid.shape[1:])) for grid in grids], axis=1)


def drawn(pattern: Pattern, queries: int, keys: int, key: Array) -> Any:
    """What a pattern selects of normally distributed queries and keys, for drawings and counts without a text."""
    places = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
    q, k = (jax.random.normal(each, (1, keys, pattern.num_heads, pattern.head_dim)) for each in places)
    k = jnp.where(jnp.asarray(pattern.shares)[:, None], q, k)
    return pattern.select(q[:, keys - queries :], k, key=jax.random.fold_in(key, 2))


def pairs(pattern: Pattern, queries: int, keys: int | None = None, selection: Any = None) -> int:
    """How many pairs of a query and a key the rule allows, over all heads, never holding T x S of them.

    Args:
        pattern: an instance, for its rule, labels and number of heads.
        queries: T. keys: S >= T, the last T being the queries' own tokens; None for T.
        selection: the pattern's `select` of one row, for patterns that depend on content.
    """
    keys = queries if keys is None else keys
    parts = zip(pattern.parts, pattern.selections(selection), strict=True)
    return sum(_pairs(part, queries, keys, own) for part, own in parts)


def _pairs(pattern: Pattern, queries: int, keys: int, selection: Any) -> int:
    asking, known = pattern.entries(queries, keys, Visibility(), selection)
    heads = np.arange(pattern.num_heads, dtype=np.int32)[:, None]

    def column(x: Array) -> Array:
        """[1, S] or [1, S, H] to [1 or H, S]."""
        return jnp.atleast_2d(jnp.asarray(x)[0].T)

    k = Entry(column(known.position), heads, {name: column(x) for name, x in known.labels.items()})
    valid = True if known.valid is None else column(known.valid)

    def row(query: tuple[Array, Mapping[str, Array]]) -> Array:
        labels = {name: x if x.ndim == 0 else x[:, None] for name, x in query[1].items()}
        allowed = pattern.rule(Entry(query[0], heads, labels), k) & valid
        equal = pattern.num_heads * k.position.size // allowed.size  # heads that read the same are counted once
        return allowed.sum(dtype=jnp.int32) * equal

    @jax.jit
    def reads(position: Array, labels: Mapping[str, Array]) -> Array:
        return jax.lax.map(row, (position, labels), batch_size=_ROWS)

    labels = {name: jnp.asarray(x)[0] for name, x in asking.labels.items()}
    rows = reads(jnp.asarray(asking.position)[0], labels)
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
