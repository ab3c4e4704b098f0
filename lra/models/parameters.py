"""Counts of parameters by module."""

from __future__ import annotations

import math
from typing import Any

import jax


def count(state: Any) -> dict[str, int]:
    """Parameters of each leaf of an `nnx.State` (arrays or shapes), by dotted name; layers stand as stacks."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    counts: dict[str, int] = {}
    for path, leaf in leaves:
        names = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path]
        if names[-1] == "value":  # the variable's own array
            names.pop()
        name = ".".join(filter(None, names))
        counts[name] = counts.get(name, 0) + math.prod(leaf.shape)
    return counts
