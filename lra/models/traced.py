"""What a function costs, read from its own trace: floating-point operations, and what its gradient keeps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from lra.attention.visibility import Array

_TURNS = re.compile(r"at most (\d+) turns")


def turns(most: int) -> AbstractContextManager[Any]:
    """Says of loops traced inside whose number of turns depends on values how many turns they can take at most."""
    return jax.named_scope(f"at most {most} turns")


def flops(function: Callable[..., Any], *args: Any, scope: str | None = None) -> int:
    """Floating-point operations of the matrix products and convolutions, a multiplication and an addition being two.

    Loops count each turn, or those that they can take at most (`turns`), recomputation and masked entries included;
    elementwise work is not counted, as in papers.

    Args:
        function: of arrays. args: arrays, or `jax.ShapeDtypeStruct`s; nothing is computed.
        scope: counts only what is traced inside `jax.named_scope(scope)`; None for everything.

    Raises:
        ValueError: products in a loop whose number of turns is not known.
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr, scope)


def kept(function: Callable[[Any, Any], Array], parameters: Any, inputs: Any) -> int:
    """Bytes that depend on `inputs` and are kept from the forward pass for the gradient by the parameters and inputs.

    As traced: the compiler may recompute, join or round up. What depends on the parameters alone is not counted.

    Args:
        function: `function(parameters, inputs)`. parameters: a tree of arrays or shapes. inputs: another.
    """

    def forward(parameters: Any, inputs: Any) -> list[Array]:
        return jax.tree.leaves(jax.vjp(function, parameters, inputs)[1])

    jaxpr = jax.make_jaxpr(forward)(parameters, inputs).jaxpr
    own = len(jaxpr.invars) - len(jax.tree.leaves(inputs))
    varies = _varies(jaxpr, [i >= own for i in range(len(jaxpr.invars))])
    found = {id(v): v.aval for v, varying in zip(jaxpr.outvars, varies, strict=True) if varying}
    return sum(aval.size * aval.dtype.itemsize for aval in found.values())


def _flops(jaxpr: Jaxpr, scope: str | None) -> int:
    total = 0
    eqn: Any
    for eqn in jaxpr.eqns:
        name: str = eqn.primitive.name
        left_out = scope is not None and scope not in str(eqn.source_info.name_stack)
        inner = [_flops(each, scope if left_out else None) for each in _inner(eqn)]
        if left_out and name in ("dot_general", "conv_general_dilated"):
            continue
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        elif name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * (math.prod(kernel) // outputs)
        elif name == "scan":
            total += eqn.params["length"] * sum(inner)
        elif name == "cond":
            total += max(inner)
        elif name == "while" and any(inner):
            known = _TURNS.findall(str(eqn.source_info.name_stack))
            if not known:
                raise ValueError(
                    "products in a `while_loop` cannot be counted: use `scan`, whose turns are known, or say `turns`"
                )
            total += int(known[-1]) * sum(inner)
        else:
            total += sum(inner)
    return total


def _inner(eqn: Any) -> Iterator[Jaxpr]:
    """The programs that an equation holds."""
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
        if isinstance(value, ClosedJaxpr | Jaxpr):
            yield value.jaxpr if isinstance(value, ClosedJaxpr) else value


def _varies(jaxpr: Jaxpr, inputs: list[bool]) -> list[bool]:
    """Which outputs depend on the inputs that are marked."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        marks = [not isinstance(v, Literal) and known.get(v, False) for v in eqn.invars]
        if eqn.primitive.name in ("jit", "scan"):
            outputs = _varies_inside(eqn, marks)
        else:
            outputs = [any(marks)] * len(eqn.outvars)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [not isinstance(v, Literal) and known.get(v, False) for v in jaxpr.outvars]


def _varies_inside(eqn: Any, marks: list[bool]) -> list[bool]:
    """The same for a call, or for a loop, whose carry hands marks from turn to turn."""
    jaxpr = eqn.params["jaxpr"].jaxpr
    first, size = eqn.params.get("num_consts", 0), eqn.params.get("num_carry", 0)
    while True:
        outputs = _varies(jaxpr, marks)
        carried = [a or b for a, b in zip(marks[first : first + size], outputs[:size], strict=True)]
        if carried == marks[first : first + size]:
            return outputs
        marks = [*marks[:first], *carried, *marks[first + size :]]
