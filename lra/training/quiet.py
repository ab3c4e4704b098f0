"""Keeps orbax from printing, thread by thread, what it also raises; the sentence about it is ours."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops the errors that orbax' threads log, and those of the coroutines that it abandons after a first error."""
    logger, hook = logging.getLogger("absl"), sys.unraisablehook

    def other(unraisable: sys.UnraisableHookArgs) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        abandoned = code is not None and "orbax" in code.co_filename
        if not abandoned and str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    logger.addFilter(_not_of_a_thread)
    sys.unraisablehook = other
    try:
        yield
    finally:
        if logging.getLogger("asyncio").filters.count(_not_abandoned) == 0:
            sys.unraisablehook = hook
            logger.removeFilter(_not_of_a_thread)


def quiet_for_good() -> None:
    """Keeps it so until the process ends: what a failed save has abandoned is collected late, some as Python exits."""
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    logging.getLogger("asyncio").addFilter(_not_abandoned)


def _not_abandoned(record: logging.LogRecord) -> bool:
    return "was never retrieved" not in record.getMessage()


def _not_of_a_thread(record: logging.LogRecord) -> bool:
    return not (record.levelno >= logging.ERROR and record.exc_info and "orbax" in record.pathname)
