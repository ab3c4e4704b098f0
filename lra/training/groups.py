"""Groups of parameters, by name: what decays, and what has an update or a learning rate of its own."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from lra.errors import UserError
from lra.models.parameters import named
from lra.training.checks import require

if TYPE_CHECKING:
    from lra.training.optimizers import Update

NO_DECAY = ("bias", "scale")
"""Last parts of names that never decay: biases, and the scales of norms."""


class Group:
    """Parameters with an update rule or a learning rate of their own, in `Optimizer.groups`.

    Args:
        pattern: of names as `lra params` prints them, with * and ?, such as "*.memory.*"; at least one must match.
        update: class of the update rule; None for the optimizer's.
        rate: multiplies the learning rate.
    """

    def __init__(self, *, pattern: str, update: Callable[[], Update] | None = None, rate: float = 1.0) -> None:
        require(self, "rate", rate, 0 < rate < math.inf, "above 0 and finite")
        self.pattern, self.rate = pattern, rate
        self.update = None if update is None else update()


def decays(parameters: Any) -> Any:
    """True for each array that weight decay takes part in: no bias, no norm, and a matrix in its own layer at least.

    Gains, slopes and spans, which are scalars or vectors in a layer, do not decay either.
    """

    def decay(name: str, x: Any) -> bool:
        stacked = ".layers." in f".{name}"  # a leading axis that counts layers
        return name.rpartition(".")[2] not in NO_DECAY and x.ndim - stacked >= 2

    return _by_name(parameters, decay)


def labels(parameters: Any, groups: Sequence[Group]) -> Any:
    """The number of each array's group, the first that matches, as a pytree; -1 where none does.

    Raises:
        UserError: a group matches nothing, or nothing that a former group has left.
    """

    def label(name: str, x: Any) -> int:
        return next((i for i, group in enumerate(groups) if fnmatch.fnmatchcase(name, group.pattern)), -1)

    result = _by_name(parameters, label)
    for i in set(range(len(groups))) - set(jax.tree.leaves(result)):
        raise UserError(
            f"Group.pattern {groups[i].pattern!r} takes no parameter that a former group has left; there are "
            f"{', '.join(named(parameters))}: change the pattern"
        )
    return result


def _by_name(parameters: Any, function: Callable[[str, Any], Any]) -> Any:
    values = [function(name, leaf) for name, leaf in named(parameters).items()]
    return jax.tree.unflatten(jax.tree.structure(parameters), values)
