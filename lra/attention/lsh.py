"""LSH attention (Kitaev et al. 2020, "Reformer", arXiv:2001.04451, section 2). O(rounds T chunk) time, O(T) memory.

Tokens that fall into the same bucket read each other. In each round the tokens of a head are sorted by (bucket,
position) and cut into chunks, which read themselves and the chunk before. Queries and keys are one projection.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lra.attention import arrange, core, hashing
from lra.attention.arrange import Grid, Layout, Side
from lra.attention.core import Partial, Terms
from lra.attention.hashing import Buckets
from lra.attention.pattern import aligned, default_scale
from lra.attention.precision import accumulator
from lra.attention.rows import harmless, lengths
from lra.attention.visibility import Array, Entry, Visibility

Sets = Literal["paper", "released"]
"""What a round lets a query read.

"paper": the keys of its own bucket, each once however many rounds bring it (equation 16).
"released": all keys of the two chunks, once for each round that brings them (the program of the authors).
"""

FORMS = {"paper": (True, True), "released": (False, False)}
"""Whether keys of other buckets are left out, and whether a key counts once only."""

_NONE = -2
"""A query's number where a round does not count: no key has it, nor the next one."""


@dataclasses.dataclass(frozen=True)
class SharedRule:
    """Other tokens that share one of these rounds' sets, unless they share one of those in `without`.

    The set of an entry is an integer (see `sets_of`): a query reads its own set and the one before.
    """

    causal: bool
    rounds: tuple[str, ...]
    without: tuple[str, ...] = ()

    def __call__(self, q: Entry, k: Entry) -> Array:
        shared = functools.reduce(jnp.logical_or, [_shared(q, k, name) for name in self.rounds])
        for name in self.without:
            shared = shared & ~_shared(q, k, name)
        return shared & (k.position < q.position if self.causal else k.position != q.position)


@dataclasses.dataclass(frozen=True)
class OwnRule:
    """A token itself."""

    def __call__(self, q: Entry, k: Entry) -> Array:
        return q.position == k.position


def _shared(q: Entry, k: Entry, name: str) -> Array:
    back = q.labels[name] - k.labels[name]
    return (back == 0) | (back == 1)


def unit(x: Array) -> Array:
    """Vectors [..., D] of length sqrt(D), as the released code makes keys: at scale 1/sqrt(D) they count as length 1."""
    wide = x.astype(accumulator(x.dtype))
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


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
    blocks = [_gather(x, index, place) for x in (q, harmless(k, visibility.k_valid), harmless(v, visibility.k_valid))]
    layout = Layout(pairs=pairs, step=1, consecutive=False, front=0, length=count * rounds * chunk)
    grid = Grid(*blocks, Side(position, asking, segment, asked), Side(position, valid, segment, labels), layout)
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


@functools.partial(
    jax.jit,
    static_argnames=("chunk", "buckets", "rounds", "sets", "causal", "scale", "dropout", "precision"),
)
def lsh(
    q: Array,
    k: Array,
    v: Array,
    *,
    chunk: int,
    buckets: Buckets,
    rounds: int,
    sets: Sets = "paper",
    causal: bool = True,
    scale: float | None = None,
    visibility: Visibility | None = None,
    terms: Terms = (),
    selection: Array | None = None,
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> Array:
    """Attention to the other tokens of a query's bucket, and to itself where there are none.

    Queries and keys are one projection: q is the last T of k. Keys count as vectors of length 1. What a query reads can
    depend on later tokens, since these move the borders of chunks; what it reads of them is nothing when causal.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D], S >= T, the last T being the queries' own tokens. v: [B, S, H, E].
        chunk: tokens of a chunk of the sorted row; about twice S / buckets lets most buckets fit into two chunks. One
            that is not shorter than the row holds it whole.
        buckets: their number, even, or a tuple of even factors of it: those are cheaper to compute where many.
        rounds: how many times tokens are hashed, each time with other random directions.
        sets: what a round lets a query read: "paper" or "released", see `Sets`.
        scale: factor of the products of queries and keys of length sqrt(D); None for 1/sqrt(D).
        selection: what `select` gave, [B, S, H, rounds]; None for `select` of k with `key`.
        key: random key of the directions and of dropout; None for directions that are always the same.
        causal, visibility, terms, dropout, precision: as of `full`.

    Returns:
        [B, T, H, E] in q's dtype; exactly 0 where a query may not even read itself.

    Raises:
        ValueError: a chunk or a number of rounds below 1, buckets that are not even, shapes that do not fit.

    Example:
        >>> import jax, lra.attention
        >>> q, v = jax.random.normal(jax.random.key(0), (2, 1, 50, 2, 8))
        >>> lra.attention.lsh(q, q, v, chunk=8, buckets=12, rounds=2, key=jax.random.key(1)).shape
        (1, 50, 2, 8)
    """
    check_sizes(chunk, buckets, rounds, sets)
    visibility = visibility or Visibility()
    length, size = lengths(q, k, visibility)
    if selection is None:
        selection = select(k, buckets=buckets, rounds=rounds, visibility=visibility, key=key)
    width = q.shape[-1]
    q, k, visibility = aligned(terms, q, unit(harmless(k, visibility.k_valid)), visibility)
    options = {"scale": default_scale(scale, width), "terms": terms, "dropout": dropout, "precision": precision}
    within, once = FORMS[sets]
    grid, index, place = arranged(
        q, k, v, selection, visibility, chunk=chunk, within=hashing.count(buckets) if within else None, once=once
    )
    rule = SharedRule(causal, ("own",), earlier(rounds) if once else ())
    others = combined(core.attend(grid, rule=rule, key=core.part_key(key, 1), **options), index, place)
    out, logsumexp = others.out[:, size - length :], others.logsumexp[:, size - length :]
    band = arrange.band(q, k, v, visibility, before=0, after=0, block=8)
    itself = core.attend(band, rule=OwnRule(), key=core.part_key(key, 2), **options)
    nothing = logsumexp == core.empty(logsumexp.dtype)
    return jnp.where(nothing[..., None], itself.out, out).astype(q.dtype)


def select(
    k: Array, *, buckets: Buckets, rounds: int, visibility: Visibility | None = None, key: Array | None = None
) -> Array:
    """The bucket of each key in each round: the integers by which `lsh` chooses, saved for the backward pass.

    Args:
        k: [B, S, H, D].
        buckets, rounds, key: as of `lsh`.
        visibility: for the validity of S keys.

    Returns:
        int32 [B, S, H, rounds].
    """
    key = core.part_key(jax.random.key(0) if key is None else key, 0)
    rotations = hashing.rotations(key, buckets, rounds=rounds, heads=k.shape[2], width=k.shape[3])
    k = harmless(k, None if visibility is None else visibility.k_valid)
    return checkpoint_name(hashing.hashes(k, rotations, buckets), "selection")


def check_sizes(chunk: int, buckets: Buckets, rounds: int, sets: str) -> None:
    """Raises for arguments that make no sense."""
    if chunk < 1:
        raise ValueError(f"chunk counts the tokens of a chunk and needs to be at least 1, got {chunk}")
    if rounds < 1:
        raise ValueError(f"rounds needs to be at least 1, got {rounds}")
    hashing.factors(buckets)
    if sets not in FORMS:
        raise ValueError(f'sets needs to be "paper" or "released", got {sets!r}')
