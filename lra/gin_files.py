"""Reads gin files into bindings that know their place, without gin's registry or global state.

Includes are found beside the including file or under the root of the shipped configurations, and every file is read
once: a part that two others include does not undo what the first of them set.
"""

import math
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gin import config_parser

from lra.errors import UserError


class Key(NamedTuple):
    """What is bound: `scope/name.parameter`, or a macro, which has only a parameter."""

    scope: str
    name: str
    parameter: str

    def __str__(self) -> str:
        if not self.name:
            return self.parameter
        return f"{self.scope}/{self.name}.{self.parameter}" if self.scope else f"{self.name}.{self.parameter}"


class Place(NamedTuple):
    """Where it is bound; `--set` has no path and line 0."""

    path: Path | None
    line: int
    shown: str

    def __str__(self) -> str:
        return f"{self.shown}:{self.line}" if self.line else self.shown


@dataclass(frozen=True)
class Reference:
    """`@scope/name` (the class) or `@scope/name()` (an instance)."""

    scope: str
    name: str
    call: bool

    def __repr__(self) -> str:
        return f"@{self.scope + '/' if self.scope else ''}{self.name}{'()' if self.call else ''}"


@dataclass(frozen=True)
class Macro:
    """`%name`."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"

    @property
    def key(self) -> Key:
        """The key of the macro's definition."""
        return Key("", "", self.name)


class Binding(NamedTuple):
    """One statement: macros in the value are not expanded."""

    key: Key
    value: Any
    place: Place

    def __str__(self) -> str:
        return f"{self.key} = {literal(self.value)} ({self.place})"


Bindings = dict[Key, Binding]


def read(path: Path, *, root: Path, seen: set[Path]) -> Bindings:
    """The bindings of a file and of what it includes; later ones win over those of an include above them.

    Args:
      path: the file.
      root: the folder of the shipped configurations.
      seen: files not to be read again; the files read are added.

    Raises:
      UserError: a file that is missing or cannot be read, or a binding that the same file or an include below undoes.
    """
    shown = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
    seen.add(path.resolve())
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{shown} cannot be read: {error}") from error
    bindings: Bindings = {}
    own: Bindings = {}
    for statement in _statements(text, shown):
        place = Place(path, statement.location.line_num, shown)
        if isinstance(statement, config_parser.IncludeStatement):
            included = _included(statement.filename, path, root, place)
            if included.resolve() in seen:
                continue
            inner = read(included, root=root, seen=seen)
            for key in [key for key in own if key in inner]:
                raise UserError(
                    f"{own[key]} is undone by {inner[key]}, which {place} includes below it: move the include up"
                )
            bindings |= inner
        elif isinstance(statement, config_parser.BindingStatement):
            binding = _binding(statement, place)
            if binding.key in own:
                raise UserError(f"{own[binding.key]} is undone by {binding}: remove one of the two")
            own[binding.key] = bindings[binding.key] = binding
        elif isinstance(statement, config_parser.ImportStatement):
            raise UserError(f"{place} imports {statement.module}: remove the line, all classes are known")
    return bindings


def read_text(text: str, shown: str) -> Bindings:
    """The bindings of a text without includes, such as a resolved configuration or one `--set`.

    Raises:
      UserError: the text cannot be read, holds something other than bindings, or binds a name twice.
    """
    bindings: Bindings = {}
    for statement in _statements(text, shown):
        if isinstance(statement, config_parser.BlockDeclaration):
            continue
        if not isinstance(statement, config_parser.BindingStatement):
            raise UserError(f"{shown} may hold bindings only: write Name.parameter = value")
        binding = _binding(statement, Place(None, statement.location.line_num, shown))
        if binding.key in bindings:
            raise UserError(f"{bindings[binding.key]} is undone by {binding}: remove one of the two")
        bindings[binding.key] = binding
    return bindings


def read_overrides(overrides: Sequence[str]) -> Bindings:
    """The bindings given with `--set`, each text holding one.

    Raises:
      UserError: a text that is not one binding, or a name that is set twice.
    """
    bindings: Bindings = {}
    for text in overrides:
        read_now = list(read_text(text, f"--set {text!r}").values())
        if len(read_now) != 1:
            raise UserError(f"--set {text!r} holds {len(read_now)} bindings: write one Name.parameter = value")
        binding = read_now[0]._replace(place=Place(None, 0, "--set"))
        if binding.key in bindings:
            raise UserError(
                f"--set gives {binding.key} twice, {literal(bindings[binding.key].value)} and "
                f"{literal(binding.value)}: keep one"
            )
        bindings[binding.key] = binding
    return bindings


def literal(value: Any) -> str:
    """A value as gin writes it.

    Raises:
      UserError: the value has no literal form.
    """
    if isinstance(value, tuple):
        return f"({', '.join(literal(item) for item in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(literal(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(key)}: {literal(item)}' for key, item in value.items())}}}"
    if value is None or type(value) in (bool, int, str, Reference, Macro):
        return repr(value)
    if type(value) is float and math.isfinite(value):
        return repr(value)
    raise UserError(
        f"{value!r} ({type(value).__name__}) cannot be written in a configuration: "
        "use a number, a string, True, False, None, a reference, or tuples, lists and dicts of these"
    )


def leaves(value: Any) -> Iterator[Any]:
    """What a nested value holds, keys of dicts included."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def replace(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The nested value with `leaf` applied to what it holds."""
    if isinstance(value, dict):
        return {replace(key, leaf): replace(item, leaf) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(replace(item, leaf) for item in value)
    return leaf(value)


def macros(values: Iterable[Any], bindings: Bindings) -> set[Key]:
    """The macros that values use, directly or through other macros."""
    used: set[Key] = set()
    unread = list(values)
    while unread:
        new = {leaf.key for leaf in leaves(unread.pop()) if isinstance(leaf, Macro)} - used
        used |= new
        unread += [bindings[key].value for key in new if key in bindings]
    return used & bindings.keys()


def references(values: Iterable[Any], bindings: Bindings) -> list[Reference]:
    """The classes that values refer to, directly or through macros."""
    direct = list(values)
    values = direct + [bindings[key].value for key in macros(direct, bindings)]
    return [leaf for value in values for leaf in leaves(value) if isinstance(leaf, Reference)]


def within(scope: str, outer: str) -> bool:
    """Whether a scope is another one or lies inside it."""
    return not outer or f"{scope}/".startswith(f"{outer}/")


class _Delegate(config_parser.ParserDelegate):
    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        scope, _, name = scoped_configurable_name.rpartition("/")
        return Reference(scope, name, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


def _statements(text: str, shown: str) -> Iterator[Any]:
    try:
        yield from config_parser.ConfigParser(text, _Delegate())
    except SyntaxError as error:
        token = re.search(r"Failed to parse token '(.*)'", str(error.msg), re.DOTALL)
        reason = f"{token[1]} is no value (strings need quotes)" if token else str(error.msg).strip().rstrip(".")
        raise UserError(f"{_at(shown, error.lineno)} cannot be read: {reason}") from error
    except tokenize.TokenError as error:
        line = min(error.args[1][0], text.rstrip().count("\n") + 1)  # an open bracket is noticed past the end
        raise UserError(f"{_at(shown, line)} cannot be read: a bracket or string is left open") from error


def _at(shown: str, line: int | None) -> str:
    return shown if shown.startswith("--set") else f"{shown}:{line}"


def _binding(statement: Any, place: Place) -> Binding:
    if statement.arg_name:
        key = Key(statement.scope, statement.selector, statement.arg_name)
    else:
        key = Macro(f"{statement.scope}/{statement.selector}" if statement.scope else statement.selector).key
    return Binding(key, statement.value, place)


def _included(name: str, includer: Path, root: Path, place: Place) -> Path:
    found = {path.resolve(): path for path in (root / name, includer.parent / name) if path.is_file()}
    if not found:
        raise UserError(
            f"{place} includes {name!r}, which is neither in {root.name}/ nor beside it: write a path "
            "relative to one of the two"
        )
    if len(found) > 1:
        raise UserError(f"{place} includes {name!r}, which is both in {root.name}/ and beside it: rename your file")
    return next(iter(found.values()))
