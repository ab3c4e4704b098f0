"""The metrics of a run for TensorBoard, as event files.

They are written here and now, since tensorboardX' `SummaryWriter` leaves that to a thread: it dies when the disk is
full, and whoever writes or closes waits for it for ever.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lra.training import folder as files

FLUSH_SECONDS = 10


class TensorBoard:
    """Writes lines of metrics as scalars `SPLIT/NAME`, `SPLIT/NAME/LAYER` and `SPLIT/NAME/LAYER/HEAD`.

    Args:
        folder: of the event files; each start of a run adds one.
        step: of the restored state; TensorBoard forgets what earlier files have after it.

    Raises:
        UserError: the folder cannot be written; so do all methods.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._files = folder, 0
        self._open(step)

    def rewind(self, step: int) -> None:
        """Forgets later steps, which are done again."""
        with self._written():
            self._writer.close()
        self._files += 1
        self._open(step)

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes a line as it stands in `metrics.jsonl`; what is no number is left out."""
        from tensorboardX.proto.summary_pb2 import Summary

        scalars = []
        for name, value in line.items():
            for suffix, item in _items(value):
                if name != "step" and isinstance(item, int | float) and not isinstance(item, bool):
                    scalars.append(Summary.Value(tag=f"{line['split']}/{name}{suffix}", simple_value=item))
        self._add(step=line["step"], summary=Summary(value=scalars))

    def _open(self, step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter  # loads protobuf, and torch where that is installed
        from tensorboardX.proto.event_pb2 import SessionLog

        with self._written():
            self._folder.mkdir(parents=True, exist_ok=True)
            # A name of its own for each file, in order, since those that tensorboardX gives count seconds only.
            self._writer = EventsWriter(str(self._folder / "events"), f".{self._files}.{step}")
        self._flushed = time.monotonic()
        self._add(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def _add(self, **what: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        with self._written():
            self._writer.write_event(Event(wall_time=time.time(), **what))
            if time.monotonic() - self._flushed > FLUSH_SECONDS:
                self._writer.flush()
                self._flushed = time.monotonic()

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise files.unwritable(self._folder, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(*() if kind is None else (Exception,)), self._written():  # the first error counts
            self._writer.close()


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds, with its place such as "/3" or "/3/0"; a value that is no list holds itself."""
    if not isinstance(value, list):
        yield "", value
        return
    for n, item in enumerate(value):
        for suffix, inner in _items(item):
            yield f"/{n}{suffix}", inner
