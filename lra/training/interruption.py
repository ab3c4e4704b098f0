"""SIGTERM and Ctrl-C as a wish that the loop reads between steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_SECONDS = 0.3
"""Launchers send a signal to a process and to its group: what follows so soon is the same wish."""


class Interruption:
    """While it is entered, the first SIGTERM or Ctrl-C is noted only, and a later Ctrl-C kills the process at once.

    A thread counts the signals, because Python's own handlers wait while the main thread compiles or computes. Does
    nothing outside the main thread, where Python has no signal handlers.

    Attributes:
        signal: the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._thread = threading.Thread(target=self._watch, name="interruption", daemon=True)
            self._thread.start()
            self._former_pipe = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._former = {each: signal.signal(each, _ignore) for each in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._former:
            return
        for each, handler in self._former.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(self._former_pipe)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _watch(self) -> None:
        noted = 0.0
        while number := os.read(self._read, 1):
            if number[0] not in SIGNALS:
                continue
            if self.signal is None:
                self.signal, noted = signal.Signals(number[0]), time.monotonic()
            elif number[0] == signal.SIGINT and time.monotonic() - noted > _SAME_SECONDS:
                os._exit(128 + signal.SIGINT)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Leaves the signal to the thread; unlike SIG_IGN, which would also keep it from the pipe."""
