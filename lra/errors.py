"""The exceptions that the command line turns into a single sentence and an exit status."""

from __future__ import annotations


class UserError(ValueError):
    """A user's mistake: the message says what was given, what is needed and how to mend it, in one sentence."""


class Interrupted(Exception):  # noqa: N818 - not an error
    """A run that was asked to stop and has saved its state.

    Args:
        message: one sentence.
        signal: number of the signal that asked.
    """

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


def quoted(error: BaseException) -> str | None:
    """The sentence of a `UserError` that compiled code raised on the host, which JAX's own error quotes; None if none.

    Example:
        >>> from lra.errors import quoted
        >>> quoted(RuntimeError("CpuCallback error ... lra.errors.UserError: too many"))
        'too many'
    """
    _, mark, rest = str(error).rpartition(f"{UserError.__module__}.{UserError.__qualname__}: ")
    return rest.splitlines()[0] if mark else None
