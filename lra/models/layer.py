"""A layer: attention and feed-forward with their norms and residual connections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from lra.attention.core import Terms
from lra.attention.layer import Attention, dropout
from lra.attention.memory import Attending, Memory
from lra.attention.visibility import Array, Visibility
from lra.models.feed_forward import FeedForward

_ATTENTION, _AFTER_ATTENTION, _FEED_FORWARD, _AFTER_FEED_FORWARD = range(4)


Effects = tuple[Any, Mapping[str, Array], Mapping[str, Array], Mapping[str, Array]]
"""What a layer gives beside its output: memory state, losses, metrics, updates of buffers."""


class Layer(nnx.Module):
    """Attention and feed-forward, each with its norm and its residual connection."""

    def __init__(
        self,
        *,
        norm: Literal["pre", "post"],
        dropout: float,
        attention: Attention,
        feed_forward: FeedForward,
        memory: Memory | None,
        width: int,
        rngs: nnx.Rngs,
    ) -> None:
        self.pre, self.dropout = norm == "pre", dropout
        self.attention, self.feed_forward, self.memory = attention, feed_forward, memory
        if memory is not None:
            attention.check(memory)
        self.attention_norm, self.feed_forward_norm = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))

    def attend(
        self,
        x: Array,
        state: Any,
        visibility: Visibility | None,
        terms: Terms,
        key: Array | None,
        train: bool,
        selection: Any = None,
    ) -> tuple[Array, Effects, Any]:
        """What attention adds to the residual stream [B, T, C], effects, and the selection (see `Attention`).

        x is what attention reads, and what memory remembers.
        """
        length, inputs, span = x.shape[1], x, x.shape[1]
        parts: tuple[tuple[str, int], ...] = ()
        losses: Mapping[str, Array] = {}
        metrics: Mapping[str, Array] = {}
        if self.memory is not None:
            past = self.memory.read(state)
            if self.attention.reach is not None and not self.memory.weights:
                past = past.newest(self.attention.reach)
            parts, span = past.parts, past.span + length
            # Zeros for empty slots: the gradient of a projection would be NaN times 0 where they hold NaN.
            filled = jnp.where(past.filled[..., None], past.inputs, jnp.zeros((), past.inputs.dtype))
            inputs = jnp.concatenate([filled.astype(x.dtype), x], axis=1)
            visibility = (visibility or Visibility()).after(past.filled, length, past.positions)
        about = {"visibility": visibility, "terms": terms, "span": span, "key": _key(key, _ATTENTION)}
        with jax.named_scope("attention"):
            inputs = self.attention_norm(inputs) if self.pre else inputs
            attended = self.attention(inputs, length, **about, train=train, parts=parts, selection=selection)
        if self.memory is not None:
            with jax.named_scope("memory"):
                told = self._attending(inputs, length, **about, selection=attended.selection)
                valid = None if visibility is None else visibility.q_valid
                state, losses, metrics = self.memory.update(state, x, valid, told, train)
        # The residual stream keeps the parameters' dtype, whatever the projections compute in.
        added = dropout(attended.out.astype(x.dtype), self._rate(train), _key(key, _AFTER_ATTENTION))
        losses, metrics = {**losses, **attended.losses}, {**metrics, **attended.metrics}
        effects = (state, losses, metrics, attended.updates)
        return added, effects, attended.selection

    def feed(self, x: Array, key: Array | None, train: bool) -> Array:
        """What the feed-forward layer adds to the residual stream x [B, T, C]."""
        with jax.named_scope("feed_forward"):
            y = self.feed_forward(
                self.feed_forward_norm(x) if self.pre else x, key=_key(key, _FEED_FORWARD), train=train
            )
        return dropout(y.astype(x.dtype), self._rate(train), _key(key, _AFTER_FEED_FORWARD))

    def __call__(
        self, x: Array, state: Any, visibility: Visibility | None, terms: Terms, key: Array | None, train: bool
    ) -> tuple[Array, Effects]:
        """[B, T, C] to [B, T, C], and the effects."""
        added, effects, _ = self.attend(x, state, visibility, terms, key, train)
        x = x + added
        x = x if self.pre else self.attention_norm(x)
        x = x + self.feed(x, key, train)
        return x if self.pre else self.feed_forward_norm(x), effects

    def _rate(self, train: bool) -> float:
        return self.dropout if train else 0.0

    def _attending(self, inputs: Array, length: int, **about: Any) -> Attending:
        """What the memory may ask of this segment's attention; no gradient flows into the layer."""

        def frozen(module: Any) -> Any:
            graph, state = nnx.split(module)
            return nnx.merge(graph, jax.lax.stop_gradient(state))

        attention, norm = frozen(self.attention), frozen(self.attention_norm) if self.pre else lambda x: x
        return Attending(
            project=lambda x: attention.project(norm(x)),
            received=lambda: attention.received(inputs, length, **about),
        )


def _key(key: Array | None, purpose: int) -> Array | None:
    return None if key is None else jax.random.fold_in(key, purpose)
