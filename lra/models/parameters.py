"""Names and counts of parameters."""

from __future__ import annotations

import math
from typing import Any

import jax


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by dotted name, such as `stack.final_norm.scale`; layers stand as stacks."""

    def name(path: tuple[Any, ...]) -> str:
        return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")

    return {name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def count(state: Any) -> dict[str, int]:
    """Parameters of each leaf of an `nnx.State` (arrays or shapes), by dotted name."""
    return {name: math.prod(leaf.shape) for name, leaf in named(state).items()}
