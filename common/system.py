"""This process and its machine, without torch: the command line, CPU cores and malloc."""

import ctypes
import os
import platform
import shlex
import sys
from pathlib import Path


def command_line() -> str:
    """The command that started this process.

    The folder of the script and the options of torchrun are left out.
    """
    return shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])


def cpu_count() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def call_glibc(function: str, *arguments: int) -> None:
    """Call a function of malloc in glibc. Without glibc, do nothing."""
    if platform.libc_ver()[0] == "glibc":
        getattr(ctypes.CDLL(None), function)(*arguments)
