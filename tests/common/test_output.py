"""Standard output that cannot show a character, or cannot be written."""

import subprocess
import sys

import pytest
from helpers import ROOT

from common.output import printable

FULL = "/dev/full"  # every write fails, as on a full disk
needs_full_device = pytest.mark.skipif(not sys.platform.startswith("linux"), reason=f"needs {FULL}")


def run(code: str, redirections: str = "", **environment: str):
    """Run Python code after configure_output, with redirections of a shell."""
    code = f"from common.output import configure_output, require_stdout; configure_output(); import os, sys; {code}"
    command = ["sh", "-c", f'"$0" -c "$1" {redirections}', sys.executable, code]
    return subprocess.run(command, env={"PYTHONPATH": str(ROOT), **environment}, capture_output=True, text=True)


def test_only_characters_that_control_a_terminal_are_replaced():
    written = "日本\u3000語, 12\u00a0km, नमस्\u200cते, 👩\u200d🚀, e\u0301\n\tx"  # spaces, joiners and accents stay
    assert printable(written) == written
    for control in ("\x1b", "\x9b", "\r", "\x07", "\x7f", "\u202e", "\u2066"):
        assert printable(f"a{control}b") == "a\ufffdb"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_character_outside_the_encoding_is_escaped(encoding):
    done = run("print('a\\u4e2d')", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout) == (0, "a\\u4e2d\n"), done.stderr


@needs_full_device
@pytest.mark.parametrize("redirections", [f">{FULL}", f"2>{FULL}", f">{FULL} 2>&1", ">&-", "2>&-", ">&- 2>&-"])
def test_output_that_cannot_be_written_is_discarded(redirections):
    loop = "[print('x' * 1000, file=f, flush=True) for f in (sys.stdout, sys.stderr) for _ in range(200)]"
    done = run(f"{loop}; os._exit(5 if open(os.devnull).fileno() > 2 else 6)", redirections)
    assert (done.returncode, "Error" in done.stderr) == (5, False), done.stderr


def test_full_pipe_loses_only_the_text_that_does_not_fit():
    """As with a parent process that reads slowly from a non-blocking pipe."""
    code = """reader, writer = os.pipe(); [os.set_blocking(end, False) for end in (reader, writer)]; os.dup2(writer, 1)
print('x' * 10**6, flush=True); os.read(reader, 10**6); print('end', flush=True)
os._exit(5 if os.read(reader, 10**6).endswith(b'end\\n') else 6)"""
    assert run(f"\n{code}").returncode == 5


@needs_full_device
def test_result_that_cannot_be_written_is_an_error():
    done = run("require_stdout(); print('x', flush=True)", f">{FULL}")
    assert done.returncode != 0
    assert "No space left" in done.stderr
