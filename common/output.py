"""Standard output and standard error of the commands."""

import io
import os
import re
import sys

# Control characters except newline and tab, and Unicode's bidirectional overrides and isolates.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Replace the characters with which `text` could control a terminal or reorder what it shows."""
    return UNPRINTABLE.sub("\ufffd", text)


class DiscardingStream(io.TextIOWrapper):
    """A text stream that discards its output from the first failed write on.

    So a run continues if its terminal is closed, the reader of its output exits, or the disk of its log is full.
    """

    is_required = False  # see require_stdout

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        if self.is_required:
            raise error
        if not isinstance(error, BlockingIOError):  # a full non-blocking pipe loses only this text
            with open(os.devnull, "wb") as devnull:
                os.dup2(devnull.fileno(), self.fileno())


def require_stdout() -> None:
    """From now on, a failed write to stdout raises OSError, because stdout is the result of the command."""
    if isinstance(sys.stdout, DiscardingStream):
        sys.stdout.is_required = True


def configure_output() -> None:
    """Set up sys.stdout and sys.stderr once, at the start of a command.

    A character that the terminal cannot show is escaped. Output that cannot be written is discarded.
    """
    # Open the descriptors that the caller closed, as with `>&-`. Otherwise, the next file would become stdout.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not getattr(sys, f"__{name}__"):
            continue  # replaced by Python code that calls the command
        stream = getattr(sys, name) or open(descriptor, "w")  # noqa: SIM115 (open as long as the process)
        settings = {key: getattr(stream, key) for key in ("encoding", "line_buffering", "write_through")}
        setattr(sys, name, DiscardingStream(stream.detach(), errors="backslashreplace", **settings))
