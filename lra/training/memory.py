"""What a training step needs in memory, before the first one runs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Bytes on one device.

    Attributes:
        state: of each part of the training state: parameters, buffers, optimizer, memory, ...
        temporary: what the compiled step allocates while it runs, by XLA's plan; None where the backend does not say.
        peak: state, batch and temporaries together; None likewise.
        limit: what the device gives to programs; None where the backend does not say, as on CPUs.
    """

    state: dict[str, int]
    temporary: int | None
    peak: int | None
    limit: int | None

    @property
    def activations(self) -> int | None:
        """An estimate: the temporaries less one gradient for each parameter. XLA may share or fuse either."""
        return None if self.temporary is None else max(self.temporary - self.state["parameters"], 0)

    def as_dict(self) -> dict[str, int | None]:
        """The numbers by name, in bytes."""
        values = {f"{name}_bytes": size for name, size in self.state.items()}
        return values | {
            "activations_estimate_bytes": self.activations,
            "temporary_bytes": self.temporary,
            "peak_bytes": self.peak,
            "device_limit_bytes": self.limit,
        }

    def __str__(self) -> str:
        held = ", ".join(f"{name} {_megabytes(size)}" for name, size in self.state.items() if size)
        if self.temporary is None or self.peak is None:
            return f"memory: {held}; this backend does not say what a step needs beside it"
        limit = "" if self.limit is None else f" of {_megabytes(self.limit)}"
        return (
            f"memory: {held}; a step's temporaries {_megabytes(self.temporary)} "
            f"(activations about {_megabytes(self.activations or 0)}); together {_megabytes(self.peak)}{limit}"
        )


def report(state: Any, compiled: jax.stages.Compiled) -> MemoryReport:
    """The report of a compiled step.

    Args:
        state: the training state or its shapes, a dataclass.
        compiled: the step.
    """
    parts = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    sizes = {name: sum(map(_bytes, jax.tree.leaves(part))) for name, part in parts.items() if name != "step"}
    plan = compiled.memory_analysis()
    temporary = peak = None
    if plan is not None:
        temporary = int(plan.temp_size_in_bytes)
        kept = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
        peak = int(kept) + temporary
    statistics = jax.devices()[0].memory_stats() or {}
    return MemoryReport(sizes, temporary, peak, statistics.get("bytes_limit"))


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
