"""Initialisers by name, as configurations bind them."""

from __future__ import annotations

import difflib
from typing import Any

from jax.nn import initializers

INITIALISERS: dict[str, Any] = {
    "zeros": initializers.zeros,
    "lecun_normal": initializers.lecun_normal(),
    "xavier_uniform": initializers.xavier_uniform(),
    "he_normal": initializers.he_normal(),
    "normal_0.01": initializers.normal(0.01),
    "normal_0.02": initializers.normal(0.02),
    "normal_0.05": initializers.normal(0.05),
}


def initialiser(name: str) -> Any:
    """The initialiser of that name: `init(key, shape, dtype) -> array`.

    Raises:
        ValueError: an unknown name, with those that exist.
    """
    if name not in INITIALISERS:
        near = difflib.get_close_matches(name, INITIALISERS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"no initialiser is called {name!r}: {hint}choose one of {', '.join(sorted(INITIALISERS))}")
    return INITIALISERS[name]
