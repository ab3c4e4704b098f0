"""The run folder: what belongs into it, and whose it is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from lra.errors import UserError

CONFIG, METRICS, RECORD, CHECKPOINTS, LOCK = "config.gin", "metrics.jsonl", "record.json", "checkpoints", "lock"
TENSORBOARD, PROFILE, EVALUATIONS = "tensorboard", "profile", "evaluations"
_NEW = ".new"
_PATIENCE_SECONDS = 0.5
"""`in_use` holds the lock for a moment."""

Difference = Callable[[str, str], list[str]]


def check(workdir: Path, config_text: str, difference: Difference) -> None:
    """Checks that a run of this configuration may live in the folder; writes nothing.

    Args:
        workdir: the folder, which need not exist.
        config_text: the resolved configuration.
        difference: says what differs between two resolved configurations, a line each.

    Raises:
        UserError: it is a file, holds something else than a run, or a run of another configuration.
    """
    if not workdir.exists():
        return
    if not workdir.is_dir():
        raise UserError(f"{workdir} is a file, but a run needs a folder: choose another one with --workdir")
    config = workdir / CONFIG
    if not config.is_file():
        if others := sorted(path.name for path in workdir.iterdir() if path.name not in (CONFIG + _NEW, LOCK)):
            raise UserError(
                f"{workdir} holds {', '.join(others[:3])}{', ...' if len(others) > 3 else ''} and no run: "
                "choose a new or an empty folder with --workdir"
            )
        return
    changes = difference(config.read_text(encoding="utf-8", errors="replace"), config_text)
    if changes:
        more = f"; and {len(changes) - 5} more" if len(changes) > 5 else ""
        raise UserError(
            f"{workdir} holds a run of another configuration ({'; '.join(changes[:5])}{more}): "
            "choose another folder with --workdir or restore the former settings"
        )


@contextlib.contextmanager
def claim(workdir: Path, config_text: str, difference: Difference) -> Iterator[None]:
    """Holds the folder against other processes that train, after making it with its configuration if need be.

    The lock is the system's: it ends with the process, however that ends. Readers need none.

    Raises:
        UserError: as `check`; another process holds the folder; or it cannot be written.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = (workdir / LOCK).open("ab")
    except OSError as error:
        raise unwritable(workdir, error) from error
    with file:
        try:
            locked = _locked(file, fcntl.LOCK_EX, _PATIENCE_SECONDS)
        except OSError as error:  # some network disks have no locks
            raise unwritable(workdir / LOCK, error) from error
        if not locked:
            raise UserError(
                f"another process is training in {workdir}: wait until it ends, or choose another folder with --workdir"
            )
        check(workdir, config_text, difference)  # again: what held the lock before may have made it
        if not (workdir / CONFIG).is_file():
            replace(workdir / CONFIG, config_text)
        yield


def in_use(workdir: Path) -> bool:
    """Whether a process trains in the folder."""
    try:
        with (workdir / LOCK).open("rb") as file:
            return not _locked(file, fcntl.LOCK_SH, 0)
    except OSError:
        return False


def replace(path: Path, text: str) -> None:
    """Writes a file so that it holds either the former text or all of the new one.

    Raises:
        UserError: it cannot be written.
    """
    new = path.with_name(path.name + _NEW)
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> UserError:
    """The sentence for a disk that is full or may not be written."""
    return UserError(
        f"cannot write to {path} ({error.strerror}): make room, or choose a folder that you may write with --workdir"
    )


def _locked(file: IO[bytes], kind: int, patience_seconds: float) -> bool:
    end = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)
        else:
            return True
