"""The exceptions that the command line turns into a single sentence and an exit status."""


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
