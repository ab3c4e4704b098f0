"""The position-wise feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
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
        self.activation, self.dropout, self.hidden = activation, dropout, hidden
        inner = 2 * hidden if activation == "geglu" else hidden

        def linear(inputs: int, outputs: int, scale: float = 1.0) -> nnx.Linear:
            init = initialiser(kernel, scale)
            return nnx.Linear(inputs, outputs, use_bias=bias, kernel_init=init, dtype=compute_dtype, rngs=rngs)

        self.inner, self.outer = linear(width, inner), linear(hidden, width, output_scale)

    def __call__(self, x: Array, *, key: Array | None = None, train: bool = False) -> Array:
        """[B, T, C] to [B, T, C]; `key` is needed for dropout in training."""
        x = self.inner(x)
        if self.activation == "geglu":
            gate, x = x[..., : self.hidden], x[..., self.hidden :]
            x = jax.nn.gelu(gate) * x
        else:
            x = _ACTIVATIONS[self.activation](x)
        return self.outer(dropout(x, self.dropout if train else 0.0, key))
