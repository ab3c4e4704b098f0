"""Heads of one layer with different patterns side by side."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from lra.attention.arrange import Entries, Labels
from lra.attention.core import Rule, Terms, part_key
from lra.attention.full import Full
from lra.attention.pattern import Attended, Inputs, Pattern, Projection, Site
from lra.attention.promise import Promise
from lra.attention.sliding_window import SlidingWindow
from lra.attention.visibility import Array, Entry, Visibility


@dataclasses.dataclass(frozen=True)
class HeadsRule:
    """Each group's own rule for its heads; labels of group g are called `g.name`."""

    rules: tuple[Rule, ...]
    bounds: tuple[int, ...]

    def __call__(self, q: Entry, k: Entry) -> Array:
        allowed: Any = False
        for g, rule in enumerate(self.rules):
            first, last = self.bounds[g], self.bounds[g + 1]
            inside = (q.head >= first) & (q.head < last)
            allowed = allowed | (inside & rule(_of_group(q, g, first), _of_group(k, g, first)))
        return allowed


def _of_group(entry: Entry, group: int, first: int) -> Entry:
    prefix = f"{group}."
    labels = {name.removeprefix(prefix): x for name, x in entry.labels.items() if name.startswith(prefix)}
    return Entry(entry.position, entry.head - first, labels)


class Heads(Pattern):
    """Groups of heads, each with a pattern of its own; it promises what the weakest of them promises.

    Args:
        groups: (number of heads, pattern class) pairs, whose numbers add up to the layer's heads. In gin:
            `Heads.groups = ((4, @Full), (4, @near/SlidingWindow))`.
        site: where the layer stands. rngs: random streams.
    """

    def __init__(self, *, groups: tuple[tuple[int, Callable[..., Pattern]], ...], site: Site, rngs: nnx.Rngs) -> None:
        counts = [count for count, _ in groups]
        if not groups or min(counts) < 1 or sum(counts) != site.num_heads:
            raise ValueError(f"Heads.groups needs counts that add up to {site.num_heads} heads, got {counts}")
        self.bounds = tuple(sum(counts[:g]) for g in range(len(counts) + 1))
        self.groups = nnx.List(
            [make(site=dataclasses.replace(site, num_heads=count), rngs=rngs) for count, make in groups]
        )
        super().__init__(site)

    @property
    def promise(self) -> Promise:
        return functools.reduce(Promise.weakest, [group.promise for group in self.groups])

    @property
    def rule(self) -> Rule:
        return HeadsRule(tuple(group.rule for group in self.groups), self.bounds)

    def limited(self, keys: int) -> Pattern:
        copy = nnx.merge(*nnx.split(self))
        copy.groups = nnx.List([group.limited(keys) for group in self.groups])
        return copy

    @property
    def reach(self) -> int | None:
        bounds = [group.reach for group in self.groups]
        known = [bound for bound in bounds if bound is not None]
        return max(known) if len(known) == len(bounds) else None

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        near = functools.partial(SlidingWindow, window=3)
        far = functools.partial(SlidingWindow, window=2, dilation=5)
        return {"groups": ((1, near), (2, far))}, {"groups": ((2, Full), (1, near))}

    @classmethod
    def typical(cls, num_heads: int) -> dict[str, Any]:
        near = functools.partial(SlidingWindow, **SlidingWindow.typical(num_heads))
        return {"groups": ((num_heads // 2, near), (num_heads - num_heads // 2, Full))}

    def select(
        self, q: Array, k: Array, *, visibility: Visibility | None = None, key: Array | None = None, train: bool = False
    ) -> Any:
        chosen = tuple(
            group.select(self._own(q, g), self._own(k, g), visibility=visibility, key=part_key(key, g), train=train)
            for g, group in enumerate(self.groups)
        )
        return None if all(each is None for each in chosen) else chosen

    def selections(self, selection: Any) -> tuple[Any, ...]:
        groups = zip(self.groups, self._of_groups(selection), strict=True)
        return tuple(part for group, own in groups for part in group.selections(own))

    def colours(self, selection: Any) -> Array | None:
        known = [group.colours(own) for group, own in zip(self.groups, self._of_groups(selection), strict=True)]
        some = next((x for x in known if x is not None), None)
        if some is None:
            return None
        counts = [group.num_heads for group in self.groups]
        none = [jnp.full((*some.shape[:2], count), -1, jnp.int32) for count in counts]
        return jnp.concatenate([x if y is None else y for x, y in zip(none, known, strict=True)], axis=2)

    def labels(self, queries: int, keys: int, visibility: Visibility, selection: Any = None) -> Labels:
        both: tuple[dict[str, Array], dict[str, Array]] = ({}, {})
        for g, (group, own) in enumerate(zip(self.groups, self._of_groups(selection), strict=True)):
            for side, labels in zip(both, group.labels(queries, keys, visibility, own), strict=True):
                side.update({f"{g}.{name}": self._spread(jnp.asarray(x), g) for name, x in labels.items()})
        return both

    def _of_groups(self, selection: Any) -> tuple[Any, ...]:
        return (None,) * len(self.groups) if selection is None else selection

    def _own(self, x: Array, group: int) -> Array:
        """What belongs to a group's heads of [B, L, H, ...]."""
        return x[:, :, self.bounds[group] : self.bounds[group + 1]]

    def _spread(self, label: Array, group: int) -> Array:
        """A label by head, [B, L, heads of the group], with places for the others' heads, where nobody reads it."""
        if label.ndim == 2:
            return label
        return jnp.pad(label, ((0, 0), (0, 0), (self.bounds[group], self.num_heads - self.bounds[group + 1])))

    def entries(
        self, queries: int, keys: int, visibility: Visibility, selection: Any = None
    ) -> tuple[Entries, Entries]:
        for part in self.parts:
            if type(part).summarise is not Pattern.summarise:
                raise ValueError(
                    f"the heads of {type(part).__name__} read entries of their own in place of keys, so that no grid "
                    "holds all heads: ask each of Heads.parts, or draw by `dense.reads`"
                )
        return super().entries(queries, keys, visibility, selection)

    @property
    def own_values(self) -> bool:
        return any(group.own_values for group in self.groups)

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return tuple(part for group in self.groups for part in group.parts)

    def check_length(self, length: int) -> None:
        for group in self.groups:
            group.check_length(length)

    def adopt(self, query: Projection, key: Projection, value: Projection) -> None:
        for g, group in enumerate(self.groups):
            group.adopt(*(each.heads(self.bounds[g], self.bounds[g + 1]) for each in (query, key, value)))

    def project(self) -> None:
        for group in self.groups:
            group.project()

    def fit(self) -> bool:
        return any([group.fit() for group in self.groups])

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        inputs: Inputs | None = None,
        visibility: Visibility | None = None,
        terms: Terms = (),
        key: Array | None = None,
        train: bool = False,
        selection: Any = None,
    ) -> Attended:
        parts = []
        for g, (group, own) in enumerate(zip(self.groups, self._of_groups(selection), strict=True)):
            first, last = self.bounds[g], self.bounds[g + 1]
            parts.append(
                group(
                    *(self._own(x, g) for x in (q, k, v)),
                    inputs=None if inputs is None else _inputs_of_group(inputs, first, last),
                    visibility=visibility,
                    terms=tuple(term.heads(first, last) for term in terms),
                    key=part_key(key, g),
                    train=train,
                    selection=own,
                )
            )
        return Attended(
            out=jnp.concatenate([part.out for part in parts], axis=2),
            losses=_named([part.losses for part in parts]),
            metrics=_named([part.metrics for part in parts]),
            updates=_named([part.updates for part in parts]),
        )


def _inputs_of_group(inputs: Inputs, first: int, last: int) -> Inputs:
    def project(x: Array) -> tuple[Array, Array, Array]:
        q, k, v = inputs.project(x)
        return q[:, :, first:last], k[:, :, first:last], v[:, :, first:last]

    return dataclasses.replace(inputs, project=project)


def _named(parts: list[Mapping[str, Array]]) -> dict[str, Array]:
    return {f"{g}.{name}": value for g, part in enumerate(parts) for name, value in part.items()}
