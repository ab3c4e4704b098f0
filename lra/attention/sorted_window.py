"""Windows over tokens sorted by a label: the strictly causal way to read by content. O(R T W) time, O(R T) memory.

Nobody has published this. LSH attention (Kitaev et al. 2020, arXiv:2001.04451) and routing (Roy et al. 2020,
arXiv:2003.05997) let later tokens decide who shares a chunk or a cluster with whom. Here a token's label depends on the
token alone, and a query reads the newest keys of its own label, so that the past stays as it is. Decoding would need a
ring of W keys a label.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from lra.attention import arrange, core
from lra.attention.arrange import Entries, Labels
from lra.attention.core import Terms
from lra.attention.pattern import default_scale
from lra.attention.promise import EVERYTHING
from lra.attention.rows import harmless, lengths, pick
from lra.attention.terms import prepare
from lra.attention.visibility import Array, Entry, Visibility


@dataclasses.dataclass(frozen=True)
class SortedWindowRule:
    """The newest `window` keys of the query's own label, its own key included, in any of several rounds.

    `part` is the number of one of the disjoint parts that it is computed by: what round `part` allows and no earlier
    one does; None for the union.
    """

    window: int
    rounds: int
    part: int | None = None

    def __call__(self, q: Entry, k: Entry) -> Array:
        if self.part is None:
            return functools.reduce(jnp.logical_or, [self._round(r, q, k) for r in range(self.rounds)])
        allowed = self._round(self.part, q, k)
        for earlier in range(self.part):
            allowed = allowed & ~self._round(earlier, q, k)
        return allowed

    def _round(self, r: int, q: Entry, k: Entry) -> Array:
        """Tokens of a label stand side by side in the order of round r."""
        back = q.labels[f"rank{r}"] - k.labels[f"rank{r}"]
        return (q.labels[f"label{r}"] == k.labels[f"label{r}"]) & (back >= 0) & (back < self.window)


STRICT = dataclasses.replace(EVERYTHING, bidirectional=False, sorts=True)
"""What patterns promise that are such windows."""


def check_window(window: int) -> None:
    """Raises for a window that makes no sense."""
    if window < 1:
        raise ValueError(
            f"window counts keys of a label up to the query's own and needs to be at least 1, got {window}"
        )


def check_labels(name: str, labels: int, size: int) -> None:
    """Raises for more labels than `_order` can sort S keys by; one more stands for invalid keys."""
    if (labels + 1) * size >= 2**31:
        raise ValueError(f"{labels} {name} x {size} keys exceed 32 bits: use at most {2**31 // size - 2} {name}")


def sorted_labels(labels: Array, length: int, valid: Array | None) -> Labels:
    """What the rule reads: labels and ranks of all rounds, for T queries and S keys, from labels [B, S, H, R]."""
    known: dict[str, Array] = {}
    for r in range(labels.shape[-1]):
        label = labels[..., r]
        known |= {f"label{r}": label, f"rank{r}": _inverse(_order(label, valid))}
    return {name: x[:, -length:] for name, x in known.items()}, known


@functools.partial(jax.jit, static_argnames=("window", "scale", "dropout", "precision"))
def sorted_window(
    q: Array,
    k: Array,
    v: Array,
    *,
    labels: Array,
    window: int,
    scale: float | None = None,
    visibility: Visibility | None = None,
    terms: Terms = (),
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> Array:
    """Attention to the newest `window` keys of the query's own label, the query's own key included.

    With several labels a token, a query reads the keys of all these windows; no key counts twice.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D], S >= T, the last T being the queries' own tokens. v: [B, S, H, E].
        labels: of the keys' tokens in each of R rounds [B, S, H, R], integers from 0 that depend on the token alone;
            labels x S below 2**31.
        window: keys of a label, the query's own included.
        scale, visibility, terms, dropout, key, precision: as of `full`.

    Returns:
        [B, T, H, E] in v's dtype; exactly 0 where a query may read nothing.

    Raises:
        ValueError: a window below 1, shapes that do not fit.

    Example:
        >>> import jax, lra.attention
        >>> from lra.attention.sorted_window import sorted_window
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 7, 2, 8))
        >>> labels = jax.numpy.zeros((1, 7, 2, 1), jax.numpy.int32)  # one label: a sliding window
        >>> same = lra.attention.sliding_window(q, k, v, window=3)
        >>> bool(jax.numpy.allclose(sorted_window(q, k, v, labels=labels, window=3), same, atol=1e-6))
        True
    """
    check_window(window)
    visibility = visibility or Visibility()
    length, size = lengths(q, k, visibility)
    width = q.shape[-1]
    q_position, k_position = (jnp.asarray(x) for x in visibility.positions(length, size))
    q, k = prepare(terms, harmless(q, visibility.q_valid), k, q_position, k_position)
    k, v = harmless(k, visibility.k_valid), harmless(v, visibility.k_valid)
    older = size - length  # stand among the queries, and ask nothing
    q = jnp.pad(q, ((0, 0), (older, 0), (0, 0), (0, 0)))
    asks = jnp.ones((1, length), bool) if visibility.q_valid is None else visibility.q_valid
    asks = None if visibility.q_valid is None and not older else jnp.pad(asks, ((0, 0), (older, 0)))
    segment = visibility.q_segment
    segment = None if segment is None else jnp.pad(segment, ((0, 0), (older, 0)))
    if visibility.q_position is not None:
        q_position = jnp.pad(q_position, ((0, 0), (older, 0)))
    else:
        q_position = k_position
    _, known = sorted_labels(labels, size, visibility.k_valid)
    queries = Entries(q_position, asks, segment, known)
    keys = Entries(k_position, visibility.k_valid, visibility.k_segment, known)
    block = min(arrange.BLOCK, max(8, window), size)
    rounds = labels.shape[-1]

    def near(rows: range, columns: range) -> bool:
        return columns.start < rows.stop and rows.start - columns.stop + 1 < window

    def part(r: int) -> core.Partial:
        order = _order(labels[..., r], visibility.k_valid)
        inverse = known[f"rank{r}"]
        sort = functools.partial(_permuted, order=order, inverse=inverse)
        grid = arrange.tiles(
            sort(q), sort(k), sort(v), *(jax.tree.map(lambda x: pick(x, order), side) for side in (queries, keys)),
            pairs=near, tile=(block, block),
        )  # fmt: skip
        done = core.attend(
            grid, rule=SortedWindowRule(window, rounds, r), scale=default_scale(scale, width), terms=terms,
            dropout=dropout, key=core.part_key(key, r), precision=precision,
        )  # fmt: skip
        return jax.tree.map(lambda x: _permuted(x, order=inverse, inverse=order)[:, older:], done)

    return core.union(*(part(r) for r in range(rounds))).out.astype(v.dtype)


def _order(label: Array, valid: Array | None) -> Array:
    """Indices of the tokens sorted by (label, index) [B, S, H], invalid ones last."""
    size = label.shape[1]
    label = label.astype(jnp.int32)
    if valid is not None:
        label = jnp.where(valid[..., None], label, label.max() + 1)
    place = label.swapaxes(1, 2) * size + jnp.arange(size, dtype=jnp.int32)
    return (jnp.sort(place, axis=-1) % size).swapaxes(1, 2)


def _inverse(order: Array) -> Array:
    """The place of each token in an order."""
    size = order.shape[1]

    def row(order: Array) -> Array:
        return jnp.zeros_like(order).at[order].set(jnp.arange(size, dtype=order.dtype), unique_indices=True)

    return jax.vmap(jax.vmap(row, 1, 1))(order)


def _permuted(x: Array, *, order: Array, inverse: Array) -> Array:
    """Entries [B, L, H, ...] in another order; the gradient is the way back, where a gather's would be a scatter."""
    return _permute(x, order, inverse)


@jax.custom_vjp
def _permute(x: Array, order: Array, inverse: Array) -> Array:
    return pick(x, order)


def _permute_forward(x: Array, order: Array, inverse: Array) -> tuple[Array, Any]:
    return pick(x, order), (order, inverse)


def _permute_backward(saved: Any, cotangent: Array) -> tuple[Array, None, None]:
    _, inverse = saved
    return pick(cotangent, inverse), None, None


_permute.defvjp(_permute_forward, _permute_backward)
