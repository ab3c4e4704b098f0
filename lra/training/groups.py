"""Groups of parameters, by name: what decays, and what has an update or a learning rate of its own."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lra.errors import UserError
from lra.models.parameters import named

NO_DECAY = ("bias", "biases", "scale")
"""Last words of names (`bias`, `content_bias`) that never decay: biases, and the scales of norms."""


def decays(parameters: Any) -> Any:
    """True for each array that weight decay takes part in: no bias, no norm, and a matrix in its own layer at least.

    Gains, slopes and spans, which are scalars or vectors in a layer, do not decay either.
    """

    def decay(name: str, x: Any) -> bool:
        *_, kind = (part for part in name.split(".") if not part.isdigit())  # a list's entries have its name
        return kind.rsplit("_", 1)[-1] not in NO_DECAY and x.ndim - _stacked(name) >= 2

    return _by_name(parameters, decay)


def norms(gradients: Any) -> Any:
    """The norm of each array, or of each of its layers [L/p, 1, ...], as a pytree of arrays that broadcast to them."""

    def norm(name: str, x: Any) -> Any:
        return jnp.sqrt(jnp.sum(x**2, axis=tuple(range(_stacked(name), x.ndim)), keepdims=True))

    return _by_name(gradients, norm)


def _stacked(name: str) -> bool:
    """Whether an array has a leading axis that counts layers."""
    return ".layers." in f".{name}"


def labels(parameters: Any, patterns: Sequence[str]) -> Any:
    """The number of the first pattern that each array's name matches, as a pytree; -1 where none does.

    Raises:
        UserError: a pattern matches nothing, or nothing that a former one has left.
    """

    def label(name: str, x: Any) -> int:
        return next((i for i, pattern in enumerate(patterns) if fnmatch.fnmatchcase(name, pattern)), -1)

    result = _by_name(parameters, label)
    for i in set(range(len(patterns))) - set(jax.tree.leaves(result)):
        raise UserError(
            f"Group.pattern {patterns[i]!r} takes no parameter that a former group has left; there are "
            f"{', '.join(named(parameters))}: change the pattern"
        )
    return result


def _by_name(parameters: Any, function: Callable[[str, Any], Any]) -> Any:
    values = [function(name, leaf) for name, leaf in named(parameters).items()]
    return jax.tree.unflatten(jax.tree.structure(parameters), values)
