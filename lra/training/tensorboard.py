"""The metrics of a run for TensorBoard, as event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FLUSH_SECONDS = 10


class TensorBoard:
    """Writes lines of metrics as scalars `SPLIT/NAME`, and `SPLIT/NAME/LAYER` for those by layer.

    Args:
        folder: of the event files; each start of a run adds one.
        step: of the restored state; TensorBoard forgets what earlier files have after it.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._files = folder, 0
        self._writer = self._open(step)

    def _open(self, step: int) -> Any:
        from tensorboardX import SummaryWriter  # loads protobuf, and torch where that is installed

        # A name of its own for each file, since those that tensorboardX gives count seconds only.
        suffix = f".{step}.{self._files}"
        return SummaryWriter(str(self._folder), purge_step=step + 1, flush_secs=FLUSH_SECONDS, filename_suffix=suffix)

    def rewind(self, step: int) -> None:
        """Forgets later steps, which are done again."""
        self._writer.close()
        self._files += 1
        self._writer = self._open(step)

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes a line as it stands in `metrics.jsonl`; what is no number is left out."""
        for name, value in line.items():
            values = {f"/{n}": item for n, item in enumerate(value)} if isinstance(value, list) else {"": value}
            for suffix, item in values.items():
                if name != "step" and isinstance(item, int | float) and not isinstance(item, bool):
                    self._writer.add_scalar(f"{line['split']}/{name}{suffix}", item, line["step"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
