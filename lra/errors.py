"""The one exception that the command line turns into a single sentence and exit status 2."""


class UserError(ValueError):
    """A user's mistake: the message says what was given, what is needed and how to mend it, in one sentence."""
