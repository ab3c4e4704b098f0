"""Initialisers by name, as configurations bind them.

"fan_in_0.125" and "fan_out_0.125" are those of Child et al. (2019, arXiv:1904.10509, section 6): N(0, 0.125/sqrt(fan)),
read as a standard deviation; fan_in for projections [inputs, outputs], fan_out for tables of vectors [V, C].
"""

from __future__ import annotations

import difflib
from typing import Any

from jax.nn import initializers

INITIALISERS: dict[str, Any] = {
    "zeros": initializers.zeros,
    "lecun_normal": initializers.lecun_normal(),
    "xavier_uniform": initializers.xavier_uniform(),
    "he_normal": initializers.he_normal(),
    "fan_in_0.125": initializers.variance_scaling(0.125**2, "fan_in", "normal"),
    "fan_out_0.125": initializers.variance_scaling(0.125**2, "fan_out", "normal"),
    "normal_0.01": initializers.normal(0.01),
    "normal_0.02": initializers.normal(0.02),
    "normal_0.05": initializers.normal(0.05),
    "normal_1": initializers.normal(1.0),
}


def initialiser(name: str, scale: float = 1.0) -> Any:
    """The initialiser of that name: `init(key, shape, dtype) -> array`, whose values are multiplied by `scale`.

    Raises:
        ValueError: an unknown name, with those that exist.
    """
    if name not in INITIALISERS:
        near = difflib.get_close_matches(name, INITIALISERS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"no initialiser is called {name!r}: {hint}choose one of {', '.join(sorted(INITIALISERS))}")
    init = INITIALISERS[name]
    return init if scale == 1 else lambda *args, **kwargs: scale * init(*args, **kwargs)
