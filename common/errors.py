"""Errors that are not bugs: invalid input, a run that cannot continue, files, and too little memory."""

import errno
import re

# Control characters except newline and tab, and Unicode's bidirectional overrides and isolates.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class UserError(ValueError):
    """Wrong input. Its message is one sentence: what is wrong, where, and what to set instead.

    The scripts print the sentence without a traceback and exit with code 2.
    """


class TrainingFailed(RuntimeError):
    """A run cannot continue, but not because of a bug: its loss is NaN, for example. The scripts exit with code 1."""


def printable(text: str) -> str:
    """Replace the characters with which `text` could control a terminal or reorder what it shows."""
    return UNPRINTABLE.sub("\ufffd", text)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python or PyTorch ran out of memory, on any device. Compares messages, because torch is not imported."""
    messages = ("allocate memory", "out of memory", "bad_alloc", "ALLOC_FAILED")
    is_from_torch = isinstance(error, RuntimeError) and any(message in str(error) for message in messages)
    return isinstance(error, MemoryError) or is_from_torch


def error_message(error: BaseException) -> str | None:
    """One sentence about an error that is not a bug. None for a bug, which needs its traceback."""
    if isinstance(error, UserError | TrainingFailed | KeyboardInterrupt):
        return str(error) or "interrupted"
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        return f"{error.filename or 'writing a file'}: {error.strerror}; free some disk space"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; set another file, folder or name"
    return "out of memory; set a smaller batch, context or model" if is_out_of_memory(error) else None
