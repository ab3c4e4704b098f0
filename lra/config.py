"""From gin files to objects: registry, shipped configurations, checks, construction, the resolved configuration.

gin is imported here only. Files are read and checked without gin's global state (`load`); `build` binds them afresh.
Macros are expanded before gin sees them, so a `@scope/Class()` in a macro runs in its own scope, not in the macro's.
"""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import gin
import gin.config

from lra import gin_files
from lra.annotations import Instance, describe, mismatch, nearest, parameters
from lra.errors import UserError
from lra.gin_files import Binding, Bindings, Key, Macro, Reference, literal, within
from lra.gin_swap import override, swap

CONFIGS = Path(str(resources.files("lra") / "configs"))
PARTS = ("attention", "data", "memory", "model", "terms")

REGISTRY: dict[str, type] = {}
_PATTERNS: dict[str, str] = {}


@dataclass(frozen=True)
class Loaded:
    """A configuration that has been read and checked, ready to build.

    Attributes:
      config: what the user named.
      path: the file that it stands for.
      bindings: every statement that is in force, with its place.
      values: the value of every bound parameter, macros expanded.
      swapped: what `--attention` replaced, in one sentence.
    """

    config: str
    path: Path
    bindings: Bindings
    values: dict[Key, Any]
    swapped: str | None = None


def register(classes: Mapping[str, type], patterns: Mapping[str, str] | None = None) -> None:
    """Makes classes known to configurations; again for the same classes does nothing.

    Args:
      classes: classes by gin name.
      patterns: registry names of attention patterns (and of what holds patterns, such as `Heads`) by gin name;
        `--attention` replaces these.

    Raises:
      ValueError: another class has the name.
      TypeError: a default that is neither a literal nor a class: it would be missing from the resolved configuration.
    """
    for name, cls in classes.items():
        if REGISTRY.get(name) is cls:
            continue
        if name in REGISTRY:
            raise ValueError(f"{name} is registered already, as {REGISTRY[name]!r}: {cls!r} needs another name")
        for parameter in parameters(cls).values():
            if isinstance(parameter.default, type):  # `parameter.empty` is one; other classes are for use without gin
                continue
            try:
                literal(parameter.default)
            except UserError as error:
                raise TypeError(f"the default of {name}.{parameter.name} must be a literal: {error}") from error
        gin.external_configurable(cls, name=name, module=cls.__module__)
        REGISTRY[name] = cls
    _PATTERNS.update(patterns or {})


def _public() -> tuple[dict[str, type], dict[str, str]]:
    """See `lra.registry.public`; imported late, so that this module stays cheap."""
    from lra import registry

    return registry.public()


def names() -> list[str]:
    """The shipped configurations; `base` and the parts that others include are not among them."""
    found = (path.relative_to(CONFIGS).with_suffix("") for path in CONFIGS.rglob("*.gin"))
    return sorted(name.as_posix() for name in found if name.parts[0] not in PARTS and name.as_posix() != "base")


def find(config: str | os.PathLike[str]) -> Path:
    """The file of a configuration: a shipped name, a path to a `.gin` file, or a run folder that holds `config.gin`.

    Raises:
      UserError: none of the three.
    """
    text = os.fspath(config)
    if text in names():
        return CONFIGS / f"{text}.gin"
    path = Path(text)
    if path.is_dir() and (path / "config.gin").is_file():
        return path / "config.gin"
    if path.suffix == ".gin" and path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"the folder {text} holds no config.gin: name a run folder, a .gin file or a configuration")
    raise UserError(f"there is no configuration or file {text!r}: {nearest(text.removesuffix('.gin'), names())}")


def load(config: str | os.PathLike[str], *, overrides: Sequence[str] = (), attention: str | None = None) -> Loaded:
    """Reads a configuration, swaps the attention, applies overrides, and checks names, macros, types and open values.

    Args:
      config: see `find`.
      overrides: texts of `--set`, such as "Adam.learning_rate = 0.1" or "WIDTH = 512".
      attention: a file of `configs/attention/`, without suffix.

    Raises:
      UserError: the first mistake found, with its file and line.
    """
    register(*_public())
    path = find(config)
    seen: set[Path] = set()
    bindings = gin_files.read(path, root=CONFIGS, seen=seen)
    swapped = None
    if attention is not None:
        base = {(CONFIGS / "base.gin").resolve()} & seen  # already in force: not to undo what the configuration set
        incoming = gin_files.read(_attention_file(attention), root=CONFIGS, seen=base)
        bindings, swapped = swap(bindings, incoming, _PATTERNS)
    former = bindings
    bindings = override(former, gin_files.read_overrides(overrides))
    values = {key: _checked(key, bindings) for key in bindings if key.name}
    _check_macros(bindings, former, path)
    return Loaded(os.fspath(config), path, bindings, values, swapped)


def _attention_file(attention: str) -> Path:
    choices = sorted(path.stem for path in (CONFIGS / "attention").glob("*.gin"))
    if attention not in choices:
        raise UserError(f"there is no attention {attention!r}: there are {', '.join(choices) or 'none'}")
    return CONFIGS / "attention" / f"{attention}.gin"


def build(loaded: Loaded, *, root: str = "Experiment") -> Any:
    """Constructs the root class, which constructs all else, and checks that every binding took part.

    Args:
      loaded: what `load` returned.
      root: gin name of the class to construct; its `build()` is called if it has one.

    Returns:
      The instance.

    Raises:
      UserError: a constructor refused a value, a parameter has no value, or bindings have no effect (a line for each).
    """
    gin.clear_config()
    for key, value in loaded.values.items():
        gin.bind_parameter((key.scope, _selector(key.name), key.parameter), gin_files.replace(value, _to_gin))
    try:
        instance = gin.get_configurable(_selector(root))()
        if hasattr(instance, "build"):
            instance.build()
    except ValueError as error:
        raise UserError(_own_text(error)) from error
    except TypeError as error:
        if missing := _missing(str(error)):
            raise UserError(missing) from error
        raise
    if mistakes := _without_effect(loaded) + _not_injected(loaded):
        raise UserError("\n".join(mistakes))
    return instance


def resolved() -> dict[str, str]:
    """Every parameter that the last `build` used, as `scope/Name.parameter`, with its effective value as a gin literal.

    What the program passes itself is no part of the configuration and is left out.

    Raises:
      UserError: a value has no literal form.
    """
    return {str(key): text for key, text in _resolved().items()}


def resolved_text() -> str:
    """The resolved configuration as gin, one paragraph for each class and scope; `load` reads it back unchanged."""
    paragraphs: dict[tuple[str, str], list[str]] = {}
    for key, text in _resolved().items():
        paragraphs.setdefault((key.name, key.scope), []).append(f"{key} = {text}\n")
    return "\n".join("".join(lines) for lines in paragraphs.values())


def difference(old_text: str, new_text: str) -> list[str]:
    """What differs between two resolved configurations, such as "Adam.learning_rate: 0.1 -> 0.2", sorted."""
    return lines(changes(old_text, new_text))


def lines(changed: Mapping[str, tuple[str | None, str | None]]) -> list[str]:
    """A line for each of the changes."""
    return [f"{key}: {old or '(absent)'} -> {new or '(absent)'}" for key, (old, new) in changed.items()]


def changes(old_text: str, new_text: str) -> dict[str, tuple[str | None, str | None]]:
    """The parameters that differ between two resolved configurations, sorted, with both values; None where absent."""
    old, new = (
        {str(binding.key): literal(binding.value) for binding in gin_files.read_text(text, shown).values()}
        for text, shown in ((old_text, "the old configuration"), (new_text, "the new configuration"))
    )
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return {key: (old.get(key), new.get(key)) for key in changed}


def _resolved() -> dict[Key, str]:
    entries = {
        Key(scope, _name(selector), parameter): literal(gin_files.replace(value, _from_gin))
        for (scope, selector), values in gin.config._OPERATIVE_CONFIG.items()
        for parameter, value in values.items()
    }
    return {key: entries[key] for key in sorted(entries, key=lambda key: (key.name, key.scope, key.parameter))}


def _checked(key: Key, bindings: Bindings) -> Any:
    """The value of a binding with macros expanded, after all checks that need no construction."""
    binding = bindings[key]
    if key.name not in REGISTRY:
        raise UserError(f"{binding} names a class {key.name} that does not exist: {nearest(key.name, REGISTRY)}")
    known = parameters(REGISTRY[key.name])
    if key.parameter not in known:
        remedy = nearest(key.parameter, known)
        if not difflib.get_close_matches(key.parameter, known):  # perhaps right, but of another class
            owners = [name for name, cls in REGISTRY.items() if key.parameter in parameters(cls)]
            remedy = f"{remedy}; {', '.join(sorted(owners))} has one" if owners else remedy
        raise UserError(f"{binding} names a parameter that {key.name} does not have: {remedy}")
    annotation = known[key.parameter].annotation
    value = _expand(binding.value, key, bindings, annotation)
    try:
        literal(value)
    except UserError as error:
        raise UserError(f"{key} ({binding.place}): {error}") from error
    if wrong := mismatch(gin_files.replace(value, _to_class), annotation):
        sources = sorted(f"{bindings[macro]}" for macro in gin_files.macros([binding.value], bindings))
        raise UserError(f"{key} ({binding.place}) {wrong}{'; it comes from ' + ', '.join(sources) if sources else ''}")
    return value


def _expand(value: Any, key: Key, bindings: Bindings, annotation: Any, trail: tuple[Key, ...] = ()) -> Any:
    """A value without macros; `trail` holds the macros on the way from the binding at `key` to this value."""
    place = bindings[trail[-1] if trail else key].place

    def leaf(item: Any) -> Any:
        if isinstance(item, Reference) and item.name not in REGISTRY:
            raise UserError(
                f"{trail[-1] if trail else key} ({place}) refers to {item!r}, a class that does not exist: "
                f"{nearest(item.name, REGISTRY)}"
            )
        if not isinstance(item, Macro):
            return item
        if item.name in ("gin.REQUIRED", "REQUIRED"):
            target, needed = (trail[-1] if trail else key), f"{key} needs {describe(annotation)}"
            raise UserError(f"{target} ({place}) has no value yet and {needed}: give one with --set '{target} = ...'")
        if item.key in trail:
            raise UserError(f"the macro {item!r} ({place}) is defined by itself: give it a value")
        if item.key not in bindings:
            macros = [other.parameter for other in bindings if not other.name]
            raise UserError(
                f"{trail[-1] if trail else key} ({place}) uses the macro {item!r}, which is not defined: "
                f"{nearest(item.name, macros)}"
            )
        return _expand(bindings[item.key].value, key, bindings, annotation, (*trail, item.key))

    return gin_files.replace(value, leaf)


def _check_macros(bindings: Bindings, former: Bindings, path: Path) -> None:
    """A macro that nothing uses is a mistake, unless a shipped include brings it or `--set` replaced what used it."""
    used, before = (
        gin_files.macros((binding.value for key, binding in some.items() if key.name), some)
        for some in (bindings, former)
    )
    for key, binding in bindings.items():
        replaced = key in before and former[key] is binding
        if not (key.name or key in used or replaced or _brought(binding, path)):
            remedy = nearest(key.parameter, [macro.parameter for macro in used])
            raise UserError(f"{binding} has no effect: nothing uses this macro; {remedy}")


def _brought(binding: Binding, path: Path) -> bool:
    """Whether a shipped file brings the binding by an include: the configuration at `path` cannot take it back."""
    source = binding.place.path
    return source is not None and source != path and source.is_relative_to(CONFIGS)


def _without_effect(loaded: Loaded) -> list[str]:
    """A sentence for each binding that no constructor received; a shipped include may bind classes not built here."""
    operative = gin.config._OPERATIVE_CONFIG.items()
    sentences = []
    for key in loaded.values:
        calls = {scope: used for (scope, selector), used in operative if _name(selector) == key.name}
        inside = {scope: used for scope, used in calls.items() if within(scope, key.scope)}
        rivals = [other for other in loaded.values if other[1:] == key[1:] and other != key]
        inner = [other for other in rivals if within(other.scope, key.scope)]
        overriding = {scope: [other for other in inner if within(scope, other.scope)] for scope in inside}
        if any(key.parameter in used and not overriding[scope] for scope, used in inside.items()):
            continue
        if not calls:
            if _brought(loaded.bindings[key], loaded.path):
                continue
            reason = f"this configuration builds no {key.name}"
        elif not inside:
            scopes = ", ".join(sorted(scope or "the outermost" for scope in calls))
            reason = f"no {key.name} is built in the scope {key.scope}; it is in: {scopes}"
        elif not all(overriding.values()):
            reason = f"the program passes {key.parameter} itself"
        else:
            winners = sorted({str(loaded.bindings[other]) for others in overriding.values() for other in others})
            reason = f"{key.name} is built only where {', '.join(winners)} overrides it"
        sentences.append(f"{loaded.bindings[key]} has no effect: {reason}")
    return sentences


def _not_injected(loaded: Loaded) -> list[str]:
    """A sentence for each parameter left at a class, which gin's bindings would not reach."""
    sentences = []
    for scope, selector in gin.config._OPERATIVE_CONFIG:
        name = _name(selector)
        bound = {key.parameter for key in loaded.values if key.name == name and within(scope, key.scope)}
        for parameter in parameters(REGISTRY[name]).values():
            default = parameter.default
            if isinstance(default, type) and default is not parameter.empty and parameter.name not in bound:
                key = Key(scope, name, parameter.name)
                sentences.append(
                    f"{key} must be bound, since its default ignores bindings: {key} = @{default.__name__}"
                )
    return sentences


def _own_text(error: Exception) -> str:
    """What the constructor said, without what gin appends."""
    return str(error).split("\n  In call to configurable")[0].split("\n  No values supplied by Gin")[0]


def _missing(text: str) -> str | None:
    """The sentence for parameters that a configuration must bind, if that is what a TypeError's text is about."""
    call = re.search(r"In call to configurable '(\w+)' .*?(?: in scope '([\w/.]+)')?$", text, re.MULTILINE)
    if call is None or call[1] not in REGISTRY:
        return None
    cls = REGISTRY[call[1]]
    if not text.startswith(f"{cls.__init__.__qualname__}() missing"):  # type: ignore[misc]
        return None  # some other call inside the constructor: the program's fault
    missing = re.findall(r"'(\w+)'", text.splitlines()[0])
    keys = [str(Key(call[2] or "", call[1], name)) for name in missing]
    wanted = describe(parameters(cls)[missing[0]].annotation)
    return f"{', '.join(keys)} has no value and no default: give one ({wanted}) with --set '{keys[0]} = ...'"


def _selector(name: str) -> str:
    """The selector, gin's own name of a class; unlike its last part it differs for toy classes in tests."""
    if name not in REGISTRY:
        raise UserError(f"there is no class {name}: {nearest(name, REGISTRY)}")
    return f"{REGISTRY[name].__module__}.{name}"


def _name(selector: str) -> str:
    return selector.rpartition(".")[2]


def _to_gin(leaf: Any) -> Any:
    if not isinstance(leaf, Reference):
        return leaf
    scope = f"{leaf.scope}/" if leaf.scope else ""
    return gin.config.ConfigurableReference(scope + _selector(leaf.name), leaf.call)


def _from_gin(leaf: Any) -> Any:
    if not isinstance(leaf, gin.config.ConfigurableReference):
        return leaf
    return Reference("/".join(leaf.scopes), _name(leaf.selector), leaf.evaluate)


def _to_class(leaf: Any) -> Any:
    if not isinstance(leaf, Reference):
        return leaf
    return Instance(REGISTRY[leaf.name]) if leaf.call else REGISTRY[leaf.name]
