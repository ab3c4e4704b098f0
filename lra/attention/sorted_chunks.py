"""The arrangement of LSH attention: each head's entries sorted in each round, and cut into chunks.

In the sorted order entries of one bucket lie together, so that blocks of neighbours hold nearly all pairs of them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from lra.attention import core
from lra.attention.arrange import Grid, Layout, Side
from lra.attention.core import Partial
from lra.attention.rows import harmless, lengths
from lra.attention.visibility import Array, Visibility

_NONE = -2
"""A query's number where a round does not count: no key has it, nor the next one."""


def sort(buckets: Array, visibility: Visibility) -> tuple[Array, Array]:
    """The order of each head's entries in each round, and their ranks in it.

    Sorted by bucket, then index; what is packed by segment first; invalid entries last.

    Args:
        buckets: [B, S, H, rounds] integers.
        visibility: of S keys.

    Returns:
        Indices in sorted order, and the rank of each entry: int32 [B, H, rounds, S].
    """
    bucket = jnp.moveaxis(buckets, 1, -1)

    def everywhere(x: Array) -> Array:
        return jnp.broadcast_to(x[:, None, None], bucket.shape)

    keys = [bucket]
    if visibility.k_segment is not None:
        keys.insert(0, everywhere(visibility.k_segment))
    if visibility.k_valid is not None:
        keys.insert(0, everywhere(~visibility.k_valid))
    index = jax.lax.broadcasted_iota(jnp.int32, bucket.shape, bucket.ndim - 1)
    *_, order = jax.lax.sort((*keys, index), num_keys=len(keys), is_stable=True)
    return order, jnp.put_along_axis(jnp.zeros_like(index), order, index, axis=-1, inplace=False)


def sets_of(buckets: Array, rank: Array, chunk: int, within: int | None) -> Array:
    """A number for each entry and round: queries read those of their own number and of the one before.

    That is the chunk's number, or bucket x (chunks + 1) + chunk, so that another bucket's is never the one before.

    Args:
        buckets: [B, S, H, rounds]. rank: [B, H, rounds, S]. chunk: entries of a chunk.
        within: how many buckets there are, where those of other buckets are left out.

    Returns:
        int32 [B, H, rounds, S].
    """
    number = rank // chunk
    if within is None:
        return number
    chunks = -(-rank.shape[-1] // chunk)
    if within * (chunks + 1) >= 2**31:
        raise ValueError(f"{within} buckets x {chunks} chunks exceed 32 bits: use fewer buckets, or longer chunks")
    return jnp.moveaxis(buckets, 1, -1) * (chunks + 1) + number


def _rows(x: Array, index: Array) -> Array:
    return jnp.take(x.reshape(-1, x.shape[-1]), index, axis=0, mode="clip")


@jax.custom_vjp
def _gather(x: Array, index: Array, place: Array) -> Array:
    """Rows of x [B, S, H, D] at `index` [N, B, R, H, c] of them; `place` [R, B, S, H] says where each row went.

    A row went to one place a round, so that the gradient is gathered as well: adding row by row is slow.
    """
    return _rows(x, index)


def _gather_forward(x: Array, index: Array, place: Array) -> tuple[Array, Array]:
    return _rows(x, index), place


def _gather_backward(place: Array, gradient: Array) -> tuple[Array, None, None]:
    parts = [_rows(gradient, place[r]) for r in range(len(place))]
    return functools.reduce(jnp.add, parts), None, None  # XLA fuses these gathers, but not those of a sum over an axis


_gather.defvjp(_gather_forward, _gather_backward)


@jax.custom_vjp
def _scatter(y: Array, index: Array, place: Array) -> tuple[Array, ...]:
    """The inverse of `_gather`: sorted rows y [N, B, R, H, c, E] at their places, [B, S, H, E] for each round."""
    return tuple(_rows(y, place[r]) for r in range(len(place)))


def _scatter_forward(y: Array, index: Array, place: Array) -> tuple[tuple[Array, ...], Array]:
    return _scatter(y, index, place), index


def _scatter_backward(index: Array, gradients: tuple[Array, ...]) -> tuple[Array, None, None]:
    # Rows that only fill the last chunk get some gradient too: they read nothing, which passes none.
    return jnp.stack([_rows(each, index[:, :, r]) for r, each in enumerate(gradients)], axis=2), None, None


_scatter.defvjp(_scatter_forward, _scatter_backward)


def earlier(rounds: int) -> tuple[str, ...]:
    """The labels of the rounds before."""
    return tuple(f"earlier{j}" for j in range(rounds - 1))


def arranged(
    q: Array, k: Array, v: Array, buckets: Array, visibility: Visibility, *, chunk: int, within: int | None, once: bool
) -> tuple[Grid, Array, Array]:
    """Sorted chunks of all rounds: blocks [N, B, R, H, chunk, ...], a class R for each round.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D], of length sqrt(D). v: [B, S, H, E].
        buckets: [B, S, H, R]. visibility: checked.
        chunk: entries of a block. within: see `sets_of`. once: whether no key counts twice.

    Returns:
        The grid, and `index` and `place` of `_gather`. Labels are "own" and, where no key counts twice, `earlier`.
    """
    length, size = lengths(q, k, visibility)
    batch, _, heads, rounds = buckets.shape
    count = -(-size // chunk)
    order, rank = sort(buckets, visibility)
    row = (jnp.arange(batch, dtype=jnp.int32)[:, None, None, None] * size + order) * heads
    row = row + jnp.arange(heads, dtype=jnp.int32)[:, None, None]

    def cut(x: Array) -> Array:  # [B, H, R, S] in sorted order to [N, B, R, H, chunk]
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, count * chunk - size)))
        return jnp.moveaxis(x.reshape(batch, heads, rounds, count, chunk), (3, 0, 2, 1), (0, 1, 2, 3))

    index = cut(row)
    axes = [jnp.arange(n, dtype=jnp.int32) for n in (batch, heads, rounds)]
    b, h, r = axes[0][:, None, None, None], axes[1][:, None, None], axes[2][:, None]
    place = (((rank // chunk * batch + b) * rounds + r) * heads + h) * chunk + rank % chunk
    place = jnp.moveaxis(place, (2, 0, 3, 1), (0, 1, 2, 3))

    def known(x: Array) -> Array:  # [B or 1, S] or [B, H, S] to the blocks
        x = jnp.broadcast_to(x[:, None] if x.ndim == 2 else x, (batch, heads, size))
        return cut(jnp.take_along_axis(x[:, :, None], order, axis=-1))

    numbers = sets_of(buckets, rank, chunk, within)
    labels = {"own": cut(jnp.take_along_axis(numbers, order, axis=-1))}
    asked = dict(labels)
    for j, name in enumerate(earlier(rounds) if once else ()):
        labels[name] = known(numbers[:, :, j])
        asked[name] = jnp.where(axes[2][:, None, None] > j, labels[name], _NONE)
    position = known(jnp.asarray(visibility.positions(length, size)[1]))
    there = jnp.arange(count * chunk, dtype=jnp.int32).reshape(count, 1, 1, 1, chunk) < size
    valid = there if visibility.k_valid is None else there & known(visibility.k_valid)
    asking = valid
    if visibility.q_valid is not None or length < size:
        own = jnp.ones((1, length), bool) if visibility.q_valid is None else visibility.q_valid
        asking = valid & known(jnp.pad(own, ((0, 0), (size - length, 0))))
    segment = None if visibility.k_segment is None else known(visibility.k_segment)
    pairs = tuple((i, j) for i in range(count) for j in (i - 1, i) if j >= 0)
    q = jnp.pad(harmless(q, visibility.q_valid), ((0, 0), (size - length, 0), (0, 0), (0, 0)))
    k, v = harmless(k, visibility.k_valid), harmless(v, visibility.k_valid)
    q, k, v = (_gather(x, index, place) for x in (q, k, v))
    layout = Layout(pairs=pairs, step=1, consecutive=False, front=0, length=count * rounds * chunk)
    grid = Grid(q, k, v, Side(position, asking, segment, asked), Side(position, valid, segment, labels), layout)
    return grid, index, place


def combined(part: Partial, index: Array, place: Array) -> Partial:
    """Attention of the sorted entries, [B, N chunk R, H, ...] as `core.attend` gives it, back to [B, S, H, ...].

    Rounds are mixed by their log-sum-exp.
    """
    count, batch, rounds, heads, chunk = index.shape

    def back(x: Array) -> tuple[Array, ...]:
        x = x.reshape(batch, count, chunk, rounds, heads, -1)
        return _scatter(jnp.moveaxis(x, (1, 0, 3, 4, 2), (0, 1, 2, 3, 4)), index, place)

    each = zip(back(part.out), back(part.logsumexp), strict=True)
    return core.union(*(Partial(out, logsumexp[..., 0]) for out, logsumexp in each))
