"""Output heads: from hidden vectors to logits and to negative log-likelihoods."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from lra.attention.initialisers import initialiser
from lra.attention.precision import accumulator
from lra.attention.visibility import Array


class Softmax(nnx.Module):
    """A softmax over the vocabulary, in at least float32.

    Args:
        tied: whether the projection is the token embedding (Press and Wolf 2017, arXiv:1608.05859).
        bias: whether each token has a bias.
        kernel: name of the initialiser of a projection of its own.
        vocabulary_size: V, from the model. width: C, from the model.
        compute_dtype: of the operands of the product, from the model; None for that of the hidden vectors.
        rngs: random streams.
    """

    def __init__(
        self,
        *,
        tied: bool = True,
        bias: bool = False,
        kernel: str = "lecun_normal",
        vocabulary_size: int,
        width: int,
        compute_dtype: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.tied, self.compute_dtype = tied, compute_dtype
        self.projection = None if tied else nnx.Param(initialiser(kernel)(rngs.params(), (width, vocabulary_size)))
        self.bias = nnx.Param(jnp.zeros((vocabulary_size,))) if bias else None

    def logits(self, x: Array, embedding: Array) -> Array:
        """[B, T, C] to [B, T, V], with the token embedding [V, C]."""
        matrix = embedding.T if self.projection is None else self.projection[...]
        wide, narrow = accumulator(x.dtype), self.compute_dtype or x.dtype
        logits = jnp.dot(x.astype(narrow), matrix.astype(narrow), preferred_element_type=wide)
        return logits if self.bias is None else logits + self.bias[...].astype(wide)

    def score(self, x: Array, embedding: Array, targets: Array) -> tuple[Array, Array]:
        """Negative log-likelihood of each target [B, T], in nats, and whether it is the likeliest token."""
        logits = self.logits(x, embedding)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - chosen, jnp.argmax(logits, axis=-1) == targets
