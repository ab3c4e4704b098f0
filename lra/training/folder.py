"""The run folder: what belongs into it, and whose it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lra.errors import UserError

CONFIG, METRICS, CHECKPOINTS = "config.gin", "metrics.jsonl", "checkpoints"
TENSORBOARD, PROFILE = "tensorboard", "profile"
_UNFINISHED = CONFIG + ".new"


def check(workdir: Path, config_text: str, difference: Callable[[str, str], list[str]]) -> None:
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
        if others := sorted(path.name for path in workdir.iterdir() if path.name != _UNFINISHED):
            raise UserError(
                f"{workdir} holds {', '.join(others[:3])}{', ...' if len(others) > 3 else ''} and no run: "
                "choose a new or an empty folder with --workdir"
            )
        return
    changes = difference(config.read_text(encoding="utf-8"), config_text)
    if changes:
        more = f"; and {len(changes) - 5} more" if len(changes) > 5 else ""
        raise UserError(
            f"{workdir} holds a run of another configuration ({'; '.join(changes[:5])}{more}): "
            "choose another folder with --workdir or restore the former settings"
        )


def create(workdir: Path, config_text: str) -> None:
    """Makes the folder with its configuration, unless it is there.

    Raises:
        UserError: it cannot be written.
    """
    if (workdir / CONFIG).is_file():
        return
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        unfinished = workdir / _UNFINISHED
        unfinished.write_text(config_text, encoding="utf-8")
        os.replace(unfinished, workdir / CONFIG)
    except OSError as error:
        raise UserError(
            f"cannot write to {workdir} ({error.strerror}): choose a folder that you may write with --workdir"
        ) from error
