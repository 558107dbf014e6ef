"""Interactive sampling: lines from a pipe, and signals on a terminal."""

import io
import os
import pty
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
from helpers import ROOT, run_command

from generation.engine import TextChunk

SAFETY_TIMEOUT_S = 600
INTERACTIVE = ["run=a", "interactive=true"]


@pytest.fixture
def type_lines(trained, monkeypatch, capsys):
    """type_lines(b"The 1\\n", "seed=3") runs sample.py with these bytes as stdin -> (out, err)."""

    def run(typed: bytes, *overrides: str) -> tuple[str, str]:
        stdin = io.TextIOWrapper(io.BytesIO(typed), "latin-1", newline="\n")
        monkeypatch.setattr("sys.stdin", stdin)
        capsys.readouterr()
        assert run_command("sample", *INTERACTIVE, *overrides) == 0
        return capsys.readouterr()

    return run


def test_line_is_continued_as_a_prompt(type_lines, sample):
    out, _ = type_lines(b"The 1\n", "max_new_tokens=30", "seed=3")
    assert out == sample("run=a", "max_new_tokens=30", "prompt=The 1", "seed=3")


def test_empty_line_continues_the_last_prompt_with_its_sample(type_lines, monkeypatch):
    continued = []

    def generate(model, tokenizer, prompts, sampling, batch_size):
        continued.append(tokenizer.decode(prompts[0].tokens))
        yield TextChunk(0, " no", 1)
        yield TextChunk(0, " more", 2, "length")

    monkeypatch.setattr("generation.prompts.generate", generate)
    out, _ = type_lines(b"The 1\n\n\n")
    assert continued == ["The 1", "The 1 no more", "The 1 no more no more"]
    assert out == "The 1 no more\n no more\n no more\n"


def test_each_line_has_the_next_seed(type_lines, sample):
    """Also after a line that is refused."""
    out, _ = type_lines("The\nUnknown Ü\nline\n".encode(), "max_new_tokens=30", "seed=3")
    last = sample("run=a", "max_new_tokens=30", "prompt=line", "seed=5")
    assert out.endswith("\n" + last)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Ü".encode(), "sample.py: the prompt has characters that are not in the vocabulary: 'Ü'"),
        (b"T\xe9", "sample.py: the prompt has characters that are not in the vocabulary"),
    ],
    ids=["vocabulary", "not-utf-8"],
)
def test_refused_line_is_reported_and_does_not_end_the_command(type_lines, line, message):
    out, err = type_lines(b"The 1\n" + line + b"\nThe 2\n", "max_new_tokens=1")
    assert message in err
    assert [text[:5] for text in out.splitlines()] == ["The 1", "The 2"]


def test_empty_line_after_a_refused_line_continues_the_last_sample(type_lines):
    out, _ = type_lines("The 1\nÜ\n\n".encode(), "max_new_tokens=1")
    _, second = out.splitlines()
    assert len(second) == 1


def test_line_ends_of_windows_are_no_part_of_a_line(type_lines):
    """The vocabulary has no carriage return, so it would be refused."""
    out, _ = type_lines(b"The 1\r\nThe 2\r\n", "max_new_tokens=1")
    assert [text[:5] for text in out.splitlines()] == ["The 1", "The 2"]


def test_byte_order_mark_is_no_part_of_a_line(type_lines):
    out, _ = type_lines(b"\xef\xbb\xbfThe 1\n", "max_new_tokens=1")
    assert out.startswith("The 1")


def test_lines_are_utf_8_in_any_locale(type_lines):
    out, _ = type_lines("après\n".encode(), "max_new_tokens=1")
    assert out.startswith("après")


class Terminal:
    """sample.py on a pseudo-terminal."""

    def __init__(self, *words: str):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "sample.py", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        os.close(slave)
        self.printed = b""

    def read(self) -> None:
        self.printed += os.read(self.master, 4096)

    def wait_for_prompts(self, count: int) -> None:
        while self.printed.count(b"> ") < count:
            self.read()

    def generate(self, num_bytes: int) -> None:
        """Type a line, and wait for this number of bytes."""
        os.write(self.master, b"The 1\n")
        end = len(self.printed) + num_bytes
        while len(self.printed) < end:
            self.read()


@pytest.fixture
def terminal(trained):
    terminal = Terminal(*INTERACTIVE, "max_new_tokens=100000", "seed=1")
    killer = threading.Timer(SAFETY_TIMEOUT_S, terminal.process.kill)
    killer.start()
    yield terminal
    killer.cancel()
    terminal.process.kill()
    os.close(terminal.master)


def test_ctrl_c_stops_the_sample_and_ctrl_d_quits(terminal):
    """One test, because the process starts slowly: a long sample and Ctrl-C, twice, then Ctrl-D."""
    terminal.wait_for_prompts(1)
    for number in (1, 2):
        terminal.generate(300)
        os.killpg(terminal.process.pid, signal.SIGINT)
        terminal.wait_for_prompts(number + 1)
    while terminal.process.poll() is None:
        os.write(terminal.master, b"\x04")
        with suppress(subprocess.TimeoutExpired):
            terminal.process.wait(1)
    assert terminal.process.returncode == 0
    assert b"Traceback" not in terminal.printed
