"""Output heads: from hidden vectors to logits and to negative log-likelihoods."""

from __future__ import annotations

import abc
import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from lra.attention.initialisers import initialiser
from lra.attention.precision import accumulator
from lra.attention.visibility import Array
from lra.models.embeddings import Embedding, TokenEmbedding
from lra.models.some_rows import some_rows


class Head(nnx.Module):
    """An output head, made with the token embedding that it may be tied to, which every call gets again."""

    @abc.abstractmethod
    def logits(self, x: Array, embedding: TokenEmbedding) -> Array:
        """[..., C] to [..., V], in at least float32: log-probabilities up to a constant of each position."""

    @abc.abstractmethod
    def score(
        self, x: Array, embedding: TokenEmbedding, targets: Array, scored: Array | None = None
    ) -> tuple[Array, Array]:
        """Negative log-likelihood of each target [B, T], in nats, and whether it is the likeliest token.

        Where `scored` [B, T] is False both mean nothing, so that a head may leave these targets out.
        """


class Softmax(Head):
    """A softmax over the vocabulary, in at least float32.

    Args:
        tied: whether the projection is the token embedding (Press and Wolf 2017, arXiv:1608.05859).
        bias: whether each token has a bias.
        kernel: name of the initialiser of a projection of its own.
        chunk: positions scored at a time, for memory that does not grow with V times B T: logits are computed again
            for the gradient. None for all at once, with the same result.
        vocabulary_size: V, from the model. width: C, from the model.
        embedding: the model's token embedding.
        compute_dtype: of the operands of the product, from the model; None for that of the hidden vectors.
        rngs: random streams.

    Raises:
        ValueError: a chunk below 1, or an embedding to which the head cannot be tied.
    """

    def __init__(
        self,
        *,
        tied: bool = True,
        bias: bool = False,
        kernel: str = "lecun_normal",
        chunk: int | None = None,
        vocabulary_size: int,
        width: int,
        embedding: TokenEmbedding,
        compute_dtype: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        if chunk is not None and chunk < 1:
            raise ValueError(f"Softmax.chunk needs to be at least 1, or None for all positions at once, got {chunk}")
        if tied and embedding.width != width:
            raise ValueError(
                f"the stack gives vectors of {width}, but the token embedding has {embedding.width}, so that the "
                "output head cannot be tied to it: set Softmax.tied = False"
            )
        if tied and embedding.cutoffs:
            raise ValueError(
                f"{type(embedding).__name__} has clusters of ids, to which a plain softmax cannot be tied: set "
                "Decoder.head = @AdaptiveSoftmax, or Softmax.tied = False"
            )
        self.tied, self.chunk, self.compute_dtype = tied, chunk, compute_dtype
        self.projection = None if tied else nnx.Param(initialiser(kernel)(rngs.params(), (width, vocabulary_size)))
        self.bias = nnx.Param(jnp.zeros((vocabulary_size,))) if bias else None

    def logits(self, x: Array, embedding: TokenEmbedding) -> Array:
        return _logits(self._table(embedding), x, self.compute_dtype)

    def score(
        self, x: Array, embedding: TokenEmbedding, targets: Array, scored: Array | None = None
    ) -> tuple[Array, Array]:
        if self.chunk is None:
            return _likelihood(self.logits(x, embedding), targets)
        rows = functools.partial(_table_rows, narrow=self.compute_dtype)
        nats, (right, _) = some_rows(rows, self._table(embedding), *_flat(x, targets, scored), self.chunk)
        return nats.reshape(targets.shape), right.reshape(targets.shape)

    def _table(self, embedding: TokenEmbedding) -> _Table:
        bias = None if self.bias is None else self.bias[...]
        if self.projection is not None:
            return self.projection[...], None, bias
        table, projection = embedding.cluster(0)
        return None if projection is None else projection.T, table, bias


class AdaptiveSoftmax(Head):
    """Adaptive softmax (Grave et al. 2017, arXiv:1609.04309) by the tables of the embedding, in at least float32.

    The first cluster of the embedding is predicted beside one entry for each other cluster, in order; the likelihood of
    an id of cluster i > 0 is that of its cluster times that within it. Cluster i is computed for the positions whose
    targets are in it alone, so that the price follows the text. Likelihoods come in the order of the tokens.

    The released PyTorch code of Transformer-XL reads the entries of clusters from the last to the first instead.

    Args:
        tied_projections: whether the projection before a cluster's table is that of its embedding: one for all, or one
            for each cluster, such as (False, True, True, True) in Transformer-XL on WikiText-103. Where the embedding
            has no projections there are none to tie.
        bias: whether each id and cluster has a bias.
        kernel: name of the initialiser of projections of its own.
        chunk: positions scored at a time; logits are computed again for the gradient.
        vocabulary_size: V, from the model. width: C, from the model.
        embedding: the model's token embedding, whose cutoffs and tables these are.
        compute_dtype: of the operands of products, from the model; None for that of the hidden vectors.
        rngs: random streams.

    Raises:
        ValueError: a chunk below 1, an embedding without clusters, another number of tied projections than of
            clusters, or a stack that gives vectors of another width than those projections.
    """

    def __init__(
        self,
        *,
        tied_projections: bool | tuple[bool, ...] = True,
        bias: bool = False,
        kernel: str = "normal_0.01",
        chunk: int = 64,
        vocabulary_size: int,
        width: int,
        embedding: TokenEmbedding,
        compute_dtype: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        if chunk < 1:
            raise ValueError(f"AdaptiveSoftmax.chunk needs to be at least 1, got {chunk}")
        if isinstance(embedding, Embedding):
            raise ValueError(
                "AdaptiveSoftmax has the clusters of the token embedding, of which Embedding has none: set "
                "Decoder.embedding = @AdaptiveEmbedding, or Decoder.head = @Softmax"
            )
        count = len(embedding.borders)
        tied = tied_projections if isinstance(tied_projections, tuple) else (tied_projections,) * count
        if len(tied) != count:
            raise ValueError(
                f"AdaptiveSoftmax.tied_projections needs one entry for each of {count} clusters, got {len(tied)}"
            )
        self.chunk, self.compute_dtype, self.shortlist = chunk, compute_dtype, embedding.borders[0][1]
        own: dict[str, nnx.Param] = {}
        for number, with_embedding in enumerate(tied):
            table, projection = embedding.cluster(number)
            shared = projection is not None and with_embedding
            if shared and width != embedding.width:
                raise ValueError(
                    f"the stack gives vectors of {width}, but the projections of the token embedding have "
                    f"{embedding.width}, so that the output head cannot share them: set "
                    "AdaptiveSoftmax.tied_projections = False"
                )
            if not shared and (projection is not None or table.shape[1] != width):
                own[str(number)] = nnx.Param(initialiser(kernel)(rngs.params(), (width, table.shape[1])))
        self.projections = nnx.Dict(own)
        first = embedding.cluster(0)[0].shape[1]
        self.clusters = nnx.Param(jnp.zeros((count - 1, first))) if count > 1 else None
        self.bias = nnx.Param(jnp.zeros((vocabulary_size,))) if bias else None
        self.cluster_bias = nnx.Param(jnp.zeros((count - 1,))) if bias and count > 1 else None

    def logits(self, x: Array, embedding: TokenEmbedding) -> Array:
        logits = _logits(self._table(embedding, 0), x, self.compute_dtype)
        if self.clusters is None:
            return logits
        entries = _logits(self._entries(embedding), x, self.compute_dtype)
        first = jax.nn.log_softmax(jnp.concatenate([logits, entries], axis=-1))
        parts = [first[..., : self.shortlist]]
        for number in range(1, len(embedding.borders)):
            inside = jax.nn.log_softmax(_logits(self._table(embedding, number), x, self.compute_dtype))
            parts.append(first[..., self.shortlist + number - 1, None] + inside)
        return jnp.concatenate(parts, axis=-1)

    def score(
        self, x: Array, embedding: TokenEmbedding, targets: Array, scored: Array | None = None
    ) -> tuple[Array, Array]:
        rows, ids, wanted = _flat(x, targets, scored)
        table_rows = functools.partial(_table_rows, narrow=self.compute_dtype)
        tables = [self._table(embedding, number) for number in range(len(embedding.borders))]
        if self.clusters is None:
            nats, (right, _) = some_rows(table_rows, tables[0], rows, ids, wanted, self.chunk)
            return nats.reshape(targets.shape), right.reshape(targets.shape)
        cluster = jnp.searchsorted(jnp.asarray(embedding.cutoffs, ids.dtype), ids, side="right")
        first_rows = functools.partial(_first_rows, narrow=self.compute_dtype)
        entry = jnp.where(cluster > 0, self.shortlist - 1 + cluster, ids)
        first = (tables[0], self._entries(embedding))
        nats, (right, least, entries) = some_rows(first_rows, first, rows, entry, wanted, self.chunk)
        for number, (begin, _) in enumerate(embedding.borders[1:], 1):
            there = cluster == number if wanted is None else (cluster == number) & wanted
            inside, (likeliest, _) = some_rows(table_rows, tables[number], rows, ids - begin, there, self.chunk)
            nats, right = nats + inside, jnp.where(there, likeliest & (nats + inside < least), right)
        for number, table in enumerate(tables[1:], 1):
            # A cluster that is likelier than the target may hold an id that is likelier: only then one has to look.
            open_ = right & (cluster != number) & (entries[:, number - 1] < nats)
            _, (_, inside) = some_rows(table_rows, table, rows, jnp.zeros_like(ids), open_, self.chunk)
            right = right & ~(open_ & (entries[:, number - 1] + inside <= nats))
        return nats.reshape(targets.shape), right.reshape(targets.shape)

    def _table(self, embedding: TokenEmbedding, number: int) -> _Table:
        """What gives the logits within a cluster."""
        table, projection = embedding.cluster(number)
        if str(number) in self.projections:
            projection = self.projections[str(number)][...]
        elif projection is not None:
            projection = projection.T
        begin, end = embedding.borders[number]
        return projection, table, None if self.bias is None else self.bias[begin:end]

    def _entries(self, embedding: TokenEmbedding) -> _Table:
        """What gives those of the clusters, after the projection of the first."""
        bias = None if self.cluster_bias is None else self.cluster_bias[...]
        return self._table(embedding, 0)[0], None if self.clusters is None else self.clusters[...], bias


_Table: TypeAlias = tuple[Array | None, Array | None, Array | None]
"""A projection [C, W], a table [N, W] and a bias [N]: what there is of them gives N logits, one after the other."""


def _logits(table: _Table, x: Array, narrow: str | None) -> Array:
    """[..., C] to [..., N], in at least float32, of operands of type `narrow` (None: that of x)."""
    projection, rows, bias = table
    wide, narrow = accumulator(x.dtype), narrow or x.dtype
    for matrix in (projection, None if rows is None else rows.T):
        if matrix is not None:
            x = jnp.dot(x.astype(narrow), matrix.astype(narrow), preferred_element_type=wide)
    return x if bias is None else x + bias.astype(wide)


def _likelihood(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Nats of each target [...], and whether it is the likeliest, the first among equals."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen, jnp.argmax(logits, axis=-1) == targets


def _table_rows(table: _Table, x: Array, targets: Array, *, narrow: str | None) -> tuple[Array, tuple[Array, Array]]:
    """Nats of each target; whether it is the likeliest, and the nats of the likeliest."""
    logits = _logits(table, x, narrow)
    nats, right = _likelihood(logits, targets)
    return nats, (right, jax.nn.logsumexp(logits, axis=-1) - logits.max(axis=-1))


def _first_rows(
    tables: tuple[_Table, _Table], x: Array, targets: Array, *, narrow: str | None
) -> tuple[Array, tuple[Array, Array, Array]]:
    """Nats of each target, an id of the shortlist or an entry after it; whether it is the likeliest of the shortlist.

    And the nats of the likeliest of the shortlist, and those of the entries [c, clusters - 1].
    """
    shortlist, entries = (_logits(table, x, narrow) for table in tables)
    total = jnp.logaddexp(jax.nn.logsumexp(shortlist, axis=-1), jax.nn.logsumexp(entries, axis=-1))
    chosen = jnp.take_along_axis(jnp.concatenate([shortlist, entries], axis=-1), targets[:, None], axis=-1)[:, 0]
    right = jnp.argmax(shortlist, axis=-1) == targets
    return total - chosen, (right, total - shortlist.max(axis=-1), total[:, None] - entries)


def _flat(x: Array, targets: Array, scored: Array | None) -> tuple[Array, Array, Array | None]:
    """[B, T, C], [B, T] and [B, T] or None, as rows."""
    wanted = None if scored is None else jnp.asarray(scored).reshape(-1)
    return x.reshape(-1, x.shape[-1]), jnp.asarray(targets).reshape(-1), wanted
