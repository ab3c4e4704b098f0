"""`record.json`: with what code, where and when a run was started, and how it ended; and the list of runs."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

import lra
from lra.errors import Interrupted, UserError, quoted
from lra.training import folder

PACKAGES = ("flax", "gin-config", "grain", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")
"""Those that a run's numbers depend on."""


@contextlib.contextmanager
def recorded(
    workdir: Path, *, step: int, target: int, total: int, corpus: Mapping[str, str], about: Mapping[str, Any]
) -> Iterator[None]:
    """Adds a start to the record of a run, and how it ended once it has.

    The status is "running" until then; afterwards "finished", "stopped" (before the configured total, as asked),
    "interrupted" (by a signal) or "failed", with the reason. A process that was killed leaves "running" behind.

    Args:
        workdir: the run folder.
        step: from which it starts.
        target: step at which it stops.
        total: steps of the configured run.
        corpus: name, description and digest.
        about: further facts of this start, such as the command.
    """
    path = workdir / folder.RECORD
    record = read(workdir)
    start = {"time": _now(), "step": step, **about, **_surroundings()}
    record |= {"steps": total, "corpus": dict(corpus), "starts": [*record.get("starts", []), start]}

    def write(status: str, reason: str | None = None) -> None:
        record.update(status=status, reason=reason, time=_now())
        folder.replace(path, json.dumps(record, indent=2) + "\n")

    write("running")
    try:
        yield
    except Interrupted as stop:
        write("interrupted", str(stop))
        raise
    except BaseException as error:
        with contextlib.suppress(UserError):  # such as a full disk, which is then the reason
            write("failed", quoted(error) or str(error) or type(error).__name__)
        raise
    write("finished" if target == total else "stopped")


def read(workdir: Path) -> dict[str, Any]:
    """The record of a run; empty where there is none that can be read."""
    try:
        record = json.loads((workdir / folder.RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if _sound(record) else {}


def _sound(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    starts, status = record.get("starts", []), record.get("status", "")
    return (
        isinstance(starts, list)
        and all(isinstance(start, dict) and isinstance(start.get("config", ""), str | None) for start in starts)
        and isinstance(status, str)
        and isinstance(record.get("steps"), int | None)
    )


@dataclasses.dataclass(frozen=True)
class Summary:
    """A run in one line.

    Attributes:
        run: the folder.
        config: what the run was started as, or None where no record says it.
        step: the last one in metrics or checkpoints, 0 for none.
        steps: of the configured run, or None likewise.
        best: lowest bits per byte on "valid", or None before the first evaluation.
        last: the newest ones.
        status: "running", "finished", "stopped", "interrupted", "failed", "killed", or "unknown" without a record.
    """

    run: str
    config: str | None
    step: int
    steps: int | None
    best: float | None
    last: float | None
    status: str


def summaries(root: Path) -> list[Summary]:
    """The runs in a folder and below, by name."""
    return [_summary(path) for path in runs(root)]


def runs(root: Path) -> Iterator[Path]:
    """The folders of the runs in a folder and below, by name."""
    for path, folders, files in os.walk(root):
        folders.sort()
        if folder.CONFIG in files:
            folders.clear()  # a run holds no runs, but many files
            yield Path(path)


def _summary(workdir: Path) -> Summary:
    record = read(workdir)
    starts = record.get("starts") or [{}]
    status = record.get("status", "unknown")
    if folder.in_use(workdir):
        status = "running"
    elif status == "running":
        status = "killed"
    saved = (workdir / folder.CHECKPOINTS).glob("*")
    step, scores = max((int(path.name) for path in saved if path.name.isdecimal()), default=0), []
    for line in _lines(workdir / folder.METRICS):
        step = max(step, line["step"])
        score = line.get("bits_per_byte")
        if line.get("split") == "valid" and isinstance(score, int | float) and math.isfinite(score):
            scores.append(score)
    best, last = (min(scores), scores[-1]) if scores else (None, None)
    return Summary(str(workdir), starts[0].get("config"), step, record.get("steps"), best, last, status)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file, but for what a running or killed process has left of the last one."""
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and isinstance(line.get("step"), int):
                    yield line


def _surroundings() -> dict[str, Any]:
    devices = jax.devices()
    return {
        "lra": {"version": lra.__version__, **_commit()},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "device": {"kind": devices[0].device_kind, "platform": devices[0].platform, "count": len(devices)},
    }


def _commit() -> dict[str, Any]:
    """The git commit of lra's own source, and whether files differ from it; None where it is no checkout."""
    source = Path(lra.__file__).resolve().parents[1]
    unknown = {"commit": None, "dirty": None}
    if not (source / ".git").exists():  # a folder around it may be a checkout of something else
        return unknown
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return unknown


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
