"""A trace of a few steps, for Perfetto (ui.perfetto.dev) or TensorBoard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

STEP = "train"
"""Name of a step's event in the trace; its argument `step_num` is the step."""


class Profile:
    """Traces the steps from `first` to `last`, both included; nothing when there are none to trace.

    Args:
        folder: where to; a trace is a subfolder.
        steps: first and last step, or None.
        say: tells the user.
    """

    def __init__(self, folder: Path, steps: tuple[int, int] | None, say: Callable[[str], None]) -> None:
        self._folder, self._steps, self._say = folder, steps, say
        self._tracing = False

    def step(self, step: int) -> jax.profiler.StepTraceAnnotation:
        """The context in which a step is dispatched."""
        if self._steps is not None and step == self._steps[0] and not self._tracing:
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
            self._tracing = True
        return jax.profiler.StepTraceAnnotation(STEP, step_num=step)

    def after(self, step: int, result: Any) -> bool:
        """Ends the trace after its last step, whose result is waited for; says whether it did."""
        if not self._tracing or self._steps is None or step != self._steps[1]:
            return False
        jax.block_until_ready(result)
        self._stop()
        self._steps = None
        return True

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._tracing = False
        newest = max(self._folder.rglob("perfetto_trace.json.gz"), key=lambda path: path.stat().st_mtime)
        self._say(f"trace for ui.perfetto.dev: {newest}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tracing:  # the run ended early, for a reason that counts more than what may go wrong here
            with contextlib.suppress(Exception):
                self._stop()
