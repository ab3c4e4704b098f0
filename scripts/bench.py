"""Speed and memory of every pattern against length, and against `jax.nn.dot_product_attention`.

One attention call, forward and backward, causal, float32, B=1 H=8 D=64. Candidates of a comparison take turns in one
process, so that their ratio holds when the machine's speed drifts. Temporary memory is what XLA reports for the
compiled gradient.

    python scripts/bench.py                         the table and the figures
    python scripts/bench.py --lengths 1024 2048     other lengths
    python scripts/bench.py --json bench.json       the same as JSON
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

from lra.attention import PATTERNS, Full, Site, SlidingWindow

HEADS, WIDTH = 8, 64
WINDOW = 128
ARGUMENTS: dict[str, dict[str, Any]] = {
    "sliding_window": {"window": WINDOW},
    "heads": {"groups": ((HEADS // 2, functools.partial(SlidingWindow, window=WINDOW)), (HEADS // 2, Full))},
}
"""Realistic sizes; a pattern that is not here runs with its first example."""

Attend = Callable[[Any, Any, Any], Any]


class Candidate:
    """A compiled gradient at one length."""

    def __init__(self, attend: Attend, length: int) -> None:
        self.arrays = [jax.random.normal(jax.random.key(i), (1, length, HEADS, WIDTH)) for i in range(4)]
        q, k, v, weight = self.arrays

        def loss(q: Any, k: Any, v: Any, weight: Any) -> Any:
            return jnp.vdot(attend(q, k, v), weight)

        began = time.perf_counter()
        self.compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, v, weight).compile()
        self.compile_seconds = time.perf_counter() - began
        analysis = self.compiled.memory_analysis()
        if analysis is None:
            raise SystemExit("this backend does not say how much memory a compiled function needs")
        self.bytes = analysis.temp_size_in_bytes
        self.seconds: list[float] = []

    def run(self) -> float:
        began = time.perf_counter()
        jax.block_until_ready(self.compiled(*self.arrays))
        self.seconds.append(time.perf_counter() - began)
        return self.seconds[-1]


def take_turns(candidates: list[Candidate], repeat: int) -> None:
    for candidate in candidates:
        candidate.run()
        candidate.seconds.clear()
    for _ in range(repeat):
        for candidate in candidates:
            candidate.run()


def ratio(a: Candidate, b: Candidate) -> float:
    """Median of the ratios turn by turn."""
    return statistics.median(x / y for x, y in zip(a.seconds, b.seconds, strict=True))


def pattern(name: str) -> Attend:
    arguments = ARGUMENTS.get(name) or PATTERNS[name].examples()[0]
    built = PATTERNS[name](**arguments, site=Site(num_heads=HEADS, head_dim=WIDTH), rngs=nnx.Rngs(0))
    return lambda q, k, v: built(q, k, v).out


def against_length(lengths: list[int], repeat: int) -> list[dict[str, Any]]:
    rows = []
    for name in PATTERNS:
        candidates = [Candidate(pattern(name), length) for length in lengths]
        take_turns(candidates, repeat)
        for n, (length, candidate) in enumerate(zip(lengths, candidates, strict=True)):
            before = candidates[n - 1] if n else None
            rows.append(
                {
                    "pattern": name,
                    "length": length,
                    "milliseconds": 1e3 * statistics.median(candidate.seconds),
                    "time_ratio": ratio(candidate, before) if before else None,
                    "temporary_megabytes": candidate.bytes / 1e6,
                    "memory_ratio": candidate.bytes / before.bytes if before else None,
                    "compile_seconds": candidate.compile_seconds,
                }
            )
    return rows


def against_jax(length: int, repeat: int) -> list[dict[str, Any]]:
    dense = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    pairs = [
        ("full", dense, "jax.nn.dot_product_attention, causal"),
        (
            "sliding_window",
            functools.partial(dense, local_window_size=(WINDOW - 1, 0)),
            f"the same with local_window_size, window {WINDOW}",
        ),
    ]
    rows = []
    for name, other, description in pairs:
        candidates = [Candidate(pattern(name), length), Candidate(other, length)]
        take_turns(candidates, repeat)
        rows.append(
            {
                "pattern": name,
                "against": description,
                "length": length,
                "time_ratio": ratio(*candidates),
                "milliseconds": 1e3 * statistics.median(candidates[0].seconds),
                "temporary_memory_ratio": candidates[0].bytes / candidates[1].bytes,
            }
        )
    return rows


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    shown = Table(title=title, title_justify="left")
    for column in rows[0]:
        shown.add_column(column.replace("_", " "), justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        shown.add_row(*("" if x is None else f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--against", type=int, default=4096, help="length of the comparison with jax.nn (4096)")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = f"{platform.machine()}, jax {jax.__version__}, {jax.devices()[0].device_kind}"
    lengths = against_length(options.lengths, options.repeat)
    compared = against_jax(options.against, options.repeat)
    console = Console()
    console.print(f"forward and backward, causal, float32, B=1 H={HEADS} D={WIDTH}; {machine}", highlight=False)
    console.print(table("Against length", lengths), table("Against jax.nn", compared))
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine, "lengths": lengths, "against": compared}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
