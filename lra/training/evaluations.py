"""What `lra eval` leaves in a run folder: of each split, protocol with its numbers and kind of weights the newest."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lra.training import folder


def keep(workdir: Path, values: dict[str, Any]) -> Path:
    """Writes a report, whole or not at all, in place of the former one of its kind; returns the file.

    Args:
        workdir: the run folder.
        values: `Report.as_dict()` with "protocol_name" and whatever else is to be kept.

    Raises:
        UserError: it cannot be written.
    """
    kind = [values["split"], values["protocol_name"]]
    kind += ["ema"] if values["weights"] == "ema" else []
    kind += [f"first{values['tokens_scored']}"] if values["partial"] else []
    kind += [hashlib.sha256(values["protocol"].encode()).hexdigest()[:8]]
    path = workdir / folder.EVALUATIONS / f"{'-'.join(kind)}.json"
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise folder.unwritable(path.parent, error) from error
    folder.replace(path, json.dumps(values, indent=2, allow_nan=False) + "\n")
    return path


def read(workdir: Path) -> Iterator[dict[str, Any]]:
    """Yields the reports of a run by file name, but for files that hold none."""
    for path in sorted((workdir / folder.EVALUATIONS).glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            values = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(values, dict) and {"corpus", "split", "protocol", "bits_per_byte"} <= values.keys():
                yield values
