"""The position-wise feed-forward layer."""

from __future__ import annotations

from typing import Literal

import jax
from flax import nnx

from lra.attention.initialisers import initialiser
from lra.attention.layer import dropout
from lra.attention.visibility import Array


class FeedForward(nnx.Module):
    """Two projections around an activation (Vaswani et al. 2017, arXiv:1706.03762, equation 2).

    Args:
        hidden: width between the projections; None for 4 C.
        activation: "relu", "gelu" (tanh form), or "geglu", gelu(x A) * (x B) (Shazeer 2020, arXiv:2002.05202).
        dropout: share of hidden units dropped in training.
        bias: whether the projections have biases.
        kernel: name of the initialiser.
        width: C, from the model.
        compute_dtype: of the projections, from the model; None for the parameters' own.
        rngs: random streams.
    """

    def __init__(
        self,
        *,
        hidden: int | None = None,
        activation: Literal["relu", "gelu", "geglu"] = "gelu",
        dropout: float = 0.0,
        bias: bool = True,
        kernel: str = "lecun_normal",
        width: int,
        compute_dtype: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        if activation not in ("relu", "gelu", "geglu"):
            raise ValueError(f"FeedForward.activation needs to be 'relu', 'gelu' or 'geglu', got {activation!r}")
        hidden = 4 * width if hidden is None else hidden
        if hidden < 1:
            raise ValueError(f"FeedForward.hidden needs to be at least 1, got {hidden}")
        if not 0 <= dropout < 1:
            raise ValueError(f"FeedForward.dropout needs to be at least 0 and below 1, got {dropout}")
        self.activation, self.dropout, self.hidden = activation, dropout, hidden
        inner = 2 * hidden if activation == "geglu" else hidden

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(
                inputs, outputs, use_bias=bias, kernel_init=initialiser(kernel), dtype=compute_dtype, rngs=rngs
            )

        self.inner, self.outer = linear(width, inner), linear(hidden, width)

    def __call__(self, x: Array, *, key: Array | None = None, train: bool = False) -> Array:
        """[B, T, C] to [B, T, C]; `key` is needed for dropout in training."""
        x = self.inner(x)
        if self.activation == "geglu":
            gate, x = x[..., : self.hidden], x[..., self.hidden :]
            x = jax.nn.gelu(gate) * x
        else:
            x = jax.nn.relu(x) if self.activation == "relu" else jax.nn.gelu(x)
        return self.outer(dropout(x, self.dropout if train else 0.0, key))
