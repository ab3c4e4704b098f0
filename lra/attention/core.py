"""The one block softmax that every pattern calls, and the combination of partial results.

Online softmax over pairs of blocks (Milakov and Gimelshein 2018, arXiv:1805.02867; Rabe and Staats 2021,
arXiv:2112.05682; Dao et al. 2022, arXiv:2205.14135). Scores alive at once stay below a constant number of bytes, so
memory is linear in T. Reverse mode only: the custom rule recomputes the scores block by block and takes its gradient
from `jax.vjp` of the block function; forward mode (`jax.jvp`) raises.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra.attention import arrange
from lra.attention.arrange import Grid, Side
from lra.attention.precision import accumulator
from lra.attention.terms import Positions, Range, Term
from lra.attention.visibility import Array, Entry

Rule = Callable[[Entry, Entry], Any]
Terms = tuple[Term, ...]

SCORE_BYTES = {"cpu": 1 << 21, "gpu": 1 << 28, "tpu": 1 << 26}
"""Budget of the scores alive at once, by platform: as many pairs of blocks a step as fit."""

SCOPE = "block_softmax"
"""Name of what `attend` runs, in traces."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partial:
    """Attention over some of the keys, in at least float32.

    Attributes:
        out: [B, T, H, E], the weighted mean of the values; 0 where nothing was read.
        logsumexp: [B, T, H], log of the sum of exponentiated logits; `empty(dtype)` where nothing was read.
    """

    out: Array
    logsumexp: Array


def empty(dtype: Any) -> Any:
    """The log-sum-exp of no key at all: the lowest finite number, so that no infinity and no NaN appears."""
    return jnp.finfo(dtype).min


def union(*parts: Partial) -> Partial:
    """Attention over the union of disjoint key sets, exact by log-sum-exp."""
    if len(parts) == 1:
        return parts[0]
    floor = empty(parts[0].logsumexp.dtype)
    top = functools.reduce(jnp.maximum, [part.logsumexp for part in parts])
    shares = [jnp.exp(part.logsumexp - jnp.maximum(top, floor / 2)) for part in parts]
    total = functools.reduce(jnp.add, shares)
    some = total > 0
    safe = jnp.where(some, total, 1)
    weighted = [part.out * (share / safe)[..., None] for part, share in zip(parts, shares, strict=True)]
    out = functools.reduce(jnp.add, weighted)
    return Partial(out, jnp.where(some, top + jnp.log(safe), floor))


def part_key(key: Array | None, number: int) -> Array | None:
    """The random key of one of several parts of a row's keys."""
    return None if key is None else jax.random.fold_in(key, number)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What is static in one call: hashable, so that equal calls compile once."""

    rule: Rule
    layout: arrange.Layout
    scale: float
    dropout: float
    precision: str


def attend(
    grid: Grid,
    *,
    rule: Rule,
    scale: float,
    terms: Terms = (),
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> Partial:
    """Softmax attention by `rule` over the grid's pairs of blocks.

    Args:
        grid: blocks of q, k, v and the pairs to visit.
        rule: `rule(q: Entry, k: Entry) -> bool`, elementwise; a hashable value, equal for equal arguments.
        scale: multiplies the products of queries and keys.
        terms: additions by position, differentiated.
        dropout: share of the weights that is dropped; the rest is scaled up, the sum that normalises is not touched.
        key: random key, needed for dropout.
        precision: of products of float32 inputs. Narrower inputs are multiplied as float32 at the platform's default
            precision, since rounding the weights or their gradient to a narrow type would not cancel where it must.

    Returns:
        Partial with [B, T, H, E] and [B, T, H].
    """
    if dropout and key is None:
        raise ValueError(f"dropout={dropout} needs a random key: pass key=jax.random.key(seed)")
    narrow = jnp.finfo(grid.v.dtype).bits < 32  # a float32 product at the default precision holds more than such inputs
    spec = _Spec(rule, grid.layout, scale, dropout, "default" if narrow else precision)
    with jax.named_scope(SCOPE):
        out, logsumexp = _online(spec, grid.q, grid.k, grid.v, terms, grid.queries, grid.keys, key if dropout else None)
    return Partial(grid.restore(out), grid.restore(logsumexp))


def _scores(spec: _Spec, q: Array, k: Array, terms: Terms, queries: Side, keys: Side, gap: Array | None) -> Array:
    """Masked logits [B, R, H, q, k] of one pair of blocks."""
    s = jnp.einsum("brhqd,brhkd->brhqk", q, k, precision=spec.precision) * spec.scale
    where = _positions(spec, queries, keys, gap)
    with jax.default_matmul_precision(spec.precision):
        for term in terms:
            extra = term.score(q, *where, spec.scale)
            s = s if extra is None else s + extra.astype(s.dtype)
    return jnp.where(_allowed(spec, queries, keys, q.shape[-3]), s, empty(s.dtype))


def _positions(spec: _Spec, queries: Side, keys: Side, gap: Array | None) -> tuple[Positions, Positions]:
    """Positions of one pair of blocks; ranges where they are consecutive, the first query `gap` after a key."""
    if gap is None:
        return queries.position, keys.position
    sizes, step = (queries.position.shape[-1], keys.position.shape[-1]), spec.layout.step
    return Range(gap, sizes[0], step), Range(jnp.zeros_like(gap), sizes[1], step)


def _gaps(spec: _Spec, queries: Side, keys: Side) -> tuple[Array | None, int | None]:
    """From the first key to the first query of each pair, of blocks on a diagonal; and its axis for `jax.vmap`.

    Blocks of one size have one gap, which is not batched: what terms make of it is made once for all pairs.
    """
    if not spec.layout.consecutive:
        return None, None
    gaps = queries.position[:, 0, 0, 0, 0] - keys.position[:, 0, 0, 0, 0]
    return (gaps[0], None) if queries.position.shape[-1] == keys.position.shape[-1] else (gaps, 0)


def _allowed(spec: _Spec, queries: Side, keys: Side, heads: int) -> Array:
    """Booleans that broadcast to [B, R, H, q, k]: the rule, and what visibility takes away."""
    number = jnp.arange(heads, dtype=jnp.int32)[:, None, None]
    rows, columns = (..., slice(None), None), (..., None, slice(None))
    q = Entry(queries.position[rows], number, {name: x[rows] for name, x in queries.labels.items()})
    k = Entry(keys.position[columns], number, {name: x[columns] for name, x in keys.labels.items()})
    allowed = spec.rule(q, k)
    if queries.valid is not None:
        allowed = allowed & queries.valid[rows]
    if keys.valid is not None:
        allowed = allowed & keys.valid[columns]
    if queries.segment is not None and keys.segment is not None:
        allowed = allowed & (queries.segment[rows] == keys.segment[columns])
    return allowed


def _weigh(
    spec: _Spec,
    s: Array,
    v: Array,
    terms: Terms,
    queries: Side,
    keys: Side,
    gap: Array | None,
    top: Array,
    key: Array | None,
) -> tuple[Array, Array]:
    """Sums over one block of keys: exp(s - top) times the values [B, R, H, q, E], and exp(s - top) itself [B, R, H, q].

    A row that has read nothing yet has `top = empty`; half of that keeps its masked logits at exp(...) = 0.
    """
    weights = jnp.exp(s - jnp.maximum(top, empty(s.dtype) / 2)[..., None])
    total = weights.sum(-1)
    if key is not None:
        keep = 1 - spec.dropout
        weights = jnp.where(jax.random.bernoulli(key, keep, weights.shape), weights / keep, 0)
    out = jnp.einsum("brhqk,brhke->brhqe", weights, v, precision=spec.precision)
    where = _positions(spec, queries, keys, gap)
    with jax.default_matmul_precision(spec.precision):
        for term in terms:
            extra = term.value(weights, *where)
            if extra is not None:
                beside = out.shape[-1] - extra.shape[-1]  # columns that mark keys, see `Attention`
                out = out + jnp.pad(extra.astype(out.dtype), ((0, 0),) * (extra.ndim - 1) + ((0, beside),))
    return out, total


def _block(
    spec: _Spec, q: Array, k: Array, v: Array, terms: Terms, queries: Side, keys: Side, gap: Array | None, top: Array,
    key: Array | None,
) -> tuple[Array, Array]:  # fmt: skip
    """The one block function: its `jax.vjp` is the gradient of everything here."""
    return _weigh(spec, _scores(spec, q, k, terms, queries, keys, gap), v, terms, queries, keys, gap, top, key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _online(
    spec: _Spec, q: Array, k: Array, v: Array, terms: Terms, queries: Side, keys: Side, key: Array | None
) -> tuple[Array, Array]:
    wide = accumulator(q.dtype)

    def pair(qs: Any, ks: Any, state: Any, key: Array | None, gap: Array | None) -> tuple[Array, Array, Array]:
        (q, queries), (k, v, keys), (out, total, top) = qs, ks, state
        s = _scores(spec, q.astype(wide), k.astype(wide), terms, queries, keys, gap)
        new = jnp.maximum(top, s.max(-1))
        more, weight = _weigh(spec, s, v.astype(wide), terms, queries, keys, gap, new, key)
        old = jnp.exp(top - new)
        return out * old[..., None] + more, total * old + weight, new

    def step(carry: Any, i: Array, j: Array, size: int) -> Any:
        qs, ks, state = _take((q, queries), i, size), _take((k, v, keys), j, size), _take(carry, i, size)
        gap, axis = _gaps(spec, qs[1], ks[2])
        return _put(carry, jax.vmap(pair, (0, 0, 0, 0, axis))(qs, ks, state, _keys(key, i, j, size), gap), i, size)

    shape = q.shape[:-1]
    start = (jnp.zeros((*shape, v.shape[-1]), wide), jnp.zeros(shape, wide), jnp.full(shape, empty(wide), wide))
    out, total, top = _visit(spec, step, start, q, k)
    safe = jnp.where(total > 0, total, 1)
    return out / safe[..., None], jnp.where(total > 0, top + jnp.log(safe), empty(wide))


def _online_forward(spec: _Spec, *args: Any) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    out, logsumexp = _online(spec, *args)
    return (out, logsumexp), (*args, out, logsumexp)


def _online_backward(spec: _Spec, saved: tuple[Any, ...], cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    q, k, v, terms, queries, keys, key, out, logsumexp = saved
    d_out, d_logsumexp = cotangents
    # out = n / z and logsumexp = top + log z, with z = 1 at top = logsumexp: these are the cotangents of n and z.
    d_total = d_logsumexp - (d_out * out).sum(-1)
    leaves, tree = jax.tree.flatten(terms)
    real = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
    wide = accumulator(q.dtype)

    def rebuild(values: list[Array]) -> Terms:
        rest = iter(values)
        return jax.tree.unflatten(tree, [next(rest) if r else leaf for r, leaf in zip(real, leaves, strict=True)])

    learned = [leaf for r, leaf in zip(real, leaves, strict=True) if r]

    def step(carry: Any, i: Array, j: Array, size: int) -> Any:
        dq, dk, dv, dt = carry
        qs, here, top, *cotangents = _take((q, queries, logsumexp, d_out, d_total), i, size)
        ks, vs, there = _take((k, v, keys), j, size)
        gap, axis = _gaps(spec, here, there)

        def blocks(q: Array, k: Array, v: Array, learned: list[Array]) -> tuple[Array, Array]:
            block = functools.partial(_block, spec)
            axes = (0, 0, 0, None, 0, 0, axis, 0, 0)  # one gradient of the terms for all pairs
            return jax.vmap(block, axes)(q, k, v, rebuild(learned), here, there, gap, top, _keys(key, i, j, size))

        wide_q, wide_k, wide_v = (x.astype(wide) for x in (qs, ks, vs))
        more_q, more_k, more_v, more_t = jax.vjp(blocks, wide_q, wide_k, wide_v, learned)[1](tuple(cotangents))
        dq = _put(dq, _take(dq, i, size) + more_q, i, size)
        dk = _put(dk, _take(dk, j, size) + more_k, j, size)
        dv = _put(dv, _take(dv, j, size) + more_v, j, size)
        return dq, dk, dv, [a + b.astype(a.dtype) for a, b in zip(dt, more_t, strict=True)]

    zeros = [jnp.zeros(leaf.shape, accumulator(leaf.dtype)) for leaf in learned]
    start = (jnp.zeros(q.shape, wide), jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide), zeros)
    dq, dk, dv, dt = _visit(spec, step, start, q, k)
    rest = iter(zip(dt, learned, strict=True))
    d_terms = []
    for r, leaf in zip(real, leaves, strict=True):
        if r:
            value, like = next(rest)
            d_terms.append(value.astype(like.dtype))
        else:
            d_terms.append(np.zeros(jnp.shape(leaf), jax.dtypes.float0))
    return (
        dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), jax.tree.unflatten(tree, d_terms), None, None, None
    )  # fmt: skip


_online.defvjp(_online_forward, _online_backward)


def _visit(spec: _Spec, step: Callable[..., Any], carry: Any, q: Array, k: Array) -> Any:
    """Runs `step(carry, i, j, size)` for all pairs of blocks: `size` neighbours of a diagonal at a time, then the rest.

    Query blocks i..i+size-1 meet key blocks j..j+size-1 one to one, so that no block appears twice in a step.
    """
    scores = 4 * np.prod(q.shape[1:-1]) * k.shape[-2]
    most = SCORE_BYTES.get(jax.default_backend(), SCORE_BYTES["gpu"]) // max(1, int(scores))
    together = max(1, min(most, q.shape[0], k.shape[0]))
    for size, starts in _steps(spec.layout.pairs, together):

        def body(carry: Any, start: Array, size: int = size) -> tuple[Any, None]:
            return step(carry, start[0], start[1], size), None

        carry, _ = jax.lax.scan(body, carry, jnp.asarray(starts, jnp.int32))
    return carry


@functools.lru_cache(maxsize=64)
def _steps(pairs: arrange.Pairs, together: int) -> list[tuple[int, np.ndarray]]:
    """Full groups of `together` neighbours on a diagonal, and single pairs for what is left."""
    runs: list[list[tuple[int, int]]] = []
    for i, j in sorted(pairs, key=lambda pair: (pair[0] - pair[1], pair[0])):
        if runs and runs[-1][-1] == (i - 1, j - 1):
            runs[-1].append((i, j))
        else:
            runs.append([(i, j)])
    full, single = [], []
    for run in runs:
        whole = len(run) - len(run) % together
        full += run[:whole:together]
        single += run[whole:]
    groups = [(together, full), (1, single)]
    return [(size, np.asarray(starts)) for size, starts in groups if starts]


def _take(tree: Any, start: Array, size: int) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), tree)


def _put(tree: Any, value: Any, start: Array, size: int) -> Any:
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, 0), tree, value)


def _keys(key: Array | None, i: Array, j: Array, size: int) -> Array | None:
    """A key for each pair of blocks, by its numbers alone."""
    if key is None:
        return None
    step = jnp.arange(size, dtype=jnp.int32)
    return jax.vmap(lambda n: jax.random.fold_in(jax.random.fold_in(key, i + n), j + n))(step)
