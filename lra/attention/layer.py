"""The attention layer: projections of q, k, v and the output, around a pattern that it knows by its promise only."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from lra.attention.core import Terms
from lra.attention.initialisers import initialiser
from lra.attention.pattern import Attended, Inputs, Pattern, Projection, Site, require
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
            selection: what an earlier pass over the same inputs returned as its selection; None to select.

        Returns:
            Attended with out [B, T, C].
        """
        if visibility is not None:
            padded = visibility.q_valid is not None or visibility.k_valid is not None
            packed = visibility.q_segment is not None
            require(self.pattern.promise, type(self.pattern).__name__, padding=padded, packing=packed)
        self.pattern.check_length(length)
        if span is None:
            inputs, visibility = self._within_reach(inputs, length, visibility)
        own = inputs[:, inputs.shape[1] - length :]
        q, k, v = self._project(inputs, length)
        if selection is None:
            selection = self.pattern.select(q, k, visibility=visibility, key=key, train=train)
            selection = checkpoint_name(selection, SELECTION)
        back = (inputs.shape[1] if span is None else span) - 1
        back = back if self.pattern.reach is None else min(back, self.pattern.reach)
        terms = tuple(term.within(0 if self.pattern.causal else length - 1, back) for term in terms)
        attended = self.pattern(
            q, k, v, inputs=Inputs(own, inputs, self._project), visibility=visibility, terms=terms, key=key,
            train=train, selection=selection,
        )  # fmt: skip
        joined = attended.out.reshape(*attended.out.shape[:2], -1)
        return dataclasses.replace(attended, out=self.output(joined), selection=selection)

    def _within_reach(
        self, inputs: Array, length: int, visibility: Visibility | None
    ) -> tuple[Array, Visibility | None]:
        """Without the oldest inputs, where the pattern reads none of them: they need no keys and values."""
        reach, bordered = self.pattern.reach, self.pattern.promise.packing != "equal"
        if reach is None or bordered or inputs.shape[1] <= reach + length:  # borders are counted from the first key
            return inputs, visibility
        keys = reach + length
        return inputs[:, -keys:], None if visibility is None else visibility.newest(keys)

    def _project(self, x: Array, length: int | None = None) -> tuple[Array, Array, Array]:
        """[B, S, C] to q [B, T, H, D] of the last T inputs (None: all), k and v [B, S, H, D]."""
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
