"""Interactive sampling: lines from a pipe, and signals."""

import io

import pytest
from helpers import run_command

from generation.engine import TextChunk

INTERACTIVE = ["run=a", "interactive=true"]


@pytest.fixture
def type_lines(trained, monkeypatch, capsys):
    """type_lines(b"The 1\\n", "seed=3") runs sample.py with these bytes as stdin -> (out, err)."""

    def run(typed: bytes, *overrides: str, exit_code: int = 0) -> tuple[str, str]:
        stdin = io.TextIOWrapper(io.BytesIO(typed), "latin-1", newline="\n")
        monkeypatch.setattr("sys.stdin", stdin)
        capsys.readouterr()
        assert run_command("sample", *INTERACTIVE, *overrides) == exit_code
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


@pytest.mark.parametrize("line", ["Ü".encode(), b"T\xe9"], ids=["vocabulary", "not UTF-8"])
def test_refused_line_is_reported_and_does_not_end_the_command(type_lines, line):
    out, err = type_lines(b"The 1\n" + line + b"\nThe 2\n", "max_new_tokens=1")
    assert "sample.py: prompt 1 has characters that are not in the vocabulary" in err
    assert [text[:5] for text in out.splitlines()] == ["The 1", "The 2"]


@pytest.mark.parametrize(
    ("typed", "lines"),
    [
        (b"The 1\r\nThe 2\r\n", ["The 1", "The 2"]),
        (b"\xef\xbb\xbfThe 1\n", ["The 1"]),
        ("après\n".encode(), ["après"]),
    ],
    ids=["line ends of Windows", "byte order mark", "UTF-8 in any locale"],
)
def test_lines_are_decoded_as_utf_8(type_lines, typed, lines):
    """The vocabulary has no carriage return and no mark, so they would be refused."""
    out, _ = type_lines(typed, "max_new_tokens=1")
    assert [text[:5] for text in out.splitlines()] == lines


def interrupted(*arguments):
    """A function generate that a signal interrupts. Without arguments, the signal is Ctrl-C."""

    def generate(model, tokenizer, prompts, sampling, batch_size):
        yield TextChunk(0, " no", 1)
        raise KeyboardInterrupt(*arguments)

    return generate


def test_ctrl_c_stops_the_sample_only(type_lines, monkeypatch):
    monkeypatch.setattr("generation.prompts.generate", interrupted())
    out, _ = type_lines(b"The 1\n\n")
    assert out == "The 1 no\n no\n"


def test_other_signals_end_the_command(type_lines, monkeypatch):
    monkeypatch.setattr("generation.prompts.generate", interrupted("SIGTERM"))
    type_lines(b"The 1\n", exit_code=75)
