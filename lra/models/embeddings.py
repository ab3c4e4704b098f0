"""Token embeddings: one vector an id, or adaptive input, whose frequent ids have wider vectors than rare ones."""

from __future__ import annotations

import abc
import itertools

import jax.numpy as jnp
from flax import nnx

from lra.attention.initialisers import initialiser
from lra.attention.visibility import Array


class TokenEmbedding(nnx.Module):
    """Vectors [..., C] for ids [...]. Subclasses are final.

    Attributes:
        vocabulary_size: V. width: C.
        cutoffs: first ids of the clusters after the first, ascending; none for one cluster of all ids.
    """

    vocabulary_size: int
    width: int
    cutoffs: tuple[int, ...] = ()

    @property
    def borders(self) -> list[tuple[int, int]]:
        """First id of each cluster and the one after its last."""
        return list(itertools.pairwise((0, *self.cutoffs, self.vocabulary_size)))

    @abc.abstractmethod
    def cluster(self, number: int) -> tuple[Array, Array | None]:
        """A cluster's table [V_i, W_i], and the projection of its vectors [W_i, C] if they have one."""

    def __call__(self, tokens: Array) -> Array:
        """The vectors of ids, in the parameters' own dtype; ids are checked by the caller on the host."""
        found, tokens = None, jnp.asarray(tokens)
        for number, (first, end) in enumerate(self.borders):
            table, projection = self.cluster(number)
            x = jnp.take(table, jnp.clip(tokens - first, 0, end - first - 1), axis=0)
            x = x if projection is None else x @ projection
            found = x if found is None else jnp.where((tokens >= first)[..., None], x, found)
        return found


class Embedding(TokenEmbedding):
    """A learned vector an id.

    Args:
        table: name of the initialiser.
        vocabulary_size: V, from the model. width: C, from the model. rngs: random streams.
    """

    def __init__(self, *, table: str = "normal_0.02", vocabulary_size: int, width: int, rngs: nnx.Rngs) -> None:
        self.vocabulary_size, self.width = vocabulary_size, width
        self.embedding = nnx.Param(initialiser(table)(rngs.params(), (vocabulary_size, width)))

    def cluster(self, number: int) -> tuple[Array, Array | None]:
        return self.embedding[...], None


class AdaptiveEmbedding(TokenEmbedding):
    """Adaptive input (Baevski and Auli 2019, arXiv:1809.10853, section 3), as Transformer-XL has it.

    Ids are ranked by frequency, as vocabularies of words are here. Cluster i = 0, 1, ... has vectors of
    `table_width / div_value**i`, which a projection brings to the model's width.

    Args:
        cutoffs: first ids of the clusters after the first, such as (20_000, 40_000, 200_000).
        div_value: by how much each cluster is narrower than the one before. With 1 all share one projection, if their
            width is not the model's; with more each has its own, the first too.
        table_width: of the first cluster's vectors; None for C.
        table: name of the initialiser of the tables. projection: of the projections.
        vocabulary_size: V, from the model. width: C, from the model. rngs: random streams.

    Raises:
        ValueError: cutoffs that do not rise from 1 to below V, or widths below 1.
    """

    def __init__(
        self,
        *,
        cutoffs: tuple[int, ...],
        div_value: int = 1,
        table_width: int | None = None,
        table: str = "normal_0.02",
        projection: str = "normal_0.01",
        vocabulary_size: int,
        width: int,
        rngs: nnx.Rngs,
    ) -> None:
        steps = (0, *cutoffs, vocabulary_size)
        if any(a >= b for a, b in itertools.pairwise(steps)):
            raise ValueError(
                f"AdaptiveEmbedding.cutoffs needs ids that rise from 1 to below the vocabulary's {vocabulary_size}, "
                f"got {cutoffs}: change them, or use Embedding for a vocabulary that small"
            )
        table_width = width if table_width is None else table_width
        if div_value < 1 or table_width // div_value ** len(cutoffs) < 1:
            raise ValueError(
                f"AdaptiveEmbedding.table_width={table_width} divided by div_value={div_value} once for each of "
                f"{len(cutoffs)} cutoffs needs to be at least 1: change one of them"
            )
        self.vocabulary_size, self.width, self.cutoffs = vocabulary_size, width, cutoffs
        widths = [table_width // div_value**n for n in range(len(cutoffs) + 1)]
        sizes = zip((b - a for a, b in itertools.pairwise(steps)), widths, strict=True)
        self.tables = nnx.List([nnx.Param(initialiser(table)(rngs.params(), size)) for size in sizes])
        projected = widths if div_value > 1 else widths[:1] if table_width != width else []
        self.projections = nnx.List(
            [nnx.Param(initialiser(projection)(rngs.params(), (each, width))) for each in projected]
        )

    def cluster(self, number: int) -> tuple[Array, Array | None]:
        if not self.projections:
            return self.tables[number][...], None
        return self.tables[number][...], self.projections[number if len(self.projections) > 1 else 0][...]
