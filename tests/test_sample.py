"""sample.py: on a terminal, for many prompts, interactively and in Python."""

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TEXT, read_jsonl, run_command

import sample as script
from common.errors import UserError
from common.files import read_text
from configs.cli import parse_config
from generation.config import SamplingConfig
from generation.engine import Prompt, TextChunk, generate
from generation.load import load_run
from sample import in_prompt_order, main
from training.signals import run_main

RUN = ["run=a", "max_new_tokens=30"]
SAFETY_TIMEOUT_S = 600


def run(*overrides):
    """Run sample.py in this process -> exit code."""
    return run_main(main, parse_config("sample", "", list(overrides)))


def refusal(capsys, *overrides):
    """Run a command that must be refused -> its message."""
    capsys.readouterr()
    assert run_command("sample", *overrides) == 2
    (message,) = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("runs/")
    ]
    return message


# Samples


def test_sample_is_printed_as_it_is_generated(trained, monkeypatch, capsys):
    printed = []
    monkeypatch.setattr(script, "show", printed.append)
    assert run(*RUN, "prompt=The 1", "temperature=0") == 0
    assert printed[0] == "The 1" and printed[-1] == "\n" and len(printed) == 32, (
        "one character at a time"
    )
    err = capsys.readouterr().err
    assert "best.pt, step" in err and "30 tokens in " in err and " tokens/s\n" in err


def test_samples_of_one_prompt_equal_single_samples_with_their_seeds(trained, sample):
    alone = [sample(*RUN, "prompt=The ", f"seed={seed}") for seed in (5, 6, 7)]
    assert sample(*RUN, "prompt=The ", "seed=5", "num_samples=3", "batch_size=2") == "".join(alone)


def test_sample_ends_before_a_stop_string(trained, sample):
    full = sample(*RUN, "prompt=The ")
    stop = full[12:15]
    stopped = full[: full.index(stop, 4)] + "\n"
    assert sample(*RUN, "prompt=The ", f"stop={stop}") == stopped
    assert sample(*RUN, "prompt=The ", f"stop={json.dumps(['Ω', stop])}") == stopped
    assert sample(*RUN, "prompt=The ", f"stop=[{stop}").startswith("The "), (
        "a string that looks like a list"
    )


def test_prompt_and_stop_understand_the_same_escapes(train, sample, workdir):
    """Escapes work on the command line and in lines of a file. prompt_file, JSON and Python strings are exact."""
    assert train("name=a", "tokenizer=byte") == 0
    assert sample(*RUN, r"prompt=a\nb\\n\t").startswith("a\nb\\n\t")
    (workdir / "p.txt").write_text("a\\nb\n", encoding="utf-8")
    sample(*RUN, "prompts=p.txt", "out=o.jsonl")
    assert read_jsonl("o.jsonl")[0]["prompt"] == "a\nb"
    (workdir / "p.jsonl").write_text(json.dumps({"prompt": r"a\nb"}), encoding="utf-8")
    sample(*RUN, "prompts=p.jsonl", "out=o2.jsonl")
    assert read_jsonl("o2.jsonl")[0]["prompt"] == r"a\nb"
    assert sample(*RUN, "prompt_file=p.txt").startswith("a\\nb\n")
    model, tokenizer = load_run("a")
    exact = "".join(generate_text(model, tokenizer, r"a\nb", seed=1337, max_new_tokens=30))
    assert sample(*RUN, r"prompt=a\\nb") == r"a\nb" + exact + "\n"


# Many prompts


def test_chunks_of_the_current_sample_are_shown_as_they_arrive():
    arriving = iter(
        [TextChunk(index, text, 1) for index, text in [(1, "b"), (0, "a"), (1, "c"), (0, "d")]]
    )
    assert next(in_prompt_order(arriving)).text == "a" and len(list(arriving)) == 2, (
        "two chunks were read"
    )


def test_samples_of_many_prompts_are_written_in_order(trained, sample, workdir, capsys):
    prompts = ["The 1", "T", "The 22nd line says", "line", "says 1"]
    (workdir / "p.txt").write_text("\n\n".join(prompts) + "\n", encoding="utf-8")
    (workdir / "p.jsonl").write_text(
        "\n".join(json.dumps({"prompt": prompt, "id": 1}) for prompt in prompts), encoding="utf-8"
    )
    settings = [*RUN, "stop=.", "num_samples=2", "batch_size=3", "seed=4"]
    shutil.copy("p.jsonl", "p.ndjson")
    for file in ("p.txt", "p.jsonl", "p.ndjson"):
        sample(*settings, f"prompts={file}", f"out={file}.out")
    on_stdout = sample(*settings, "prompts=p.txt")
    outputs = {path.read_text(encoding="utf-8") for path in workdir.glob("*.out")}
    assert outputs == {on_stdout}
    lines = read_jsonl("p.txt.out")
    assert [line["prompt"] for line in lines] == [prompt for prompt in prompts for _ in range(2)]
    assert [line["seed"] for line in lines] == list(range(4, 14))
    assert {line["ended"] for line in lines} <= {"stop", "length"}
    for line in lines:
        alone = sample(*RUN, "stop=.", f"prompt={line['prompt']}", f"seed={line['seed']}")
        assert alone == line["prompt"] + line["text"] + "\n"
        assert line["tokens"] == 30 or line["ended"] == "stop"


def test_prompt_files_are_split_at_line_ends_only(train, sample, workdir):
    """Windows line ends and a byte order mark are not part of a prompt, but form feeds and U+2028 are."""
    (workdir / "text.txt").write_bytes((TEXT + "\x0c\u2028\ufeff\r\n").encode())
    assert train("name=a", "tokenizer=byte") == 0
    (workdir / "p.txt").write_bytes("\ufeffThe\r\nsays\x0c1\u20282\r\n".encode())
    sample(*RUN, "prompts=p.txt", "out=o.jsonl")
    assert [line["prompt"] for line in read_jsonl("o.jsonl")] == ["The", "says\x0c1\u20282"]
    (workdir / "crlf.txt").write_bytes(b"The\r\n")
    assert read_text("crlf.txt", "prompt_file") == "The\r\n", "prompt_file is exact"


def test_prompt_file_has_no_byte_order_mark(workdir):
    (workdir / "mark.txt").write_bytes(b"\xef\xbb\xbfThe\r\n\xef\xbb\xbf")
    assert read_text("mark.txt", "prompt_file") == "The\r\n\ufeff", "only the first one is a mark"


def test_lines_of_json_on_a_stdout_without_utf_8_have_escapes(trained, workdir, monkeypatch):
    (workdir / "p.txt").write_text("après", encoding="utf-8")
    stdout = io.TextIOWrapper(io.BytesIO(), "ascii", "backslashreplace")  # LC_ALL=C
    monkeypatch.setattr("sys.stdout", stdout)
    assert run("run=a", "max_new_tokens=1", "prompts=p.txt") == 0
    line = stdout.detach().getvalue()
    assert line.isascii() and json.loads(line)["prompt"] == "après"


def test_output_file_is_complete_or_absent_and_never_overwritten(
    trained, workdir, monkeypatch, capsys
):
    (workdir / "p.txt").write_text("The\nThe 1\n", encoding="utf-8")
    settings = [*RUN, "prompts=p.txt"]

    def interrupted(*args):
        yield from islice(generate(*args), 40)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(script, "generate", interrupted)
        assert run(*settings, "out=o.jsonl", "batch_size=1") == 75
    assert not list(workdir.glob("o.jsonl*"))
    assert run(*settings, "out=o.jsonl") == 0
    content = Path("o.jsonl").read_bytes()
    assert "out=o.jsonl exists, or" in refusal(capsys, *settings, "out=o.jsonl")
    assert Path("o.jsonl").read_bytes() == content


def test_samples_on_a_terminal_contain_no_control_characters(train, sample, workdir, monkeypatch):
    assert train("name=a", "tokenizer=byte") == 0
    (workdir / "p.jsonl").write_text(json.dumps({"prompt": "\x1b[31m\x9b\u202e"}), encoding="utf-8")
    assert "\x9b" in sample(*RUN, "prompts=p.jsonl"), "in a pipe, the text is exact"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for source in ("prompts=p.jsonl", "prompt=\x1b[31m\x9b\u202e"):
        assert not set(sample(*RUN, source)) & set("\x1b\x9b\u202e")


# Interactive


def test_typed_lines_are_continued(trained, sample, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("The 1\n\nUnknown Ü\nline\n"))
    out = sample(*RUN, "interactive=true", "seed=3")
    first = sample(*RUN, "prompt=The 1", "seed=3")
    assert out.startswith(first)
    second = sample(*RUN, f"prompt={first[:-1]}", "seed=4")
    assert out.startswith(first + second.removeprefix(first[:-1])), (
        "an empty line continues the sample"
    )
    assert "line" + out.rpartition("\nline")[2] == sample(*RUN, "prompt=line", "seed=6")


def test_lines_from_a_pipe_have_no_byte_order_mark_and_no_carriage_return(
    trained, sample, monkeypatch
):
    """The vocabulary has neither, so they would be refused."""
    stdin = io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfThe 1\r\n\r\n"), "utf-8", newline="\n")
    monkeypatch.setattr("sys.stdin", stdin)
    first, second = sample("run=a", "max_new_tokens=1", "interactive=true").splitlines()
    assert first.startswith("The 1") and len(second) == 1, (
        "the second line is empty, and continues the first"
    )


def test_lines_from_a_pipe_are_utf_8_in_any_locale(trained, sample, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("après".encode()), "latin-1"))
    assert sample("run=a", "max_new_tokens=1", "interactive=true").startswith("après")


def test_prompt_on_the_command_line_is_utf_8_in_any_locale(trained, sample):
    """Under LC_ALL=C, Python escapes all bytes of an argument that are not ASCII."""
    escaped = "après".encode().decode("ascii", errors="surrogateescape")
    assert sample("run=a", "max_new_tokens=1", f"prompt={escaped}").startswith("après")


def test_line_that_is_not_utf_8_is_refused_and_the_next_line_is_continued(
    trained, workdir, monkeypatch, capsys
):
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(b"The 1\nT\xe9\nThe 2\n"), "utf-8")
    )
    assert run("run=a", "max_new_tokens=1", "interactive=true") == 0
    out, err = capsys.readouterr()
    assert "sample.py: the prompt is not UTF-8: byte 0xe9 after b'T'" in err
    assert "The 1" in out and "The 2" in out


def test_ctrl_c_stops_the_sample_and_ctrl_d_quits(trained):
    """On a terminal: a long sample, Ctrl-C, another long sample, Ctrl-C, Ctrl-D."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            ROOT / "sample.py",
            "run=a",
            "interactive=true",
            "max_new_tokens=100000",
            "seed=1",
        ],
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    os.close(slave)
    killer = threading.Timer(SAFETY_TIMEOUT_S, process.kill)
    killer.start()
    printed = b""

    def read_until(text, count):
        nonlocal printed
        while printed.count(text) < count:
            printed += os.read(master, 4096)

    try:
        read_until(b"> ", 1)
        for number in (1, 2):
            os.write(master, b"The 1\n")
            length = len(printed)
            while len(printed) < length + 300:
                printed += os.read(master, 4096)
            os.killpg(process.pid, signal.SIGINT)
            read_until(b"> ", number + 1)
        while process.poll() is None:
            os.write(master, b"\x04")
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
        assert process.returncode == 0
        assert b"Traceback" not in printed
    finally:
        killer.cancel()
        process.kill()
        os.close(master)


# In Python


def generate_text(model, tokenizer, prompt: str, seed: int = 1, **settings) -> list[str]:
    """The parts of a sample."""
    prompts = [Prompt(tokenizer.encode(prompt), seed)]
    return [
        chunk.text
        for chunk in generate(model, tokenizer, prompts, SamplingConfig(**settings), batch_size=1)
    ]


def test_run_loaded_in_python_generates_the_same_sample_as_the_command_and_can_be_trained(
    trained, sample
):
    model, tokenizer = load_run("a")
    assert not model.training
    chunks = generate_text(model, tokenizer, "The 1", seed=3, max_new_tokens=30)
    assert len(chunks) == 30 and not model.training
    assert "The 1" + "".join(chunks) + "\n" == sample(*RUN, "prompt=The 1", "seed=3")
    with pytest.raises(UserError, match=r"top_p=3\.0 must be above 0"):
        generate_text(model, tokenizer, "The 1", top_p=3.0)
    tokens = torch.tensor([tokenizer.encode("The 1st line")])
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(p.grad is not None for p in model.parameters())


# Refusals


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("prompts=empty.txt", "prompts=empty.txt contains no prompts"),
        ("prompts=wrong.jsonl", "a line of prompts=wrong.jsonl is not of the form"),
        ("prompts=null.jsonl", "a line of prompts=null.jsonl is not of the form"),
        ("prompts=deep.jsonl", "a line of prompts=deep.jsonl is not of the form"),
        ("prompts=latin.txt", "prompts=latin.txt is not UTF-8: byte 0xe9 after b'a'"),
        ("prompt=T\udce9", "prompt is not UTF-8: byte 0xe9 after b'T'"),
        ("prompt_file=wrong.txt", "prompt_file=wrong.txt is not UTF-8: byte 0xe9;"),
        (
            "prompt_file=utf16.txt",
            "utf16.txt has NUL bytes, as UTF-16 and binary files have; convert it",
        ),
        (
            "prompts=new.txt num_samples=3",
            "prompt 2 of new.txt has characters that are not in the vocabulary: 'Ü'",
        ),
        ("prompts=text.txt out=no/o.jsonl", "out=no/o.jsonl exists, or its folder does not"),
        ("prompt_file=.", ". cannot be read (IsADirectoryError"),
        ("out=o.jsonl", "out=o.jsonl"),
        ("prompts=text.txt interactive=true", "prompts and interactive"),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(trained, workdir, capsys, overrides, message):
    (workdir / "empty.txt").write_text("\n \n", encoding="utf-8")
    (workdir / "wrong.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n', encoding="utf-8")
    (workdir / "null.jsonl").write_text('{"prompt": null}\n', encoding="utf-8")
    (workdir / "deep.jsonl").write_text("[" * 10**5, encoding="utf-8")
    (workdir / "latin.txt").write_bytes("aé".encode("latin-1"))
    (workdir / "wrong.txt").write_bytes(b"\xe9")
    (workdir / "utf16.txt").write_text("The 1", encoding="utf-16")
    (workdir / "new.txt").write_text("The\nÜ\n", encoding="utf-8")
    assert message in refusal(capsys, *overrides.split())
    assert not Path("o.jsonl").exists()
