"""What attention costs: time and temporary memory of patterns, compared in turns.

Candidates take turns in one process, so that their ratio holds when the machine's speed drifts.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lra import notation
from lra.attention import PATTERNS, Attended, Site
from lra.attention.pattern import Inputs
from lra.attention.visibility import Array
from lra.errors import UserError

PASSES = ("forward", "forward + backward")

Make = Callable[..., Any]


class DotProduct(nnx.Module):
    """`jax.nn.dot_product_attention`, as a baseline.

    Args:
        local_window_size: keys before and after the query's own that it reads; None for all.
        site: where it stands. rngs: random streams.
    """

    def __init__(self, *, local_window_size: int | tuple[int, int] | None = None, site: Site, rngs: nnx.Rngs) -> None:
        self.local_window_size, self.causal = local_window_size, site.causal

    @classmethod
    def typical(cls, num_heads: int) -> dict[str, Any]:
        """No arguments."""
        return {}

    def __call__(self, q: Array, k: Array, v: Array, **_: Any) -> Attended:
        return Attended(
            jax.nn.dot_product_attention(q, k, v, is_causal=self.causal, local_window_size=self.local_window_size)
        )


CANDIDATES: Mapping[str, type[Any]] = ChainMap(PATTERNS, {"jax": DotProduct})
"""What can be compared: every registered pattern, and JAX's own attention."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Under what is measured. Arrays are float32.

    Attributes:
        num_heads: H.
        head_dim: D, which is E too.
        batch: B.
        causal: whether queries may not read later keys.
        repeat: turns.
    """

    num_heads: int = 8
    head_dim: int = 64
    batch: int = 1
    causal: bool = True
    repeat: int = 5

    @property
    def site(self) -> Site:
        """Where the patterns stand."""
        width = self.num_heads * self.head_dim
        return Site(num_heads=self.num_heads, head_dim=self.head_dim, width=width, causal=self.causal)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A pattern with its arguments, and its text."""

    name: str
    make: Make

    def build(self, setting: Setting) -> Any:
        """The pattern.

        Raises:
            UserError: its constructor refuses the arguments or the setting.
        """
        try:
            return self.make(site=setting.site, rngs=nnx.Rngs(0))
        except ValueError as error:
            raise UserError(f"{self.name}: {error}") from error


def candidate(text: str, setting: Setting) -> Candidate:
    """The candidate that a text such as `sliding_window(window=64)` describes; see `notation.read`."""
    make = notation.read(text, CANDIDATES, setting.num_heads)
    return Candidate(notation.write(make, CANDIDATES), make)


def compare(
    candidates: Iterable[Candidate], baseline: Candidate, length: int, setting: Setting
) -> list[dict[str, Any]]:
    """Measures candidates and the baseline at one length, in turns.

    Args:
        candidates: what to measure.
        baseline: what the ratios are against; measured once if it is a candidate too.
        length: T.
        setting: heads, batch, turns.

    Returns:
        A row for each candidate and pass, JSON values only: pattern, length, pass (forward, forward + backward);
        `milliseconds` and `ratio` (turn by turn, to the baseline's same pass), medians with `_iqr`, the interquartile
        range; `temporary_bytes`, which XLA reports for the compiled function (None where the backend does not say);
        `compile_seconds`, tracing included.

    Raises:
        UserError: arguments that do not fit the setting or the length.
    """
    arrays = _arrays(length, setting)
    unique = list({each.name: each for each in (baseline, *candidates)}.values())
    programs = {(each.name, kind): _Program(each, kind, arrays, setting) for each in unique for kind in PASSES}
    for program in programs.values():
        program.run()  # what the first call alone does is not measured
    seconds = np.array([[program.run() for program in programs.values()] for _ in range(setting.repeat)])
    timed = dict(zip(programs, seconds.T, strict=True))
    return [
        {
            "pattern": name, "length": length, "pass": kind,
            **_spread("milliseconds", 1e3 * timed[name, kind]),
            **_spread("ratio", timed[name, kind] / timed[baseline.name, kind]),
            "temporary_bytes": program.temporary_bytes, "compile_seconds": program.compile_seconds,
        }
        for (name, kind), program in programs.items()
    ]  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]], title: str) -> Group:
    """The rows of `compare` for people: under each pattern its lengths, of which the passes share a row."""
    parts: list[Any] = [Text(title)]
    for name in dict.fromkeys(row["pattern"] for row in rows):
        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for column, width in (("T", 6), ("pass", 10), ("ms", 17), ("ratio", 17), ("temp MB", 8), ("compile s", 9)):
            shown.add_column(column, justify="left" if column == "pass" else "right", no_wrap=True, width=width)
        own = [row for row in rows if row["pattern"] == name]
        for first, second in zip(own[::2], own[1::2], strict=True):
            passes = [
                (
                    row["pass"].removeprefix("forward ") if row is second else row["pass"],
                    f"{row['milliseconds']:.2f} ± {row['milliseconds_iqr']:.2f}",
                    f"{row['ratio']:.3f} ± {row['ratio_iqr']:.3f}",
                    "?" if row["temporary_bytes"] is None else f"{row['temporary_bytes'] / 1e6:.1f}",
                    f"{row['compile_seconds']:.1f}",
                )
                for row in (first, second)
            ]
            shown.add_row(str(first["length"]), *map("\n".join, zip(*passes, strict=True)))
        parts += [Text(f"\n{name}"), shown]
    return Group(*parts)


class _Program:
    """One pass of a candidate, compiled."""

    def __init__(self, each: Candidate, kind: str, arrays: Sequence[Array], setting: Setting) -> None:
        parts: Any = nnx.split(each.build(setting), nnx.Param, ...)
        graph, parameters, rest = parts
        self._arguments = (parameters, rest, *arrays)
        function = functools.partial(_forward if kind == PASSES[0] else _gradient, graph)
        began = time.perf_counter()
        try:
            self._compiled = jax.jit(function).lower(*self._arguments).compile()
        except ValueError as error:
            raise UserError(f"{each.name}: {error}") from error
        self.compile_seconds = time.perf_counter() - began
        analysis = self._compiled.memory_analysis()
        self.temporary_bytes = None if analysis is None else int(analysis.temp_size_in_bytes)

    def call(self) -> Any:
        """What the pass gives, once it is there."""
        return jax.block_until_ready(self._compiled(*self._arguments))

    def run(self) -> float:
        """Seconds of one call."""
        began = time.perf_counter()
        self.call()
        return time.perf_counter() - began


def _arrays(length: int, setting: Setting) -> list[Array]:
    """q, k, v and what the output is multiplied with in the loss, [B, T, H, D] each."""
    shape = (setting.batch, length, setting.num_heads, setting.head_dim)
    return [jax.random.normal(jax.random.key(n), shape) for n in range(4)]


def _attend(graph: Any, parameters: Any, rest: Any, q: Array, k: Array, v: Array, train: bool) -> Attended:
    pattern = nnx.merge(graph, parameters, rest)
    flat = q.reshape(*q.shape[:2], -1)  # any array of this shape will do for those that read layer inputs
    inputs = Inputs(flat, flat, lambda x: (x.reshape(*x.shape[:2], *q.shape[2:]),) * 3)
    attended: Attended = pattern(q, k, v, inputs=inputs, key=jax.random.key(0), train=train)
    return attended


def _forward(graph: Any, parameters: Any, rest: Any, q: Array, k: Array, v: Array, cotangent: Array) -> Attended:
    return _attend(graph, parameters, rest, q, k, v, train=False)


def _gradient(graph: Any, parameters: Any, rest: Any, q: Array, k: Array, v: Array, cotangent: Array) -> Any:
    """As a training step does it: gradients of parameters and arrays, and the updates of buffers."""

    def loss(parameters: Any, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        attended = _attend(graph, parameters, rest, q, k, v, train=True)
        return jnp.vdot(attended.out, cotangent) + sum(attended.losses.values()), attended.updates

    return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(parameters, q, k, v)


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    low, median, high = np.percentile(values, (25, 50, 75))
    return {name: float(median), f"{name}_iqr": float(high - low)}
