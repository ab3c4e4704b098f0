"""Terms that hold vectors by distance: Transformer-XL, Shaw et al., and one learned table.

All three are one computation (`DistanceTerm`). Between two ranges of positions a block multiplies its queries by the
vectors of its 2b - 1 distances and skews the products, so that the price is that of one more product of the block.
Elsewhere it gathers the vectors of its pairs, some queries at a time, which costs several times that.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra.attention.initialisers import initialiser
from lra.attention.layer import dropout as drop
from lra.attention.precision import accumulator
from lra.attention.terms import Positions, Range, Term, TermModule
from lra.attention.visibility import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DistanceTerm(Term):
    """Adds `(q + position) . keys[distance]` to the logits and `weights . values[distance]` to the output.

    Row r of a table is the vector of distance `last - r`, query position minus key position; beyond its ends are the
    vectors of its ends. The content bias goes into the queries, so that it meets the keys.

    Attributes:
        keys: [H or 1, N, D], or None.
        values: [H or 1, N, E], or None.
        content: u [H, D], added to the queries that meet keys. position: v [H, D], to those that meet distances.
        last: distance of the first row.
        clipped: False where nothing stands for distances beyond the ends, which `within` then refuses.
    """

    keys: Array | None = None
    values: Array | None = None
    content: Array | None = None
    position: Array | None = None
    last: int = dataclasses.field(default=0, metadata={"static": True})
    clipped: bool = dataclasses.field(default=True, metadata={"static": True})

    def within(self, ahead: int, back: int) -> Term:
        if not self.clipped and ahead:
            raise ValueError("LearnedDistance has no vectors for keys after the query: use ShawRelative or XLRelative")
        if not self.clipped and back > self.last:
            raise ValueError(
                f"the table has vectors for distances up to {self.last}, but {back} can occur: raise "
                f"LearnedDistance.length to {back + 1}, or shorten the segment, its memory or the pattern's window"
            )
        return self

    def query(self, q: Array, position: Array) -> Array:
        return q if self.content is None else q + self.content.astype(q.dtype)

    def score(self, q: Array, q_pos: Positions, k_pos: Positions, scale: float) -> Array | None:
        if self.keys is None:
            return None
        if self.content is not None:
            q = q - self.content.astype(q.dtype)[:, None]
        if self.position is not None:
            q = q + self.position.astype(q.dtype)[:, None]
        rows = self.keys.astype(q.dtype)
        if isinstance(q_pos, Range) and isinstance(k_pos, Range):
            x, near = self._parts(q, rows, q_pos, k_pos)
            y = _skew(_product(x, near), k_pos.length)
            return scale * y.reshape(*q.shape[:-1], k_pos.length)

        def pairs(q: Array, vectors: Array) -> Array:
            return (q[..., None, :] * vectors).sum(-1)

        return scale * self._gathered(pairs, rows, q, q_pos, k_pos)

    def value(self, weights: Array, q_pos: Positions, k_pos: Positions) -> Array | None:
        if self.values is None:
            return None
        rows = self.values.astype(weights.dtype)
        if isinstance(q_pos, Range) and isinstance(k_pos, Range):
            x, near = self._parts(weights, rows, q_pos, k_pos)
            y = _product(_unskew(x), near.swapaxes(-1, -2))
            return y.reshape(*weights.shape[:-1], y.shape[-1])

        def pairs(weights: Array, vectors: Array) -> Array:
            return (weights[..., None] * vectors).sum(-2)

        return self._gathered(pairs, rows, weights, q_pos, k_pos)

    def heads(self, start: int, stop: int) -> Term:
        return jax.tree.map(lambda x: x if len(x) == 1 else x[start:stop], self)

    def _parts(self, x: Array, rows: Array, q_pos: Range, k_pos: Range) -> tuple[Array, Array]:
        """Parts of the queries of x [B, R, H, q, n], with the vectors of their distances and of one more.

        Parts [B, R, H, p, q', n] go with vectors [H or 1, p, q' + k, D] from the largest distance down: a part of the
        queries has fewer distances to the keys than all of them.
        """
        parts = 2 if q_pos.length % 2 == 0 and q_pos.length >= 64 else 1  # fastest of 1, 2, 4 for 128 and 256
        size, count = q_pos.length // parts, q_pos.length + k_pos.length
        first = self.last - (q_pos.start - k_pos.start) - q_pos.step * (q_pos.length - 1)
        if q_pos.step == 1:  # one slice: its gradient is one addition
            before, after = (jnp.repeat(rows[:, n : n + 1], count, axis=1) for n in (0, rows.shape[1] - 1))
            start = jnp.clip(first + count, 0, count + rows.shape[1])
            near = jax.lax.dynamic_slice_in_dim(jnp.concatenate([before, rows, after], axis=1), start, count, axis=1)
        else:
            index = first + q_pos.step * jnp.arange(count, dtype=jnp.int32)
            near = rows[:, jnp.clip(index, 0, rows.shape[1] - 1)]
        width = size + k_pos.length
        near = jnp.stack([near[:, count - width - n : count - n] for n in range(0, q_pos.length, size)], axis=1)
        return x.reshape(*x.shape[:-2], parts, size, x.shape[-1]), near

    def _gathered(
        self, pairs: Callable[[Array, Array], Array], rows: Array, x: Array, q_pos: Positions, k_pos: Positions
    ) -> Array:
        """`pairs(x[..., q, :], vectors)` for each query of x [B, R, H, q, ...] with vectors [.., H or 1, k, D]."""
        asking, keys = (p.positions if isinstance(p, Range) else jnp.asarray(p) for p in (q_pos, k_pos))
        asking, keys = (p.reshape((1,) * (4 - p.ndim) + p.shape) for p in (asking, keys))
        head = jnp.arange(len(rows), dtype=jnp.int32)[:, None]

        @jax.checkpoint  # the vectors are gathered again rather than kept
        def one(query: tuple[Array, Array]) -> Array:
            x, place = query
            index = jnp.clip(self.last - (place[..., None] - keys), 0, rows.shape[1] - 1)
            return pairs(x, rows[head, index])

        size = x.shape[3]
        asking = jnp.broadcast_to(asking, (*asking.shape[:3], size))
        together = max(1, size // rows.shape[-1])  # as many vectors at a time as there are scores
        out = jax.lax.map(one, (jnp.moveaxis(x, 3, 0), jnp.moveaxis(asking, 3, 0)), batch_size=together)
        return jnp.moveaxis(out, 0, 3)


def _product(x: Array, rows: Array) -> Array:
    """Product of x [B, R, H, p, q, d] and rows [H or 1, p, n, d], over d: [B, R, H, p, q, n].

    The rows come second, which `jnp.einsum` does not promise: products by query are read along n.
    """
    if len(rows) == 1:
        return jnp.moveaxis(jax.lax.dot_general(x, rows[0], (((5,), (2,)), ((3,), (0,)))), 0, 3)
    return jnp.moveaxis(jax.lax.dot_general(x, rows, (((5,), (3,)), ((2, 3), (0, 1)))), (0, 1), (2, 3))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _skew(x: Array, keys: int) -> Array:
    """[..., q, q + k] by falling distance to [..., q, k] by key: row i starts at column q - 1 - i.

    As Dai et al. 2019, appendix B, but with both signs of distance, so that no mask has to hide anything; and the
    column that they pad is a product like the others, so that products are read where they lie.
    """
    queries, count = x.shape[-2], x.shape[-1] - 1
    x = x.reshape(*x.shape[:-2], -1)[..., queries - 1 : queries - 1 + queries * count]
    return x.reshape(*x.shape[:-1], queries, count)[..., :keys]


@jax.custom_vjp
def _unskew(x: Array) -> Array:
    """[..., q, k] by key to [..., q, q + k] by falling distance, 0 where there is no key: `_skew` transposed.

    With one padding, where JAX's transpose of `_skew` has two.
    """
    queries, keys = x.shape[-2:]
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((1, 1), (0, queries - 1)))
    x = x.reshape(*x.shape[:-2], -1)[..., keys : keys + queries * (queries + keys)]
    return x.reshape(*x.shape[:-1], queries, queries + keys)


_skew.defvjp(lambda x, keys: (_skew(x, keys), None), lambda keys, _, x: (_unskew(x),))
_unskew.defvjp(lambda x: (_unskew(x), x.shape[-1]), lambda keys, x: (_skew(x, keys),))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class XLTerm(Term):
    """See `XLRelative`: `within` makes the vectors of the distances that can occur."""

    projection: Array  # W_r [C, H, D]
    content: Array  # u [H, D]
    position: Array  # v [H, D]
    dropout_key: Array | None
    clamp_length: int | None = dataclasses.field(metadata={"static": True})
    dropout: float = dataclasses.field(metadata={"static": True})

    def within(self, ahead: int, back: int) -> Term:
        clamp = max(ahead, back) if self.clamp_length is None else self.clamp_length
        first, last = -min(ahead, clamp), min(back, clamp)
        waves = sinusoids(np.arange(last, first - 1, -1), len(self.projection), accumulator(self.projection.dtype))
        waves = drop(waves, self.dropout if self.dropout_key is not None else 0.0, self.dropout_key)
        keys = jnp.einsum("nc,chd->hnd", waves.astype(self.projection.dtype), self.projection)
        return DistanceTerm(keys=keys, content=self.content, position=self.position, last=last)

    def query(self, q: Array, position: Array) -> Array:
        raise ValueError("the term has no vectors yet: call `within(ahead, back)` with the distances that can occur")


def sinusoids(distance: np.ndarray, width: int, dtype: jnp.dtype) -> Array:
    """[N] to [N, C], sines then cosines of distance * 10000^(-2i/C)."""
    frequency = 10_000.0 ** -(np.arange(0, width, 2) / width)
    angle = jnp.asarray(distance, dtype)[:, None] * jnp.asarray(frequency, dtype)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByLayer(Term):
    """A term whose arrays have a leading axis of layers; `layer(i)` is layer i's."""

    term: Term

    def layer(self, number: Array | int) -> Term:
        return jax.tree.map(lambda x: x[number], self.term)

    def query(self, q: Array, position: Array) -> Array:
        raise ValueError("each layer has a term of its own: call `layer(i)` with the layer's number")


class XLRelative(TermModule):
    """Relative positions of Transformer-XL (Dai et al. 2019, arXiv:1901.02860, section 3.3).

    A logit is ((q + u) . k + (q + v) . W_r s(distance)) * scale with sinusoids s, [sin | cos] as in the released code.
    W_r belongs to a layer.

    Args:
        clamp_length: distances beyond this count as this; None for no bound. Protocols may have their own.
        untie: a pair u and v for each layer (`untie_r`, the released WikiText-103 and One Billion Word models) in
            place of one pair for all.
        dropout: share of the sinusoids' features dropped in training, the same in all layers.
        kernel: name of the initialiser of W_r. bias: of u and v.
        num_layers: L. width: C. num_heads: H. head_dim: D. rngs: random streams.

    Example:
        >>> import jax, lra.attention
        >>> from flax import nnx
        >>> module = lra.attention.XLRelative(num_layers=1, width=16, num_heads=2, head_dim=8, rngs=nnx.Rngs(0))
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 7, 2, 8))
        >>> lra.attention.full(q, k, v, terms=(module().layer(0).within(ahead=0, back=6),)).shape
        (1, 7, 2, 8)
    """

    def __init__(
        self,
        *,
        clamp_length: int | None = None,
        untie: bool = False,
        dropout: float = 0.0,
        kernel: str = "lecun_normal",
        bias: str = "normal_0.02",
        num_layers: int,
        width: int,
        num_heads: int,
        head_dim: int,
        rngs: nnx.Rngs,
    ) -> None:
        if clamp_length is not None and clamp_length < 1:
            raise ValueError(f"XLRelative.clamp_length needs to be at least 1, or None for none, got {clamp_length}")
        if not 0 <= dropout < 1:
            raise ValueError(f"XLRelative.dropout needs to be at least 0 and below 1, got {dropout}")
        if width % 2:
            raise ValueError(f"XLRelative needs an even width for sines and cosines, got {width}")
        self.clamp_length, self.dropout, self.num_layers = clamp_length, dropout, num_layers
        pairs = num_layers if untie else 1
        self.projection = nnx.Param(
            _by_layer(initialiser(kernel), rngs, num_layers, width, num_heads * head_dim).reshape(
                num_layers, width, num_heads, head_dim
            )
        )
        self.content_bias, self.position_bias = (
            nnx.Param(_by_layer(initialiser(bias), rngs, pairs, num_heads, head_dim)) for _ in range(2)
        )

    def __call__(self, key: Array | None = None) -> Term:
        u, v = (
            jnp.broadcast_to(x[...], (self.num_layers, *x.shape[1:])) for x in (self.content_bias, self.position_bias)
        )
        keys = None if key is None else jnp.broadcast_to(key, (self.num_layers, *key.shape))
        return ByLayer(XLTerm(self.projection[...], u, v, keys, self.clamp_length, self.dropout))


class ShawRelative(TermModule):
    """Relative positions of Shaw et al. (2018, arXiv:1803.02155, equations 3 and 4), clipped, a table for each layer.

    Args:
        max_distance: distances beyond this, ahead or back, count as this.
        values: whether values have vectors too (equation 3), besides keys (equation 4).
        per_head: a table for each head, in place of one for all heads of a layer (the paper has both, section 4.1).
        table: name of the initialiser.
        num_layers: L. width: C. num_heads: H. head_dim: D. rngs: random streams.
    """

    def __init__(
        self,
        *,
        max_distance: int,
        values: bool = True,
        per_head: bool = False,
        table: str = "normal_0.02",
        num_layers: int,
        width: int,
        num_heads: int,
        head_dim: int,
        rngs: nnx.Rngs,
    ) -> None:
        if max_distance < 1:
            raise ValueError(f"ShawRelative.max_distance needs to be at least 1, got {max_distance}")
        self.max_distance = max_distance
        shape = num_heads if per_head else 1, 2 * max_distance + 1, head_dim  # distances rise
        self.keys = nnx.Param(_by_layer(initialiser(table), rngs, num_layers, *shape))
        self.values = nnx.Param(_by_layer(initialiser(table), rngs, num_layers, *shape)) if values else None

    def __call__(self, key: Array | None = None) -> Term:
        keys, values = (None if x is None else x[...][:, :, ::-1] for x in (self.keys, self.values))
        return ByLayer(DistanceTerm(keys=keys, values=values, last=self.max_distance))


class LearnedDistance(TermModule):
    """A learned key for each distance, one table for all heads and layers (Sukhbaatar et al. 2019, arXiv:1905.07799).

    A logit is (q . k + q . table[distance]) * scale. Distances that the table does not hold are refused.

    Args:
        length: distances 0..length-1.
        table: name of the initialiser.
        num_layers: L. width: C. num_heads: H. head_dim: D. rngs: random streams.
    """

    def __init__(
        self,
        *,
        length: int,
        table: str = "normal_1",
        num_layers: int,
        width: int,
        num_heads: int,
        head_dim: int,
        rngs: nnx.Rngs,
    ) -> None:
        if length < 1:
            raise ValueError(f"LearnedDistance.length needs to be at least 1, got {length}")
        self.table = nnx.Param(initialiser(table)(rngs.params(), (length, head_dim)))

    def __call__(self, key: Array | None = None) -> Term:
        return DistanceTerm(self.table[...][None, ::-1], last=len(self.table[...]) - 1, clipped=False)


def _by_layer(init: Callable[..., Array], rngs: nnx.Rngs, layers: int, *shape: int) -> Array:
    """[L, ...]: layer i from its own key, whatever L is."""
    key = rngs.params()
    return jnp.stack([init(jax.random.fold_in(key, i), shape) for i in range(layers)])
