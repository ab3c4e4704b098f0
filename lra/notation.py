"""Patterns as text: `sliding_window(window=128)`, `heads(groups=((4, full), (4, sliding_window)))`."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from typing import Any

from lra.annotations import mismatch, nearest, parameters
from lra.errors import UserError

_GIVEN = {"site", "rngs"}
"""Parameters of every pattern that a model gives, not the text."""


def read(text: str, classes: Mapping[str, type[Any]], num_heads: int) -> functools.partial:
    """Reads NAME or NAME(ARGUMENT=VALUE, ...), where a value is a Python literal, a pattern, or a tuple of these.

    Args:
        text: what the user wrote.
        classes: the classes by name.
        num_heads: H, for the arguments that are not given: `cls.typical(num_heads)` has them.

    Returns:
        The class with its arguments, to be called with `site` and `rngs`.

    Raises:
        UserError: text of another form, an unknown name or argument, a value of a wrong type.
    """
    form = f"{text!r} cannot be read: write NAME or NAME(ARGUMENT=VALUE, ...), such as sliding_window(window=128)"

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Name | ast.Call):
            return pattern(node)
        if isinstance(node, ast.Tuple):
            return tuple(value(item) for item in node.elts)
        try:
            return ast.literal_eval(node)
        except ValueError as error:
            raise UserError(form) from error

    def pattern(node: ast.expr) -> functools.partial:
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if not isinstance(call.func, ast.Name) or call.args or any(given.arg is None for given in call.keywords):
            raise UserError(form)
        name = call.func.id
        if name not in classes:
            raise UserError(f"there is no pattern {name!r}: {nearest(name, classes)}")
        cls: Any = classes[name]
        arguments = {str(given.arg): value(given.value) for given in call.keywords}
        _check(name, cls, arguments)
        return functools.partial(cls, **(cls.typical(num_heads) | arguments))

    try:
        return pattern(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        raise error if isinstance(error, UserError) else UserError(form) from error


def write(value: Any, classes: Mapping[str, type[Any]]) -> str:
    """The text of a pattern class, with or without arguments, as `read` reads it; of other values as Python does."""
    names = {cls: name for name, cls in classes.items()}
    if isinstance(value, tuple):
        return f"({', '.join(write(item, classes) for item in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, functools.partial) and value.func in names:
        arguments = ", ".join(f"{name}={write(item, classes)}" for name, item in value.keywords.items())
        return f"{names[value.func]}({arguments})" if arguments else names[value.func]
    return names[value] if isinstance(value, type) and value in names else repr(value)


def _check(name: str, cls: type[Any], arguments: Mapping[str, Any]) -> None:
    known = {key: parameter for key, parameter in parameters(cls).items() if key not in _GIVEN}
    for key, item in arguments.items():
        if key not in known:
            raise UserError(f"{name} has no argument {key!r}: {nearest(key, known)}")
        if wrong := mismatch(_classes(item), known[key].annotation):
            raise UserError(f"{name}: {key} {wrong}")


def _classes(value: Any) -> Any:
    """The value with bare classes in place of patterns, as annotations see them."""
    if isinstance(value, tuple):
        return tuple(_classes(item) for item in value)
    return value.func if isinstance(value, functools.partial) else value
