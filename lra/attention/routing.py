"""Routing attention (Roy et al. 2020, arXiv:2003.05997). O(T K + K W^2) time, O(T K + K W) memory."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from lra.attention import arrange, clustering, core
from lra.attention.arrange import Entries
from lra.attention.core import Terms
from lra.attention.full import FullRule
from lra.attention.pattern import default_scale
from lra.attention.rows import harmless, lengths, pick, scatter
from lra.attention.terms import prepare
from lra.attention.visibility import Array, Visibility


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Members:
    """Who is in which cluster: integers alone.

    Attributes:
        queries: indices of the queries in each cluster [B, H, K, W], ascending; below 0 for what is no query.
        keys: indices of the keys in each cluster [B, H, K, W], ascending.
        q_cluster: the nearest cluster of each query [B, T, H], and k_cluster: of each key [B, S, H].
    """

    queries: Array
    keys: Array
    q_cluster: Array
    k_cluster: Array


@functools.partial(jax.jit, static_argnames=("window", "causal", "precision"))
def choose(
    q: Array,
    k: Array,
    *,
    centroids: Array,
    window: int,
    causal: bool = True,
    visibility: Visibility | None = None,
    precision: str = "highest",
) -> Members:
    """The members of the clusters of queries [B, T, H, D] and keys [B, S, H, D], by the centroids [H, K, D].

    When causal, a token is in the same clusters as query and as key, namely those of its key.
    """
    visibility = visibility or Visibility()
    length, size = lengths(q, k, visibility)

    def sorted_out(x: Array, valid: Array | None) -> tuple[Array, Array]:
        affinity = clustering.affinities(harmless(x, valid), centroids, valid, precision)
        return clustering.members(affinity, window), clustering.nearest(affinity)

    keys, k_cluster = sorted_out(k, visibility.k_valid)
    if causal:
        return Members(keys - (size - length), keys, k_cluster[:, size - length :], k_cluster)
    queries, q_cluster = sorted_out(q, visibility.q_valid)
    return Members(queries, keys, q_cluster, k_cluster)


@functools.partial(jax.jit, static_argnames=("causal", "scale", "dropout", "precision"))
def attend(
    q: Array,
    k: Array,
    v: Array,
    members: Members,
    *,
    causal: bool = True,
    scale: float | None = None,
    visibility: Visibility | None = None,
    terms: Terms = (),
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> tuple[Array, Array]:
    """Attention inside clusters that are given: the mean over the clusters in which a query reads anything.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D]. v: [B, S, H, E].
        members: whom each cluster holds.
        causal, visibility, terms, dropout, key, precision: as of `full`. scale: None for 1/sqrt(D).

    Returns:
        out [B, T, H, E] in q's dtype, 0 where a query reads nothing; the number of those clusters [B, T, H].
    """
    visibility = visibility or Visibility()
    length, size = lengths(q, k, visibility)
    width = q.shape[-1]
    position = tuple(jnp.asarray(x) for x in visibility.positions(length, size))
    q, k = prepare(terms, q, k, *position)
    tile = [_tile(w, causal) for w in (members.queries.shape[-1], members.keys.shape[-1])]
    queries, keys = _in_rows(members.queries, tile[0]), _in_rows(members.keys, tile[1])
    asking = Entries(position[0], visibility.q_valid, visibility.q_segment)
    known = Entries(position[1], visibility.k_valid, visibility.k_segment)
    parts = [-(-members.queries.shape[-1] // tile[0]), -(-members.keys.shape[-1] // tile[1])]

    def meet(rows: range, columns: range) -> bool:
        i, j = rows.start // tile[0], columns.start // tile[1]
        return i // parts[0] == j // parts[1] and (not causal or j <= i)

    grid = arrange.tiles(
        pick(harmless(q, visibility.q_valid), jnp.maximum(queries, 0)),
        pick(harmless(k, visibility.k_valid), jnp.maximum(keys, 0)),
        pick(harmless(v, visibility.k_valid), jnp.maximum(keys, 0)),
        _picked(asking, queries), _picked(known, keys), pairs=meet, tile=(tile[0], tile[1]),
    )  # fmt: skip
    part = core.attend(
        grid, rule=FullRule(causal), scale=default_scale(scale, width), terms=terms, dropout=dropout, key=key,
        precision=precision,
    )  # fmt: skip
    read = part.logsumexp > core.empty(part.logsumexp.dtype) / 2
    index = jnp.maximum(queries, 0)  # what is no query reads nothing, so that adding it anywhere adds 0
    count = scatter(read.astype(jnp.int32), index, length)
    out = scatter(part.out, index, length) / jnp.maximum(count, 1)[..., None].astype(part.out.dtype)
    return out.astype(q.dtype), count


def _tile(window: int, causal: bool) -> int:
    """Length of the blocks that a cluster is cut into: finer where later keys can be left out."""
    bound = arrange.BLOCK // 2 if causal else arrange.BLOCK
    return -(-window // -(-window // bound))


def _in_rows(index: Array, tile: int) -> Array:
    """[B, H, K, W] to [B, K W', H], W' being a multiple of the tile; -1 fills."""
    index = jnp.pad(index, ((0, 0), (0, 0), (0, 0), (0, -index.shape[-1] % tile)), constant_values=-1)
    return index.reshape(*index.shape[:2], -1).swapaxes(1, 2)


def _picked(entries: Entries, index: Array) -> Entries:
    there = index >= 0
    taken = jax.tree.map(lambda x: pick(x, jnp.maximum(index, 0)), entries)
    return dataclasses.replace(taken, valid=there if taken.valid is None else there & taken.valid)
