"""The position-wise feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from lra.attention.initialisers import initialiser
from lra.attention.layer import dropout
from lra.attention.visibility import Array

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}
"""Those of one argument, by name."""


class FeedForward(nnx.Module):
    """Two projections around an activation (Vaswani et al. 2017, arXiv:1706.03762, equation 2).

    Args:
        hidden: width between the projections; None for 4 C.
        activation: "relu", "gelu" (tanh form), "quick_gelu", x * sigmoid(1.702 x) (Hendrycks and Gimpel 2016,
            arXiv:1606.08415, section 2; used by Child et al. 2019), or "geglu", gelu(x A) * (x B) (Shazeer 2020,
            arXiv:2002.05202).
        dropout: share of hidden units dropped in training.
        bias: whether the projections have biases.
        kernel: name of the initialiser.
        chunk: positions computed at a time, for memory that does not grow with hidden units times T (Kitaev et al.
            2020, arXiv:2001.04451, section 3); None for all at once, with the same result. Each chunk draws its own
            dropout.
        width: C, from the model.
        output_scale: factor of the initial values of the second projection, from the model.
        compute_dtype: of the projections, from the model; None for the parameters' own.
        rngs: random streams.
    """

    def __init__(
        self,
        *,
        hidden: int | None = None,
        activation: Literal["relu", "gelu", "quick_gelu", "geglu"] = "gelu",
        dropout: float = 0.0,
        bias: bool = True,
        kernel: str = "lecun_normal",
        chunk: int | None = None,
        width: int,
        output_scale: float = 1.0,
        compute_dtype: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        if activation != "geglu" and activation not in _ACTIVATIONS:
            known = ", ".join(map(repr, [*_ACTIVATIONS, "geglu"]))
            raise ValueError(f"FeedForward.activation needs to be one of {known}, got {activation!r}")
        hidden = 4 * width if hidden is None else hidden
        if hidden < 1:
            raise ValueError(f"FeedForward.hidden needs to be at least 1, got {hidden}")
        if not 0 <= dropout < 1:
            raise ValueError(f"FeedForward.dropout needs to be at least 0 and below 1, got {dropout}")
        if chunk is not None and chunk < 1:
            raise ValueError(
                f"FeedForward.chunk needs to be at least 1, or None for all positions at once, got {chunk}"
            )
        self.activation, self.dropout, self.hidden, self.chunk = activation, dropout, hidden, chunk
        inner = 2 * hidden if activation == "geglu" else hidden

        def linear(inputs: int, outputs: int, scale: float = 1.0) -> nnx.Linear:
            init = initialiser(kernel, scale)
            return nnx.Linear(inputs, outputs, use_bias=bias, kernel_init=init, dtype=compute_dtype, rngs=rngs)

        self.inner, self.outer = linear(width, inner), linear(hidden, width, output_scale)

    def __call__(self, x: Array, *, key: Array | None = None, train: bool = False) -> Array:
        """[B, T, C] to [B, T, C]; `key` is needed for dropout in training."""
        rate, length = self.dropout if train else 0.0, x.shape[1]
        if self.chunk is None or self.chunk >= length:
            return self._project(x, rate, key)
        count = -(-length // self.chunk)
        x = jnp.pad(x, ((0, 0), (0, count * self.chunk - length), (0, 0)))
        chunks = jnp.moveaxis(x.reshape(x.shape[0], count, self.chunk, -1), 1, 0)

        @jax.checkpoint  # or the loop would keep the hidden units of all chunks
        def one(slices: tuple[Array, Array]) -> Array:
            n, chunk = slices
            return self._project(chunk, rate, None if key is None else jax.random.fold_in(key, n))

        chunks = jnp.moveaxis(jax.lax.map(one, (jnp.arange(count), chunks)), 0, 1)
        return chunks.reshape(*x.shape[:2], -1)[:, :length]

    def _project(self, x: Array, rate: float, key: Array | None) -> Array:
        x = self.inner(x)
        if self.activation == "geglu":
            gate, x = x[..., : self.hidden], x[..., self.hidden :]
            x = jax.nn.gelu(gate) * x
        else:
            x = _ACTIVATIONS[self.activation](x)
        return self.outer(dropout(x, rate, key))
