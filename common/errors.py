"""Errors that are not bugs: invalid input, failed runs, files, too little memory. Exit codes."""

import errno
import re

# Control characters except newline and tab, and Unicode's bidirectional overrides and isolates.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Exit codes by status of a run or a command.
EXIT_CODES = {"finished": 0, "failed": 1, "refused": 2, "interrupted": 75}


class UserError(ValueError):
    """Wrong input. Exit code 2.

    The message is one sentence: what is wrong, where, and what to set instead.
    """


class TrainingFailed(RuntimeError):
    """A run cannot continue, but not because of a bug: its loss is NaN, for example.

    Exit code 1.
    """


def printable(text: str) -> str:
    """Replace characters with which `text` could control a terminal or reorder what it shows."""
    return UNPRINTABLE.sub("\ufffd", text)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python or PyTorch ran out of memory, on any device.

    It compares messages, because this file does not import torch.
    """
    if isinstance(error, RuntimeError):
        return bool(re.search("allocate memory|out of memory|bad_alloc|ALLOC_FAILED", str(error)))
    return isinstance(error, MemoryError)


def error_message(error: BaseException) -> str | None:
    """One sentence about an error that is not a bug. None for a bug, which needs its traceback."""
    if isinstance(error, UserError | TrainingFailed | KeyboardInterrupt):
        return str(error) or "interrupted"
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        return f"{error.filename or 'writing a file'}: {error.strerror}; free some disk space"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; set another file, folder or name"
    if is_out_of_memory(error):
        return "out of memory; set a smaller batch, context or model"
    return None


def status_of(error: BaseException | None) -> str:
    """Status of a run or a command that ended with `error`, or with None: a key of EXIT_CODES."""
    if error is None:
        return "finished"
    if isinstance(error, UserError):
        return "refused"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "failed"
