"""Whether a value written in a configuration fits a parameter's annotation, and the nearest right name; no gin here."""

import ast
import contextlib
import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType, TypeVar, Union


@dataclass(frozen=True)
class Instance:
    """Stands for the instance that a reference `@Class()` will make."""

    cls: type


def parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The named parameters of a constructor, with string annotations resolved.

    Args:
      cls: a class, dataclasses included.

    Returns:
      Parameters by name, without `self`, `*args` and `**kwargs`.

    Raises:
      TypeError: an annotation names something that its module does not hold at run time.
    """
    constructor = inspect.getattr_static(cls, "__init__")
    if not inspect.isfunction(constructor):  # object's own constructor takes nothing
        return {}
    try:
        hints = typing.get_type_hints(constructor, include_extras=True)
    except NameError as error:
        raise TypeError(f"{cls.__name__}.__init__ has an annotation that cannot be resolved: {error}") from error
    named = list(inspect.signature(constructor).parameters.values())[1:]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name: p.replace(annotation=hints.get(p.name, p.empty)) for p in named if p.kind not in variadic}


def mismatch(value: Any, annotation: Any) -> str | None:
    """Says in which way a value does not fit an annotation.

    Args:
      value: a literal, a class (for `@Class`) or an `Instance` (for `@Class()`).
      annotation: a resolved annotation; an empty one fits everything.

    Returns:
      None if it fits, else the end of a sentence, such as "needs int, got 100000.0 (float): write 100_000".
    """
    return None if _fits(value, annotation) else _explain(value, annotation, at="")


def describe(annotation: Any) -> str:
    """An annotation as a reader would write it, without module names."""
    if typing.get_origin(annotation) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(annotation))
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        return "None" if annotation is types.NoneType else annotation.__name__
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", str(annotation))


def nearest(name: str, names: Iterable[str]) -> str:
    """The remedy for a name that does not exist: the nearest ones or, if none is near, all of them."""
    known = sorted(set(names))
    near = difflib.get_close_matches(name, known, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there are {', '.join(known)}" if known else "there are none"


def _fits(value: Any, annotation: Any) -> bool:
    if annotation is Any or annotation is object or annotation is inspect.Parameter.empty:
        return True
    if annotation is None:
        return value is None
    if isinstance(annotation, TypeVar):
        return annotation.__bound__ is None or _fits(value, annotation.__bound__)
    if isinstance(annotation, NewType):
        return _fits(value, annotation.__supertype__)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _fits(value, arguments[0])
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in arguments)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    kind = annotation if origin is None else origin
    if not isinstance(kind, type):
        raise TypeError(f"the annotation {annotation!r} is of a kind that lra.annotations cannot check")
    return _fits_kind(value, kind, arguments)


def _fits_kind(value: Any, kind: Any, arguments: tuple[Any, ...]) -> bool:
    if getattr(kind, "_is_protocol", False):  # structure shows only in the finished object
        return isinstance(value, type | Instance)
    if kind is type:
        return isinstance(value, type) and (not arguments or _fits(Instance(value), arguments[0]))
    if kind is Callable and isinstance(value, type):
        return not arguments or _fits(Instance(value), arguments[-1])
    if kind is Callable and isinstance(value, Instance):
        return any("__call__" in base.__dict__ for base in value.cls.__mro__)
    if isinstance(value, Instance):
        return issubclass(value.cls, kind)
    if isinstance(value, type):
        return False
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not isinstance(value, kind) or (isinstance(value, str) and arguments):  # "abc" is no Sequence[str] here
        return False
    if kind is tuple and arguments and arguments[-1] is not Ellipsis and len(value) != len(arguments):
        return False
    return all(_fits(item, wanted) for _, item, wanted in _items(value, kind, arguments))


def _items(value: Any, kind: type, arguments: tuple[Any, ...]) -> Iterator[tuple[str, Any, Any]]:
    """The parts of a container: where, what, and the annotation that it needs."""
    if not arguments:
        return
    if issubclass(kind, Mapping):
        for key, item in value.items():
            yield f"key {key!r}", key, arguments[0]
            yield f"[{key!r}]", item, arguments[1]
    elif kind is tuple and arguments[-1] is not Ellipsis:
        yield from ((f"[{i}]", item, wanted) for i, (item, wanted) in enumerate(zip(value, arguments, strict=True)))
    else:
        yield from ((f"[{i}]", item, arguments[0]) for i, item in enumerate(value))


def _explain(value: Any, annotation: Any, at: str) -> str:
    """The sentence for a misfit; descends to the wrong item where only one alternative has the value's shape."""
    members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    origins = [(typing.get_origin(member), typing.get_args(member)) for member in members]
    shaped = [(origin, arguments) for origin, arguments in origins if _holds(value, origin)]
    if len(shaped) == 1:
        kind, arguments = shaped[0]
        if kind is tuple and arguments and arguments[-1] is not Ellipsis and len(value) != len(arguments):
            return f"needs {describe(annotation)}{at and ' at ' + at}, got {_show(value)} of length {len(value)}"
        for where, item, wanted in _items(value, kind, arguments):
            if not _fits(item, wanted):
                return _explain(item, wanted, at + where)
    remedy = _remedy(value, annotation)
    return f"needs {describe(annotation)}{at and ' at ' + at}, got {_show(value)}{_kind(value)}{remedy}"


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (Union, types.UnionType)


def _holds(value: Any, origin: Any) -> bool:
    return isinstance(value, tuple | list | dict) and isinstance(origin, type) and isinstance(value, origin)


def _remedy(value: Any, annotation: Any) -> str:
    """What to write in place of the value, if a small change makes it fit."""
    if typing.get_origin(annotation) is Literal and isinstance(value, str):
        near = difflib.get_close_matches(value, [str(choice) for choice in typing.get_args(annotation)], n=1)
        return f": did you mean {near[0]!r}?" if near else ""
    candidates: list[Any] = [(value,)]
    if isinstance(value, float) and value.is_integer():
        candidates = [int(value), (int(value),)]
    elif isinstance(value, str):
        with contextlib.suppress(ValueError, SyntaxError):  # a word, not a quoted number
            candidates.insert(0, ast.literal_eval(value))
    elif isinstance(value, list | tuple):
        candidates = [tuple(value), list(value)]
    elif isinstance(value, type):
        candidates.insert(0, Instance(value))
    elif isinstance(value, Instance):
        candidates.insert(0, value.cls)
    return next((f": write {_show(better)}" for better in candidates if _fits(better, annotation)), "")


def _show(value: Any) -> str:
    if isinstance(value, Instance):
        return f"@{value.cls.__name__}()"
    if isinstance(value, type):
        return f"@{value.__name__}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}"
    if isinstance(value, tuple):
        return f"({', '.join(_show(item) for item in value)}{',' if len(value) == 1 else ''})"
    return repr(value)


def _kind(value: Any) -> str:
    if isinstance(value, Instance):
        return " (an instance)"
    if isinstance(value, type):
        return " (a class)"
    return "" if value is None else f" ({type(value).__name__})"
