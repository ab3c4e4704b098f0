"""A function of rows, for some of them, a few at a time: memory and work follow the rows that are asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lra.attention.visibility import Array
from lra.models.traced import turns


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def some_rows(
    function: Callable[[Any, Array, Array], tuple[Array, Any]],
    parameters: Any,
    x: Array,
    targets: Array,
    chosen: Array | None,
    chunk: int,
) -> tuple[Array, Any]:
    """Applies a function to the chosen rows, a chunk at a time, and computes it again for the gradient.

    Shapes are static; the number of turns is that of the chosen rows, so that a loop over none of them costs nothing.

    Args:
        function: `function(parameters, x [c, C], targets [c])` gives a number a row [c], and a tree of other arrays
            [c, ...], which have no gradient. Rows never meet in it.
        parameters: a tree of arrays.
        x: rows [N, C].
        targets: [N] integers.
        chosen: which rows are wanted, [N] booleans; None for all.
        chunk: c, rows at a time.

    Returns:
        What the function gives, [N] and [N, ...], and zeros for other rows.
    """
    return _forward(function, parameters, x, targets, chosen, chunk)[0]


def _forward(
    function: Callable[[Any, Array, Array], tuple[Array, Any]],
    parameters: Any,
    x: Array,
    targets: Array,
    chosen: Array | None,
    chunk: int,
) -> tuple[tuple[Array, Any], Any]:
    order, count = _order(chosen, len(x), chunk)

    def turn(n: Array, out: Any) -> Any:
        index = jax.lax.dynamic_slice_in_dim(order, n * chunk, chunk)
        values = function(parameters, _at(x, index), _at(targets, index))
        return jax.tree.map(lambda all_, some: all_.at[index].set(some, mode="drop"), out, values)

    row = jax.eval_shape(function, parameters, x[:1], targets[:1])
    out = jax.tree.map(lambda one: jnp.zeros((len(x), *one.shape[1:]), one.dtype), row)
    out = _loop(turn, out, count, len(order) // chunk)
    return out, (parameters, x, targets, order, count)


def _backward(
    function: Callable[[Any, Array, Array], tuple[Array, Any]], chunk: int, saved: Any, cotangents: tuple[Array, Any]
) -> tuple[Any, Array, None, None]:
    parameters, x, targets, order, count = saved

    def turn(n: Array, sums: tuple[Any, Array]) -> tuple[Any, Array]:
        index = jax.lax.dynamic_slice_in_dim(order, n * chunk, chunk)
        of = _at(targets, index)
        _, pull = jax.vjp(lambda parameters, x: function(parameters, x, of)[0], parameters, _at(x, index))
        by_parameters, by_x = pull(_at(cotangents[0], index))
        return jax.tree.map(jnp.add, sums[0], by_parameters), sums[1].at[index].set(by_x, mode="drop")

    sums = _loop(turn, jax.tree.map(jnp.zeros_like, (parameters, x)), count, len(order) // chunk)
    return *sums, None, None


some_rows.defvjp(_forward, _backward)


def _order(chosen: Array | None, size: int, chunk: int) -> tuple[Array, Array | None]:
    """The chosen rows first, then `size` for no row, as many as whole chunks have; and the number of chunks to do."""
    order = jnp.arange(-(-size // chunk) * chunk, dtype=jnp.int32)
    if chosen is None:
        return jnp.minimum(order, size), None
    rows = jnp.argsort(~chosen, stable=True).astype(jnp.int32)
    rows = jnp.pad(rows, (0, len(order) - size), constant_values=size)
    number = chosen.sum(dtype=jnp.int32)
    return jnp.where(order < number, rows, size), (number + chunk - 1) // chunk


def _at(x: Array, index: Array) -> Array:
    """Rows of an array, and zeros for none."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def _loop(turn: Callable[[Array, Any], Any], start: Any, count: Array | None, most: int) -> Any:
    if count is None:
        return jax.lax.fori_loop(0, most, turn, start)
    with turns(most):
        return jax.lax.fori_loop(0, count, turn, start)
