"""A bar on stderr that follows what a command is doing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

Show: TypeAlias = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done, and how much there is (None: not known)."""


@contextlib.contextmanager
def bar(amount: ProgressColumn | None = None) -> Iterator[Show]:
    """Gives a function that moves the bar; it does nothing where stderr is no terminal.

    Args:
        amount: how to write how much is done; None for "3/7".
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), amount or MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("", total=None)

        def show(what: str, done: int, total: int | None) -> None:
            shown.update(task, description=what, completed=done, total=total)

        yield show
