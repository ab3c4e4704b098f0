"""Where attention goes: the weight of each head by distance, summed over queries, never holding T x S of them.

The output of attention is linear in what a term adds to it, so the weight that head h spends at distance d is exactly
the derivative of the sum of all outputs by an entry u[h, d] that is added once for each unit of that weight. One
`jax.vjp` at u = 0 gives all of them, through the gradient that attention has anyway: for any pattern that promises
`distances`, after all other terms, at the price of one backward pass to the weights.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from lra.attention.core import Terms
from lra.attention.pattern import Attended, Inputs, Pattern, Promise
from lra.attention.terms import Positions, Range, Term, distances
from lra.attention.visibility import Array, Visibility

WEIGHT_BY_DISTANCE = "weight_by_distance"
"""Name of what `Watched` reports among its metrics."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Probe(Term):
    """Adds the table's entries to the output, each as often as there is weight at its distance.

    Attributes:
        table: [H, N], by min(|query position - key position|, N - 1).
    """

    table: Array

    def value(self, weights: Array, q_pos: Positions, k_pos: Positions) -> Array:
        """[B, R, H, q, 1], the same for all features."""
        if isinstance(q_pos, Range) and isinstance(k_pos, Range):
            entries = _toeplitz(self._at(_range_distances(q_pos, k_pos)), q_pos.length, k_pos.length)
        else:
            head = jnp.arange(len(self.table), dtype=jnp.int32)[:, None, None]
            entries = self.table[head, self._near(distances(q_pos, k_pos))]
        return (weights * entries.astype(weights.dtype)).sum(-1, keepdims=True)

    def heads(self, start: int, stop: int) -> Term:
        return Probe(self.table[start:stop])

    def _at(self, distance: Array) -> Array:
        return self.table[:, self._near(distance)]

    def _near(self, distance: Array) -> Array:
        return jnp.minimum(jnp.abs(distance), self.table.shape[1] - 1)


def _range_distances(q: Range, k: Range) -> Array:
    """The q + k - 1 distances between two ranges of one step, rising."""
    return q.start - k.start + q.step * jnp.arange(1 - k.length, q.length, dtype=jnp.int32)


def _toeplitz(values: Array, rows: int, columns: int) -> Array:
    """[H, rows, columns] with entry (i, j) from `values` [H, rows + columns - 1] at i - j + columns - 1.

    A row that is repeated and read back one entry shorter moves by one a row: copies, whose transpose are sums.
    """
    heads, count = values.shape
    repeated = jnp.tile(jnp.pad(values[:, ::-1], ((0, 0), (0, 1))), (1, rows))
    moved = repeated[:, rows - 1 : rows - 1 + rows * count]
    return moved.reshape(heads, rows, count)[:, :, :columns]


class Watched(nnx.Module):
    """A pattern that also reports its weights by distance, in place of itself in an `Attention` layer.

    The metric `WEIGHT_BY_DISTANCE` is [H, reach + 1]: the weights at distance 0 to reach - 1 and, last, at all beyond,
    summed over the queries of the batch. Each query that reads something adds 1 a head; padding adds nothing.

    Args:
        pattern: what attends, to tokens each of which has a distance.
        reach: distances that are told apart.

    Raises:
        ValueError: a pattern that does not promise distances or that reads summaries of tokens, or a reach below 1.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> from flax import nnx
        >>> from lra.attention import Full, Site
        >>> from lra.attention.probe import WEIGHT_BY_DISTANCE, Watched
        >>> watched = Watched(Full(site=Site(num_heads=1), rngs=nnx.Rngs(0)), reach=3)
        >>> q = k = v = jax.numpy.zeros((1, 3, 1, 8))  # equal weights: 1, then 1/2 twice, then 1/3 three times
        >>> print(np.asarray(watched(q, k, v).metrics[WEIGHT_BY_DISTANCE]).round(2))
        [[1.83 0.83 0.33 0.  ]]
    """

    def __init__(self, pattern: Pattern, *, reach: int) -> None:
        for part in pattern.parts:
            name = type(part).__name__
            if not part.promise.distances:
                raise ValueError(f"{name} does not promise distances")
            if type(part).summarise is not Pattern.summarise:
                raise ValueError(f"{name} reads summaries of several tokens, which are at no one distance")
        if reach < 1:
            raise ValueError(f"reach needs to be at least 1, got {reach}")
        self.pattern, self.reach = pattern, reach

    @property
    def promise(self) -> Promise:
        """The pattern's own."""
        return self.pattern.promise

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
    ) -> Attended:
        """As of `Pattern`. Dropout would count as attention does: what is dropped is 0, the rest is scaled up."""

        def attend(table: Array) -> tuple[Array, Attended]:
            attended = self.pattern(
                q, k, v, inputs=inputs, visibility=visibility, terms=(*terms, Probe(table)), key=key, train=train
            )
            return attended.out[..., :1], attended

        out, back, attended = jax.vjp(attend, jnp.zeros((q.shape[2], self.reach + 1)), has_aux=True)
        (weight,) = back(jnp.ones_like(out))
        return dataclasses.replace(attended, metrics={**attended.metrics, WEIGHT_BY_DISTANCE: weight})
