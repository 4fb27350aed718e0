"""Errors that are shown as one sentence, without a traceback."""


class RunError(Exception):
    """The run cannot go on, through nobody's mistake: it diverged, or the disk is full."""

    exit_code = 1


class UsageError(RunError):
    """A wrong key, value, data path, output folder or launch. The message names what was given and what is expected."""

    exit_code = 2
