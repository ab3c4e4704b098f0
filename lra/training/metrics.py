"""`metrics.jsonl`: one JSON object a line, in the order of steps, across interruptions."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from lra.errors import UserError
from lra.training import folder
from lra.training.tensorboard import TensorBoard


class MetricsFile:
    """Appends lines; each is on disk before `write` returns.

    Args:
        path: of the file, made if need be.
        step: of the restored state. Lines of later steps are dropped, since those steps are done again, and so is a
            last line that was cut off.
        board: where the lines are shown too, or None.

    Raises:
        UserError: a line but the last is no JSON object with a step.
    """

    def __init__(self, path: Path, step: int, board: TensorBoard | None = None) -> None:
        if path.exists():
            _rewind(path, step)
        self._path, self._board = path, board
        self._file = path.open("a", encoding="utf-8")

    def rewind(self, step: int) -> None:
        """Drops the lines of later steps, which are done again."""
        self._file.close()
        _rewind(self._path, step)
        self._file = self._path.open("a", encoding="utf-8")
        if self._board is not None:
            self._board.rewind(step)

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Appends one line and returns it: arrays as lists, and None for numbers that JSON lacks (NaN, infinities)."""
        line = {name: _plain(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise folder.unwritable(self._path, error) from error
        if self._board is not None:
            self._board.write(line)
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # of a line that `write` could not write, as it has said
            self._file.close()


def _rewind(path: Path, step: int) -> None:
    text = path.read_text(encoding="utf-8", errors="replace")
    *lines, _ = text.split("\n")  # what follows the last line end was cut off
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            stays = json.loads(line)["step"] <= step
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"line {number} of {path} is no line of metrics: delete that line") from error
        if stays:
            kept.append(line + "\n")
    if "".join(kept) != text:
        folder.replace(path, "".join(kept))


def _plain(value: Any) -> Any:
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
