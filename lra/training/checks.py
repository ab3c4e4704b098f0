"""The range check that constructors share."""

from __future__ import annotations

from lra.errors import UserError


def require(owner: object, name: str, value: object, fits: bool, needed: str) -> None:
    """Raises `UserError` for a constructor argument that does not fit.

    Args:
        owner: the instance under construction.
        name: of the parameter.
        value: what came.
        fits: whether it is in range.
        needed: the range, such as "at least 1".
    """
    if not fits:
        raise UserError(f"{type(owner).__name__}.{name} is {value!r}, but needs to be {needed}: change it")


def whole(value: object, least: int) -> bool:
    """Whether the value is an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
