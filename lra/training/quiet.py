"""Keeps orbax from printing, thread by thread, what it also raises; the sentence about it is ours."""

from __future__ import annotations

import contextlib
import logging
import sys
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
        sys.unraisablehook = hook
        logger.removeFilter(_not_of_a_thread)


def _not_of_a_thread(record: logging.LogRecord) -> bool:
    return not (record.levelno >= logging.ERROR and record.exc_info and "orbax" in record.pathname)
