"""The type that logits, sums and losses are held in."""

from typing import Any

import jax.numpy as jnp


def accumulator(dtype: Any) -> Any:
    """At least float32: float64 for float64, float32 for all narrower types."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)
