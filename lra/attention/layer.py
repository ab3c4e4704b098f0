"""The attention layer: projections of q, k, v and the output, around a pattern that it knows by its promise only."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from lra.attention.core import Terms
from lra.attention.initialisers import initialiser
from lra.attention.memory import Memory
from lra.attention.pattern import Attended, Inputs, Pattern, Projection, Site
from lra.attention.precision import accumulator
from lra.attention.probe import observed
from lra.attention.promise import require
from lra.attention.visibility import Array, Visibility

SELECTION = "selection"
"""Name of what patterns select by content, for policies of `jax.checkpoint`, which have to save it."""


class Attention(nnx.Module):
    """Multi-head attention of a segment to itself and to the memory before it.

    Args:
        dropout: share of attention weights dropped in training.
        bias: whether projections have biases.
        kernel: name of the initialiser of projections (see `lra.attention.initialisers`).
        pattern: class (or factory) of the pattern; called with `site` and `rngs`.
        site: where this layer stands, from the model.
        memory: whether a memory stands before the keys.
        distances: whether a term by distance is used.
        output_scale: factor of the initial values of the output projection, from the model.
        rngs: random streams.

    Raises:
        ValueError: when the pattern does not promise what is asked of it.
    """

    def __init__(
        self,
        *,
        dropout: float = 0.0,
        bias: bool = False,
        kernel: str = "lecun_normal",
        pattern: Callable[..., Pattern],
        site: Site,
        memory: bool = False,
        distances: bool = False,
        output_scale: float = 1.0,
        rngs: nnx.Rngs,
    ) -> None:
        if not 0 <= dropout < 1:
            raise ValueError(f"Attention.dropout needs to be at least 0 and below 1, got {dropout}")
        self.pattern = pattern(site=dataclasses.replace(site, dropout=dropout), rngs=rngs)
        require(self.pattern.promise, type(self.pattern).__name__, memory=memory, distances=distances)
        self.num_heads, self.head_dim = site.num_heads, site.head_dim
        inner = site.num_heads * site.head_dim
        self.shares = tuple(self.pattern.shares.tolist())
        keys = self.shares.count(False) * site.head_dim

        def linear(inputs: int, outputs: int, scale: float = 1.0) -> nnx.Linear:
            init, dtype = initialiser(kernel, scale), site.compute_dtype
            return nnx.Linear(inputs, outputs, use_bias=bias, kernel_init=init, dtype=dtype, rngs=rngs)

        self.query = linear(site.width, inner)
        self.key = linear(site.width, keys) if keys else None  # of the heads that do not share the queries' projection
        self.value = linear(site.width, inner)
        self.output = linear(inner, site.width, output_scale)
        self.pattern.adopt(*self._values(bias))

    def __call__(
        self,
        inputs: Array,
        length: int,
        *,
        visibility: Visibility | None = None,
        terms: Terms = (),
        span: int | None = None,
        key: Array | None = None,
        train: bool = False,
        parts: tuple[tuple[str, int], ...] = (),
        selection: Any = None,
    ) -> Attended:
        """Attention for the last `length` of the inputs.

        Args:
            inputs: normalised layer inputs [B, S, C]: memory, then the segment's T tokens.
            length: T.
            visibility: of T queries and S keys.
            terms: additions by position.
            span: tokens from the oldest key to the last query, for keys that stand for several; None for S.
            key: random key of this layer and step.
            train: whether dropout and updates of buffers are on.
            parts: names and sizes of the parts of a memory that stand before the segment, in order.
            selection: what an earlier pass over the same inputs returned as its selection; None to select.

        Returns:
            Attended with out [B, T, C]. In training its metrics have the mean share of the weights of each part of the
            memory and of the segment: "share/memory", "share/segment".
        """
        if visibility is not None:
            padded = visibility.q_valid is not None or visibility.k_valid is not None
            packed = visibility.q_segment is not None
            require(self.pattern.promise, type(self.pattern).__name__, padding=padded, packing=packed)
        self.pattern.check_length(length)
        parts = (*parts, ("segment", length)) if parts and train and not self.pattern.own_values else ()
        attended = self._attended(
            inputs, length, lambda v: _marked(v, parts),
            visibility=visibility, terms=terms, span=span, key=key, train=train, selection=selection,
        )  # fmt: skip
        out, weights = jnp.split(attended.out, [self.head_dim], axis=-1)
        metrics = {**attended.metrics, **_by_part(parts, weights, visibility)}
        return dataclasses.replace(attended, out=self.output(out.reshape(*out.shape[:2], -1)), metrics=metrics)

    @property
    def reach(self) -> int | None:
        """Slots of memory that the pattern reads at most; None where all count, as for borders in the row."""
        return self.pattern.reach if self.pattern.promise.packing == "equal" else None

    def check(self, memory: Memory) -> None:
        """Raises `ValueError` for a memory that asks for what the pattern does not promise."""
        name = type(self.pattern).__name__
        require(self.pattern.promise, name, gaps=memory.gaps)
        if memory.weights and self.pattern.own_values:
            raise ValueError(
                f"{type(memory).__name__} asks for the weights that its slots received, but {name} reads values of its "
                "own in their place: choose another pattern or another compression"
            )

    def received(self, inputs: Array, length: int, *, terms: Terms, **options: Any) -> Array:
        """The mean weight, over heads and queries, that each of the inputs [B, S, C] receives: [B, S], no gradient.

        The output is linear in the values, so that its derivative by a value is the sum of the weights on it. Arguments
        are those of the call.
        """
        inputs, terms = jax.lax.stop_gradient((inputs, terms))

        def read(values: Array) -> Array:
            change = lambda v: jax.lax.stop_gradient(v) + values  # noqa: E731
            return self._attended(inputs, length, change, terms=terms, train=False, **options).out[..., 0]

        shape = (*inputs.shape[:2], self.num_heads, self.head_dim)
        out, pull = jax.vjp(read, jnp.zeros(shape, self.value(inputs[:, :1]).dtype))
        (weights,) = pull(jnp.full_like(out, 1 / (length * self.num_heads)))
        return weights[..., 0].sum(axis=2)

    def _attended(
        self,
        inputs: Array,
        length: int,
        change: Callable[[Array], Array],
        *,
        visibility: Visibility | None,
        terms: Terms,
        span: int | None,
        key: Array | None,
        train: bool,
        selection: Any,
    ) -> Attended:
        """What the pattern returns, with its selection, for values that are changed before it sees them."""
        q, k, v = self.project(inputs, length)
        if selection is None:
            selection = self.pattern.select(q, k, visibility=visibility, key=key, train=train)
            selection = checkpoint_name(selection, SELECTION)
        back = (inputs.shape[1] if span is None else span) - 1
        back = back if self.pattern.reach is None else min(back, self.pattern.reach)
        terms = tuple(term.within(0 if self.pattern.causal else length - 1, back) for term in terms)
        about = Inputs(inputs[:, inputs.shape[1] - length :], inputs, self.project)

        def attend(terms: Terms) -> Attended:
            return self.pattern(
                q, k, change(v), inputs=about, visibility=visibility, terms=terms, key=key, train=train,
                selection=selection,
            )  # fmt: skip

        return dataclasses.replace(observed(attend, terms), selection=selection)

    def project(self, x: Array, length: int | None = None) -> tuple[Array, Array, Array]:
        """Normalised inputs [B, S, C] to q [B, T, H, D] of the last T (None: all), k and v [B, S, H, D]."""
        asked = x if length is None or any(self.shares) else x[:, x.shape[1] - length :]
        q, v = self._heads(self.query(asked)), self._heads(self.value(x))
        k = self._joined(q, None if self.key is None else self._heads(self.key(x)))
        return q if length is None else q[:, q.shape[1] - length :], k, v

    def _joined(self, q: Array, own: Array | None) -> Array:
        """Keys [..., H, D] from queries, for heads that share their projection, and from keys of the others' own."""
        if own is None or not any(self.shares):
            return q if own is None else own
        ranks = itertools.count(len(self.shares))
        return jnp.concatenate([q, own], axis=-2)[..., [h if s else next(ranks) for h, s in enumerate(self.shares)], :]

    def _values(self, bias: bool) -> list[Projection]:
        """The projections of all heads' q, k and v."""

        def values(name: str) -> list[Array | None]:
            linears = (self.query, self.key, self.value)
            read = (None if each is None else self._heads(getattr(each, name)[...]) for each in linears)
            q, k, v = read
            return [q, self._joined(q, k), v]

        kernels, biases = values("kernel"), values("bias") if bias else [None] * 3
        return [Projection(kernel, b) for kernel, b in zip(kernels, biases, strict=True)]

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)


def _marked(v: Array, parts: tuple[tuple[str, int], ...]) -> Array:
    """Values [B, S, H, E] with a column for each part behind, 1 on its keys: attention makes it the part's weight."""
    if not parts:
        return v
    sizes = [size for _, size in parts]
    columns = np.repeat(np.eye(len(parts), dtype=bool), sizes, axis=0)[:, None]  # [S, 1, P]
    return jnp.concatenate([v, jnp.broadcast_to(columns, (*v.shape[:-1], len(parts))).astype(v.dtype)], axis=-1)


def _by_part(parts: tuple[tuple[str, int], ...], weights: Array, visibility: Visibility | None) -> Mapping[str, Array]:
    """The mean of the weights [B, T, H, P] over heads and valid queries, by part; 0 where no query is valid."""
    weights = jax.lax.stop_gradient(weights.astype(accumulator(weights.dtype)))
    valid = jnp.ones((1, 1), bool) if visibility is None or visibility.q_valid is None else visibility.q_valid
    counted = jnp.broadcast_to(valid[..., None], weights.shape[:3]).astype(weights.dtype)
    means = [(weights[..., i] * counted).sum() / jnp.maximum(counted.sum(), 1) for i in range(len(parts))]
    return {f"share/{name}": mean for (name, _), mean in zip(parts, means, strict=True)}


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Inverted dropout; the identity at rate 0.

    Raises:
        ValueError: a rate without a key.
    """
    if not rate:
        return x
    if key is None:
        raise ValueError(f"dropout={rate} needs a random key: pass key=jax.random.key(seed)")
    keep = 1 - rate
    return jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep, jnp.zeros((), x.dtype))
