"""Routing attention (Roy et al. 2020, arXiv:2003.05997). O(T K + K W^2) time, O(T K + K W) memory."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra.attention import arrange, clustering, core
from lra.attention.arrange import Entries, Labels
from lra.attention.clustering import Clustered, FirstUpdate, Space, check_sizes, normalise
from lra.attention.core import Rule, Terms
from lra.attention.full import FullRule
from lra.attention.pattern import Attended, Inputs, Site, default_scale
from lra.attention.promise import Promise
from lra.attention.rows import harmless, lengths, pick, scatter
from lra.attention.terms import prepare
from lra.attention.visibility import Array, Entry, Visibility
from lra.errors import UserError

BITS = 31
"""Clusters whose members are told by the bits of one label."""


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


def routing(
    q: Array,
    k: Array,
    v: Array,
    *,
    centroids: Array,
    window: int,
    causal: bool = True,
    scale: float | None = 1.0,
    visibility: Visibility | None = None,
    terms: Terms = (),
    selection: Members | None = None,
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> Array:
    """Attention among the tokens nearest to each of K centroids: the mean over the clusters that a token is in.

    Queries and keys pass a layer norm without gain, so that their norm is sqrt(D). The `window` tokens with the largest
    products with a centroid are its members, over the whole row: when causal, values of later tokens are never read,
    but later tokens can take an earlier one's place in a cluster. When causal, a token is in the clusters of its key,
    which should be its query (one projection); else queries and keys have members of their own.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D], S >= T, the last T being the queries' own tokens. v: [B, S, H, E].
        centroids: [H, K, D].
        window: W, members of a cluster; all tokens where there are fewer.
        scale: of the logits; 1 in the released code, None for 1/sqrt(D).
        selection: of `choose`; None to choose here.
        causal, visibility, terms, dropout, key, precision: as of `full`.

    Returns:
        [B, T, H, E] in v's dtype; exactly 0 for tokens in no cluster, and where a query may read nothing.

    Raises:
        ValueError: a window below 1, shapes that do not fit.

    Example:
        >>> import jax, lra.attention
        >>> q = v = jax.random.normal(jax.random.key(0), (1, 17, 2, 8))
        >>> centroids = jax.random.normal(jax.random.key(1), (2, 4, 8))
        >>> lra.attention.routing(q, q, v, centroids=centroids, window=6).shape
        (1, 17, 2, 8)
    """
    check_sizes(centroids.shape[1], window)
    visibility = visibility or Visibility()
    lengths(q, k, visibility)
    q, k = normalise(harmless(q, visibility.q_valid)), normalise(harmless(k, visibility.k_valid))
    if selection is None:
        selection = choose(q, k, centroids=centroids, window=window, causal=causal, visibility=visibility)
    return attend(
        q, k, v, selection, causal=causal, scale=scale, visibility=visibility, terms=terms, dropout=dropout, key=key,
        precision=precision,
    )[0]  # fmt: skip


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
        out [B, T, H, E] in v's dtype, 0 where a query reads nothing; the number of those clusters [B, T, H].
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
    return out.astype(v.dtype), count


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


@dataclasses.dataclass(frozen=True)
class RoutingRule:
    """Tokens of one cluster read each other, when causal those up to their own position; `cluster` None for any.

    Labels "in0", "in1", ... hold a bit for each cluster.
    """

    clusters: int
    causal: bool
    cluster: int | None = None

    def __call__(self, q: Entry, k: Entry) -> Array:
        if self.cluster is None:
            names = [f"in{n}" for n in range(-(-self.clusters // BITS))]
            shared = functools.reduce(jnp.logical_or, [(q.labels[n] & k.labels[n]) != 0 for n in names])
        else:
            name, bit = f"in{self.cluster // BITS}", np.int32(1 << self.cluster % BITS)
            shared = (q.labels[name] & k.labels[name] & bit) != 0
        return shared & (k.position <= q.position) if self.causal else shared


def _bits(index: Array, length: int) -> dict[str, Array]:
    """Labels [B, L, H] with a bit for each cluster [B, H, K, W] that holds a token."""
    clusters = index.shape[2]
    index = jnp.where(index < 0, length, index)  # is dropped
    inside = jax.vmap(jax.vmap(jax.vmap(lambda i: jnp.zeros(length, jnp.int32).at[i].set(1, mode="drop"))))(index)
    words = {}
    for n, first in enumerate(range(0, clusters, BITS)):
        some = inside[:, :, first : first + BITS]
        weights = np.int32(1) << np.arange(some.shape[2], dtype=np.int32)
        words[f"in{n}"] = (some * weights[:, None]).sum(2, dtype=jnp.int32).swapaxes(1, 2)
    return words


class Routing(Clustered):
    """See `routing`, and `Clustered` for its arguments. Causal heads have one projection for queries and keys.

    It reports `unrouted`, the share of tokens in no cluster, whose output is 0.
    """

    combination = "mean"

    def __init__(
        self,
        *,
        clusters: int | tuple[int, ...],
        window: int | tuple[int, ...],
        decay: float = 0.999,
        commitment: float = 1e-4,
        first_update: FirstUpdate = "corrected",
        space: Space = "normalised",
        logit_scale: float | None = 1.0,
        site: Site,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(
            clusters=clusters, window=window, decay=decay, commitment=commitment, first_update=first_update,
            space=space, logit_scale=logit_scale, site=site, rngs=rngs,
        )  # fmt: skip
        self.projections = "shared_qk" if site.causal else "qkv"

    @property
    def promise(self) -> Promise:
        return Promise(
            causal="selection", bidirectional=True, padding=True, packing="masked", distances=True, dropout=True,
            sorts=True,
        )  # fmt: skip

    @property
    def rule(self) -> Rule:
        return RoutingRule(self.clusters, self.causal)

    @property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(RoutingRule(self.clusters, self.causal, c) for c in range(self.clusters))

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return {"clusters": 3, "window": 5}, {"clusters": 33, "window": 2, "space": "projected", "logit_scale": None}

    @classmethod
    def typical(cls, num_heads: int) -> dict[str, Any]:
        return {"clusters": 64, "window": 128}

    def select(
        self, q: Array, k: Array, *, visibility: Visibility | None = None, key: Array | None = None, train: bool = False
    ) -> Members:
        visibility = visibility or Visibility()
        lengths(q, k, visibility)
        return choose(
            self.features(normalise(harmless(q, visibility.q_valid))),
            self.features(normalise(harmless(k, visibility.k_valid))),
            centroids=self.centroids, window=self.window, causal=self.causal, visibility=visibility,
        )  # fmt: skip

    def colours(self, selection: Any) -> Array:
        """The nearest cluster of each key, whether or not it is a member."""
        return selection.k_cluster

    def check_length(self, length: int) -> None:
        places, sizes = self.clusters * self.window, f"Routing.clusters = {self.clusters} x window = {self.window}"
        if self.window > length:
            raise UserError(
                f"Routing.window is {self.window}, but rows have {length} tokens, so that every cluster holds them "
                f"all: lower it, to about {max(1, length // self.clusters)} tokens, or use full"
            )
        if 2 * places < length:
            raise UserError(
                f"{sizes} are {places} places for rows of {length} tokens, so that most are in no cluster and read "
                f"nothing: raise one of them until their product is near {length}"
            )

    def labels(self, queries: int, keys: int, visibility: Visibility, selection: Any = None) -> Labels:
        return _bits(selection.queries, queries), _bits(selection.keys, keys)

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        inputs: Inputs | None = None,
        visibility: Visibility | None = None,
        terms: Terms = (),
        key: Array | None = None,
        train: bool = False,
        selection: Any = None,
    ) -> Attended:
        visibility = visibility or Visibility()
        length, size = lengths(q, k, visibility)
        if selection is None:
            selection = self.select(q, k, visibility=visibility)
        q, k = self.prepare(harmless(q, visibility.q_valid), harmless(k, visibility.k_valid))
        out, count = attend(
            q, k, v, selection, causal=self.causal, scale=self.logit_scale, visibility=visibility, terms=terms,
            dropout=self.dropout_rate(train), key=key,
        )  # fmt: skip
        metrics = {"unrouted": _share(count == 0, visibility.q_valid)}
        if not train:
            return Attended(out, metrics=metrics)
        if self.causal:
            tokens = [(k[:, size - length :], selection.q_cluster, visibility.q_valid)]
        else:
            tokens = [(q, selection.q_cluster, visibility.q_valid), (k, selection.k_cluster, visibility.k_valid)]
        losses, updates = self.learn(*((self.features(x), *rest) for x, *rest in tokens))
        return Attended(out, losses, metrics, updates)


def _share(empty: Array, valid: Array | None) -> Array:
    """The share of valid tokens [B, T, H] that are in no cluster."""
    there = jnp.ones((1, 1), bool) if valid is None else valid
    there = jnp.broadcast_to(there[..., None], empty.shape)
    return (empty & there).sum().astype(jnp.float32) / jnp.maximum(there.sum(), 1).astype(jnp.float32)
