"""The attention layer: projections of q, k, v and the output, around a pattern that it knows by its promise only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from lra.attention.core import Terms
from lra.attention.initialisers import initialiser
from lra.attention.pattern import Attended, Inputs, Pattern, Projection, Site, require
from lra.attention.probe import observed
from lra.attention.visibility import Array, Visibility


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
        if self.pattern.projections != "qkv":
            name = type(self.pattern).__name__
            raise ValueError(f"Attention projects q, k and v, but {name} needs {self.pattern.projections}")
        self.num_heads, self.head_dim = site.num_heads, site.head_dim
        inner = site.num_heads * site.head_dim

        def linear(inputs: int, outputs: int, scale: float = 1.0) -> nnx.Linear:
            init, dtype = initialiser(kernel, scale), site.compute_dtype
            return nnx.Linear(inputs, outputs, use_bias=bias, kernel_init=init, dtype=dtype, rngs=rngs)

        self.query, self.key, self.value = (linear(site.width, inner) for _ in range(3))
        self.output = linear(inner, site.width, output_scale)
        self.pattern.adopt(*(self._values(linear) for linear in (self.query, self.key, self.value)))

    def __call__(
        self,
        inputs: Array,
        length: int,
        *,
        visibility: Visibility | None = None,
        terms: Terms = (),
        key: Array | None = None,
        train: bool = False,
    ) -> Attended:
        """Attention for the last `length` of the inputs.

        Args:
            inputs: normalised layer inputs [B, S, C]: memory, then the segment's T tokens.
            length: T.
            visibility: of T queries and S keys.
            terms: additions by position.
            key: random key of this layer and step.
            train: whether dropout and updates of buffers are on.

        Returns:
            Attended with out [B, T, C].
        """
        if visibility is not None:
            padded = visibility.q_valid is not None or visibility.k_valid is not None
            packed = visibility.q_segment is not None
            require(self.pattern.promise, type(self.pattern).__name__, padding=padded, packing=packed)
        own = inputs[:, inputs.shape[1] - length :]
        q, k, v = self._heads(self.query(own)), self._heads(self.key(inputs)), self._heads(self.value(inputs))

        def attend(terms: Terms) -> Attended:
            made_of = Inputs(own, inputs, self._project)
            return self.pattern(q, k, v, inputs=made_of, visibility=visibility, terms=terms, key=key, train=train)

        attended = observed(attend, terms)
        joined = attended.out.reshape(*attended.out.shape[:2], -1)
        return dataclasses.replace(attended, out=self.output(joined))

    def _project(self, x: Array) -> tuple[Array, Array, Array]:
        return self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))

    def _values(self, linear: nnx.Linear) -> Projection:
        heads = self.num_heads, self.head_dim
        kernel = linear.kernel[...].reshape(-1, *heads)
        return Projection(kernel, None if linear.bias is None else linear.bias[...].reshape(heads))

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], self.num_heads, self.head_dim)


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
