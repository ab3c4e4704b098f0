"""Where attention goes: the weight of each head by distance, summed over queries, never holding T x S of them.

The output of attention is linear in what a term adds to it, so the weight that head h spends at distance d is exactly
the derivative of the sum of all outputs by an entry u[h, d] that is added once for each unit of that weight. One
`jax.vjp` at u = 0 gives all of them, through the gradient that attention has anyway: for any pattern that promises
`distances`, after all other terms, at the price of one backward pass to the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lra.attention.core import Terms
from lra.attention.pattern import Attended, Pattern
from lra.attention.terms import Positions, Range, Term, distances
from lra.attention.visibility import Array

WEIGHT_BY_DISTANCE = "weight_by_distance"
"""Name of what a `Probe` leaves among the metrics."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Probe(Term):
    """Adds the table's entries to the output, each as often as there is weight at its distance.

    Attributes:
        table: [H, N], by min(|query position - key position|, N - 1); zeros, to measure and change nothing.
        queries: [B, T], 1 for queries that are measured and 0 for others; None for all that are valid.
    """

    table: Array
    queries: Array | None = None

    def value(self, weights: Array, q_pos: Positions, k_pos: Positions) -> Array:
        """[B, R, H, q, 1], the same for all features."""
        if isinstance(q_pos, Range) and isinstance(k_pos, Range):
            entries = _toeplitz(self._at(_range_distances(q_pos, k_pos)), q_pos.length, k_pos.length)
        else:
            head = jnp.arange(len(self.table), dtype=jnp.int32)[:, None, None]
            entries = self.table[head, self._near(distances(q_pos, k_pos))]
        return (weights * entries.astype(weights.dtype)).sum(-1, keepdims=True)

    def heads(self, start: int, stop: int) -> Term:
        return Probe(self.table[start:stop], self.queries)

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


def refusal(pattern: Pattern) -> str | None:
    """Why a pattern's weights are at no distances, or None where they are."""
    for part in pattern.parts:
        name = type(part).__name__
        if not part.promise.distances:
            return f"{name} does not promise distances"
        if type(part).summarise is not Pattern.summarise:
            return f"{name} reads summaries of several tokens, which are at no one distance"
    return None


def observed(attend: Callable[[Terms], Attended], terms: Terms) -> Attended:
    """`attend(terms)`; if there is a `Probe` among the terms, with what it measures among the metrics.

    The metric `WEIGHT_BY_DISTANCE` is [H, N]: the weights at distance 0 to N - 2 and, last, at all beyond, summed over
    the probe's queries. Each that reads something adds 1 a head.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> from flax import nnx
        >>> from lra.attention import Full, Site
        >>> from lra.attention.probe import WEIGHT_BY_DISTANCE, Probe, observed
        >>> full = Full(site=Site(num_heads=1), rngs=nnx.Rngs(0))
        >>> q = k = v = np.zeros((1, 3, 1, 8), np.float32)  # equal weights: 1, then 1/2 twice, then 1/3 three times
        >>> probe = Probe(np.zeros((1, 4), np.float32), np.ones((1, 3), np.float32))
        >>> attended = observed(lambda terms: full(q, k, v, terms=terms), (probe,))
        >>> print(np.asarray(attended.metrics[WEIGHT_BY_DISTANCE]).round(2))
        [[1.83 0.83 0.33 0.  ]]
    """
    probes = [term for term in terms if isinstance(term, Probe)]
    if not probes:
        return attend(terms)
    (probe,), others = probes, [term for term in terms if not isinstance(term, Probe)]

    def changed(table: Array) -> tuple[Array, Attended]:
        attended = attend((*others, Probe(table)))
        return attended.out[..., :1], attended

    out, back, attended = jax.vjp(changed, jnp.asarray(probe.table), has_aux=True)
    queries = 1 if probe.queries is None else probe.queries[:, :, None, None]
    (weight,) = back(jnp.broadcast_to(jnp.asarray(queries, out.dtype), out.shape))
    return dataclasses.replace(attended, metrics={**attended.metrics, WEIGHT_BY_DISTANCE: weight})
