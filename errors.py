"""The one exception that means "what you asked for cannot be done", as opposed to a bug."""


class UserError(ValueError):
    """Wrong input. Its message is one sentence: what is wrong, where, and what to set instead.

    The scripts print the sentence without a traceback and exit with code 2.
    """


class TrainingFailed(RuntimeError):
    """A run that cannot go on, through no bug. One sentence as well; the scripts exit with code 1."""
