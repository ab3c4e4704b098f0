"""What `lra attention show` draws: an example of a pattern, or layers and memory of a configuration."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from lra import notation
from lra.attention import EXAMPLE_HEADS, PATTERNS, Memory, Pattern, Site, draw
from lra.errors import UserError
from lra.models import Layers

LONGEST_DRAWING = 2048
"""Tokens; a grid takes their square. No path among them needs more layers."""
MOST_SEGMENTS = 64


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is drawn.

    Attributes:
        title: of the drawings. layers: the patterns, from the lowest layer on.
        memory: the memory before the one layer, if it is to be drawn.
    """

    title: str
    layers: tuple[Pattern, ...]
    memory: Memory | None = None

    def drawings(self, options: argparse.Namespace) -> list[draw.Drawing]:
        """One, or one for each segment."""
        try:
            if self.memory is not None:
                return draw.carried(self.layers[0], self.memory, options.length, options.segments)
            if options.layers:
                return [draw.through(self.layers, options.length)]
            return [draw.once(self.layers[0], options.length)]
        except ValueError as error:  # what a pattern can say only when it knows the length
            raise UserError(f"{self.title}: {error}") from error

    def as_dict(self, drawings: list[draw.Drawing], length: int) -> dict[str, Any]:
        """For JSON."""
        kinds = ", ".join(dict.fromkeys(type(pattern).__name__ for pattern in self.layers))
        drawn = [drawing.as_dict() for drawing in drawings]
        about = {"pattern": kinds, "title": self.title, "length": length}
        return about | (drawn[0] if self.memory is None else {"segments": drawn})


def check(options: argparse.Namespace) -> None:
    """Raises for options that are out of range, or that the thing named would ignore."""
    pattern = options.name in PATTERNS
    kind = "pattern" if pattern else "configuration"
    for option in ("layer", "segments", "set") if pattern else ("example", "bidirectional"):
        if getattr(options, option) not in (None, [], False):
            raise UserError(f"--{option} does not apply to {options.name}, which is a {kind}: leave it out")
    limits = {"length": LONGEST_DRAWING, "layers": LONGEST_DRAWING, "segments": MOST_SEGMENTS}
    for option, most in limits.items():
        value = getattr(options, option)
        if value is not None and not 1 <= value <= most:
            raise UserError(f"--{option} is {value}, but a drawing needs 1 to {most}: change it")
    if options.layers and options.segments:
        raise UserError("--layers and --segments are drawings of their own: leave one of them out")


def example(options: argparse.Namespace) -> Subject:
    """An example of a registered pattern, in as many layers as are wanted."""
    number = options.example or 0
    cls: Callable[..., Pattern] = PATTERNS[options.name]
    examples = PATTERNS[options.name].examples()
    if not 0 <= number < len(examples):
        raise UserError(f"{options.name} has examples 0 to {len(examples) - 1}, got --example {number}")
    make = functools.partial(cls, **examples[number])
    shown = notation.write(make, PATTERNS)

    def built(causal: bool) -> Pattern:
        return make(site=Site(num_heads=EXAMPLE_HEADS, causal=causal), rngs=nnx.Rngs(0))

    try:
        pattern = built(not options.bidirectional)
    except ValueError as error:
        try:
            built(options.bidirectional)
        except ValueError:
            raise UserError(f"{shown}: {error}") from error
        remedy = "leave out" if options.bidirectional else "draw its other form with"
        raise UserError(f"{shown} has no such form: {remedy} --bidirectional") from error
    title = f"{shown}, {'bidirectional' if options.bidirectional else 'causal'}"
    if options.layers:
        return Subject(f"{title}, {options.layers} layers", (pattern,) * options.layers)
    return Subject(title, (pattern,))


def layers(stack: Layers, options: argparse.Namespace) -> Subject:
    """Layers of a configuration or run, and their memory if it is wanted."""
    first, count = options.layer or 0, options.layers or 1
    if not 0 <= first < stack.num_layers:
        raise UserError(f"{options.name} has layers 0 to {stack.num_layers - 1}, got --layer {first}")
    if first + count > stack.num_layers:
        at_most = f"at most {stack.num_layers - first} layers from layer {first} on"
        raise UserError(f"{options.name} has {at_most}, got --layers {count}: lower it")
    chosen = [stack.layers[i % len(stack.layers)] for i in range(first, first + count)]
    patterns = tuple(stack.pattern(i) for i in range(first, first + count))
    numbers = f"layers {first} to {first + count - 1}" if options.layers else f"layer {first}"
    title = f"{options.name}, {numbers}: {', '.join(type(pattern).__name__ for pattern in patterns)}"
    if not options.segments:
        return Subject(title, patterns)
    memory = chosen[0].memory
    if memory is None:
        raise UserError(f"{options.name} carries no memory from segment to segment: leave out --segments")
    graph, values = nnx.split(memory)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), values)  # of one layer; no value fills a slot
    return Subject(f"{title}, {type(memory).__name__}", patterns, nnx.merge(graph, zeros))
