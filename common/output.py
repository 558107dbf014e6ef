"""Standard output and standard error of the commands."""

import io
import os
import sys


class DiscardingStream(io.TextIOWrapper):
    """A text stream that discards its output from the first failed write on.

    So a run continues if its terminal is closed, the reader of its output exits, or the disk of its log is full.
    """

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            self._discard()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._discard()

    def _discard(self) -> None:
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), self.fileno())


def configure_output(stdout_is_result: bool) -> None:
    """Set up sys.stdout and sys.stderr once, at the start of a command.

    A character that the terminal cannot show is escaped. Output that cannot be written is discarded; but if stdout is
    the result of the command, a failed write to stdout is an error.
    """
    # Open the descriptors that the caller closed, as with `>&-`. Otherwise, the next file would become stdout.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not getattr(sys, f"__{name}__"):
            continue  # replaced by Python code that calls the command
        stream = getattr(sys, name) or open(descriptor, "w")  # noqa: SIM115 (open as long as the process)
        stream.reconfigure(errors="backslashreplace")
        if not (stdout_is_result and name == "stdout"):
            settings = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
            stream = DiscardingStream(stream.detach(), **settings)
        setattr(sys, name, stream)
