"""What `--attention NAME` and `--set` do to a configuration, on bindings alone."""

from collections.abc import Iterable, Mapping

from lra.gin_files import Bindings, Key, Reference, macros, references, within


def swap(bindings: Bindings, incoming: Bindings, patterns: Mapping[str, str]) -> tuple[Bindings, str]:
    """Puts an attention file in place of the pattern classes that a configuration names.

    Where the file binds a parameter of another class (`Decoder.pattern`) or a macro, the old bindings of it go, in
    every scope. So do the bindings of the pattern classes that these named and nothing else names, and the macros that
    only the removed bindings used.

    Args:
      bindings: the configuration.
      incoming: the bindings of the attention file.
      patterns: registry names of the pattern classes, and of what holds patterns, by gin name.

    Returns:
      The new configuration, and one sentence that says what was replaced and removed.
    """
    slots = {key[1:] for key in incoming if key.name not in patterns}
    replaced = {key for key in bindings if key[1:] in slots}
    old = _patterns(_references(replaced, bindings), bindings, patterns)
    dead = _dead(old, {key: binding for key, binding in bindings.items() if key not in replaced})
    kept = {key: binding for key, binding in bindings.items() if key not in replaced | dead}
    merged = kept | incoming
    orphans = macros((bindings[key].value for key in replaced | dead), bindings) - incoming.keys()
    orphans -= macros((binding.value for key, binding in merged.items() if key.name), merged)
    new = _patterns(_references(incoming.keys(), merged), merged, patterns)
    removed = sorted(str(key) for key in (dead | orphans) - incoming.keys())
    sentence = (
        f"{_listed(patterns[name] for name in old)} replaced by {_listed(patterns[name] for name in new)} "
        f"in {_listed(str(key) for key in replaced)}{'; removed ' + ', '.join(removed) if removed else ''}"
    )
    return {key: binding for key, binding in merged.items() if key not in orphans}, sentence


def override(bindings: Bindings, given: Bindings) -> Bindings:
    """Puts bindings in place of others, and drops what those bound of classes that nothing refers to any more.

    So `--set "Decoder.memory = None"` takes the memory's sizes along, which it could not unbind.
    """
    merged = bindings | given
    gone: set[str] = set()
    while fresh := _named(bindings) - _named({key: merged[key] for key in merged if key.name not in gone}) - gone:
        gone |= fresh
    return {key: binding for key, binding in merged.items() if key in given or key.name not in gone}


def _named(bindings: Bindings) -> set[str]:
    """The classes that bound parameters refer to."""
    return {reference.name for reference in _references({key for key in bindings if key.name}, bindings)}


def _dead(old: set[str], staying: Bindings) -> set[Key]:
    """The bindings of the old patterns, less those that serve a reference which stays, such as the encoder's."""
    dead = {key for key in staying if key.name in old}
    alive = _references({key for key in staying if key.name} - dead, staying)
    while saved := {key for key in dead if any(_serves(key, reference) for reference in alive)}:
        dead -= saved
        alive += _references(saved, staying)
    return dead


def _serves(key: Key, reference: Reference) -> bool:
    """Whether a class built from the reference may see the binding; an unscoped one inherits its owner's scope."""
    return key.name == reference.name and (not reference.scope or within(reference.scope, key.scope))


def _patterns(found: list[Reference], bindings: Bindings, patterns: Mapping[str, str]) -> set[str]:
    """The pattern classes among references, and those that their own bindings refer to."""
    names: set[str] = set()
    unread = list(found)
    while unread:
        name = unread.pop().name
        if name in patterns and name not in names:
            names.add(name)
            unread += _references({key for key in bindings if key.name == name}, bindings)
    return names


def _references(keys: Iterable[Key], bindings: Bindings) -> list[Reference]:
    return references((bindings[key].value for key in keys), bindings)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
