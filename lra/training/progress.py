"""What a person sees while a model trains: a moving line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import datetime
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar


class Progress:
    """Shows steps, bits per byte, tokens a second and the time left.

    Args:
        console: where to.
        total: step at which this run stops.
        step: step from which it starts.
    """

    def __init__(self, console: Console, total: int, step: int) -> None:
        self._console, self._total = console, total
        columns = (BarColumn(), MofNCompleteColumn(), TaskProgressColumn(), TextColumn("{task.fields[status]}"))
        self._bar = Bar(*columns, console=console) if console.is_terminal else None
        self._task = self._bar.add_task("train", total=total, completed=step, status="") if self._bar else None

    def advance(self, step: int) -> None:
        """Moves the bar of a terminal."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step)

    def report(
        self, step: int, bits_per_byte: float, tokens_per_second: float | None, seconds_left: float | None
    ) -> None:
        """Shows the numbers of a step; those that are None are not known yet."""
        parts = [f"{bits_per_byte:.4f} bits per byte"]
        if tokens_per_second is not None:
            parts.append(f"{tokens_per_second:,.0f} tokens/s")
        if seconds_left is not None:
            parts.append(f"{datetime.timedelta(seconds=round(seconds_left))} left")
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, status="  ".join(parts))
        else:
            self.say(f"step {step}/{self._total}  " + "  ".join(parts))

    def say(self, text: str) -> None:
        """Writes a line, above the bar of a terminal."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
