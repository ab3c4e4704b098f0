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

    A thread counts the signals, because Python's own handlers wait while the main thread compiles or computes. Outside
    the main thread, where Python has no handlers, nothing is noted.

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
            self._former = {each: signal.signal(each, self._note) for each in SIGNALS}
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

    def _note(self, number: int, frame: FrameType | None = None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)

    def _watch(self) -> None:
        first = None
        while number := os.read(self._read, 1):
            if number[0] not in SIGNALS:
                continue
            if first is None:
                first = time.monotonic()
                self._note(number[0])
            elif number[0] == signal.SIGINT and time.monotonic() - first > _SAME_SECONDS:
                os._exit(128 + signal.SIGINT)
