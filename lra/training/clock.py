"""What the machine does while a model trains: throughput, waiting for data, compilations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from jax import monitoring

_T = TypeVar("_T")

_COMPILED, _CACHED = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"

MACHINE = ("tokens_per_second", "data_wait_share", "compilations")
"""Metrics that depend on the machine: two runs of one configuration differ in them only."""


class Clock:
    """Measures between fetches of metrics; the first step, evaluation and saving don't count.

    Compilations are counted while the context is open, in the whole process; programs that come from JAX's cache on
    disk are not compiled.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._tokens = self._seconds = self._waited = self._waiting = 0.0
        self._steps = 0
        self._compilations = 0

    def pause(self) -> None:
        """What follows, up to the next `add`, does not count."""
        self._last = None

    def next(self, batches: Iterator[_T]) -> _T:
        """The next batch; how long the loop stands still for it is measured."""
        began = time.perf_counter()
        batch = next(batches)
        self._waiting += time.perf_counter() - began
        return batch

    def add(self, tokens: float) -> None:
        """A step of so many tokens is done."""
        now = time.perf_counter()
        if self._last is not None:
            self._tokens += tokens
            self._seconds += now - self._last
            self._waited += self._waiting
            self._steps += 1
        self._last, self._waiting = now, 0.0

    def take(self) -> tuple[dict[str, Any], float | None]:
        """The metrics since the last call, None where nothing was measured, and the seconds of a step.

        `data_wait_share` is the share of the time that the loop stood still for data. The device works on the step
        before meanwhile, so this bounds from above what it waits.
        """
        metrics: dict[str, Any] = dict.fromkeys(MACHINE)
        seconds_a_step = None
        if self._steps:
            metrics["tokens_per_second"] = self._tokens / self._seconds
            metrics["data_wait_share"] = self._waited / self._seconds
            seconds_a_step = self._seconds / self._steps
        metrics["compilations"] = self._compilations
        self._tokens = self._seconds = self._waited = 0.0
        self._steps = 0
        return metrics, seconds_a_step

    def __enter__(self) -> Self:
        monitoring.register_event_duration_secs_listener(self._heard_duration)
        monitoring.register_event_listener(self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        monitoring.unregister_event_duration_listener(self._heard_duration)
        monitoring.unregister_event_listener(self._heard)

    def _heard_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        self._compilations += event == _COMPILED

    def _heard(self, event: str, **_: Any) -> None:
        self._compilations -= event == _CACHED  # which is timed as a compilation too
