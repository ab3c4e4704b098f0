"""Rows of tokens before they are cut into blocks: checks, zeros for what nobody reads, fixed borders, gathers."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from lra.attention.visibility import Array, Visibility


@dataclasses.dataclass(frozen=True)
class Anchored:
    """Rows that are moved so that borders at multiples of a period, counted from the first valid key, are static.

    They are rows like any others: the last queries stand with the last keys, and what was added is invalid.
    """

    q: Array
    k: Array
    v: Array
    visibility: Visibility
    shift: Array | None
    length: int

    def release(self, x: Array) -> Array:
        """[B, T', ...] of the moved queries back to [B, T, ...]."""
        if self.shift is None:
            return x
        return jax.vmap(lambda row, n: jax.lax.dynamic_slice_in_dim(row, n, self.length))(*same_rows(x, self.shift))


def anchor(q: Array, k: Array, v: Array, visibility: Visibility, period: int) -> Anchored:
    """Moves each row by up to `period - 1` entries, so that its first valid key stands at a multiple of `period`.

    Without validity the first key is the first valid one, and nothing moves.
    """
    length, _ = lengths(q, k, visibility)
    if visibility.k_valid is None or period == 1:
        return Anchored(q, k, v, visibility, None, length)
    shift = -jnp.argmax(visibility.k_valid, axis=1).astype(jnp.int32) % period
    moved = functools.partial(_moved, shift=shift, room=period - 1)
    valid = {"k_valid": visibility.k_valid, "q_valid": visibility.q_valid}
    if valid["q_valid"] is None:
        valid["q_valid"] = jnp.ones((1, length), bool)
    given = {f.name: getattr(visibility, f.name) for f in dataclasses.fields(visibility)} | valid
    fields = {name: None if x is None else moved(x) for name, x in given.items()}
    k, v = harmless(k, visibility.k_valid), harmless(v, visibility.k_valid)
    return Anchored(moved(harmless(q, visibility.q_valid)), moved(k), moved(v), Visibility(**fields), shift, length)


def _moved(x: Array, shift: Array, room: int) -> Array:
    """[B or 1, L, ...] to [B or 1, L + room, ...], row b moved ahead by shift[b] <= room; zeros fill."""
    x, shift = same_rows(jnp.pad(x, ((0, 0), (room, room), *((0, 0),) * (x.ndim - 2))), shift)
    return jax.vmap(lambda row, n: jax.lax.dynamic_slice_in_dim(row, room - n, row.shape[0] - room))(x, shift)


def lengths(q: Array, k: Array, visibility: Visibility) -> tuple[int, int]:
    """T and S, after checking that shapes fit."""
    length, size = q.shape[1], k.shape[1]
    if size < length:
        raise ValueError(f"keys need to end with the queries' own tokens: got {length} queries and only {size} keys")
    visibility.check(q.shape[0], length, size)
    return length, size


def harmless(x: Array, valid: Array | None) -> Array:
    """Zeros for what nobody may read: NaN times a weight of 0 would be NaN."""
    if valid is None:
        return x
    valid = valid[:, :, None] if valid.ndim == 2 else valid
    return jnp.where(valid[..., None], x, jnp.zeros((), x.dtype))


def take(x: Array, index: Array) -> Array:
    """Entries [B or 1, ...] at `index` of each row of [B or 1, L, ...]."""
    x, index = same_rows(x, index)
    if len(index) == 1:
        return jnp.take(x, index[0], axis=1)
    return jax.vmap(lambda row, i: row[i])(x, index)


def same_rows(*arrays: Array) -> list[Array]:
    """Arrays [B or 1, ...] with the same first axis."""
    rows = max(len(x) for x in arrays)
    return [jnp.broadcast_to(jnp.asarray(x), (rows, *x.shape[1:])) for x in arrays]


def pick(x: Array, index: Array) -> Array:
    """Entries of [B or 1, L] or [B or 1, L, H, ...] at an index [B, n, H] of each head: [B, n, H, ...]."""
    x = jnp.asarray(x)
    x = x[:, :, None] if x.ndim == 2 else x
    x = jnp.broadcast_to(x, (index.shape[0], x.shape[1], index.shape[2], *x.shape[3:]))
    return jax.vmap(jax.vmap(lambda row, i: row[i], (1, 1), 1))(x, index)


def scatter(x: Array, index: Array, length: int) -> Array:
    """Sums [B, L, H, ...] over the entries [B, n, H, ...] that go to the same index [B, n, H]."""

    def row(x: Array, i: Array) -> Array:
        return jnp.zeros((length, *x.shape[1:]), x.dtype).at[i].add(x)

    return jax.vmap(jax.vmap(row, (1, 1), 1))(x, index)
