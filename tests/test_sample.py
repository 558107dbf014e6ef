"""sample.py: samples of one prompt, samples of many prompts, and refusals."""

import json
from contextlib import chdir
from itertools import islice
from pathlib import Path
from shutil import copytree

import pytest
from helpers import TEXT, read_jsonl, run_command, train_here

import sample as script
from common.process import run_main
from configs.cli import parse_config
from generation.engine import generate

RUN = ["run=a", "max_new_tokens=30"]


def run(*overrides):
    """Run the module `script`, which a test can change -> exit code."""
    return run_main(script.main, parse_config("sample", "", list(overrides)))


# One prompt


def test_sample_is_printed_as_it_is_generated(trained, monkeypatch):
    """One character at a time, after the prompt."""
    printed = []
    monkeypatch.setattr(script, "show", printed.append)
    assert run(*RUN, "prompt=The 1", "temperature=0") == 0
    assert printed[0] == "The 1"
    assert printed[-1] == "\n"
    assert len(printed) == 32


def test_checkpoint_and_speed_are_reported(trained, capsys):
    assert run(*RUN) == 0
    err = capsys.readouterr().err
    assert "runs/a/checkpoints/best.pt, step " in err
    assert "30 tokens in " in err


def test_samples_of_one_prompt_equal_single_samples_with_their_seeds(trained, sample):
    together = sample(*RUN, "prompt=The ", "seed=5", "num_samples=3", "batch_size=2")
    alone = [sample(*RUN, "prompt=The ", f"seed={seed}") for seed in (5, 6, 7)]
    assert together == "".join(alone)


def test_several_samples_are_numbered_on_stderr(trained, capsys):
    assert run(*RUN, "num_samples=2") == 0
    numbers = [line for line in capsys.readouterr().err.splitlines() if line.startswith("---")]
    assert numbers == ["--- 1 ---", "--- 2 ---"]


@pytest.mark.parametrize("stop", ["{stop}", '["Ω", "{stop}"]'], ids=["string", "list"])
def test_sample_ends_before_a_stop_string(trained, sample, stop):
    full = sample(*RUN, "prompt=The ")
    end = full[12:15]
    setting = "stop=" + stop.replace("{stop}", end)
    assert sample(*RUN, "prompt=The ", setting) == full[: full.index(end, 4)] + "\n"


def test_stop_string_can_begin_like_a_list(trained, sample):
    assert sample(*RUN, "prompt=The ", "stop=[a") == sample(*RUN, "prompt=The ")


def test_stop_string_has_escapes(trained, sample):
    out = sample("run=a", "max_new_tokens=200", "prompt=The ", r"stop=\n")
    assert out.count("\n") == 1


# Many prompts

PROMPTS = ["The 1", "T", "The 22nd line says", "line", "says 1"]
MANY = [*RUN, "stop=.", "prompts=p.txt", "num_samples=2", "batch_size=3", "seed=4"]


@pytest.fixture(scope="module")
def folder_with_samples(folder_with_a_run, tmp_path_factory) -> Path:
    """A run, p.txt with PROMPTS, and their samples in o.jsonl."""
    folder = tmp_path_factory.mktemp("samples")
    copytree(folder_with_a_run, folder, dirs_exist_ok=True)
    (folder / "p.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    with chdir(folder):
        assert run_command("sample", *MANY, "out=o.jsonl") == 0
    return folder


@pytest.fixture
def samples(folder_with_samples, monkeypatch) -> list[dict]:
    """The samples of PROMPTS. The current folder has their run and p.txt."""
    monkeypatch.chdir(folder_with_samples)
    return read_jsonl("o.jsonl")


def test_samples_of_many_prompts_are_written_in_order(samples):
    assert [row["prompt"] for row in samples] == [prompt for prompt in PROMPTS for _ in range(2)]
    assert [row["seed"] for row in samples] == list(range(4, 14))


def test_samples_of_many_prompts_equal_single_samples(sample, samples):
    for row in samples:
        alone = sample(*RUN, "stop=.", f"prompt={row['prompt']}", f"seed={row['seed']}")
        assert alone == row["prompt"] + row["text"] + "\n"


def test_samples_have_the_reason_of_their_end(samples):
    for row in samples:
        assert row["ended"] == ("length" if row["tokens"] == 30 else "stop")


def test_samples_on_stdout_equal_those_in_a_file(sample, samples):
    assert sample(*MANY) == Path("o.jsonl").read_text(encoding="utf-8")


def test_interrupted_command_writes_no_file(trained, workdir, monkeypatch):
    (workdir / "p.txt").write_text("The\nThe 1\n", encoding="utf-8")

    def interrupted(*args):
        yield from islice(generate(*args), 40)
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "generate", interrupted)
    assert run(*RUN, "prompts=p.txt", "out=o.jsonl", "batch_size=1") == 75
    assert not list(workdir.glob("o.jsonl*"))


def test_output_file_is_never_overwritten(trained, workdir):
    (workdir / "o.jsonl").write_text("precious", encoding="utf-8")
    assert run_command("sample", *RUN, "prompts=text.txt", "out=o.jsonl") == 2
    assert (workdir / "o.jsonl").read_text(encoding="utf-8") == "precious"


# Characters

CONTROL = "\x1b[31m\x9b\u202e"  # characters that could change the terminal


@pytest.fixture(scope="module")
def folder_with_a_byte_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "p.jsonl").write_text(json.dumps({"prompt": CONTROL}), encoding="utf-8")
    with chdir(folder):
        assert train_here("name=a", "tokenizer=byte") == 0
    return folder


@pytest.mark.parametrize("source", ["prompts=p.jsonl", f"prompt={CONTROL}"])
def test_samples_on_a_terminal_contain_no_control_characters(
    folder_with_a_byte_run, sample, monkeypatch, source
):
    monkeypatch.chdir(folder_with_a_byte_run)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert not set(sample(*RUN, source)) & set("\x1b\x9b\u202e")


def test_samples_in_a_pipe_are_exact(folder_with_a_byte_run, sample, monkeypatch):
    monkeypatch.chdir(folder_with_a_byte_run)
    assert "\x9b" in sample(*RUN, "prompts=p.jsonl")


def test_samples_in_a_pipe_are_json_if_it_is_not_utf_8(folder_with_a_byte_run, sample, monkeypatch):
    monkeypatch.chdir(folder_with_a_byte_run)
    monkeypatch.setattr(script, "prints_unicode", lambda: False)
    output = sample(*RUN, "prompts=p.jsonl")
    assert output.isascii()
    assert json.loads(output)["prompt"] == CONTROL


# Refusals


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("prompt=T\udce9", "prompt 1 has characters that are not in the vocabulary"),
        ("prompts=new.txt num_samples=3", "prompt 2 has characters that are not"),
        ("prompts=text.txt out=no/o.jsonl", "out=no/o.jsonl exists, or its folder does not"),
        ("prompt_file=.", ". cannot be read (IsADirectoryError"),
        ("out=o.jsonl", "out=o.jsonl"),
        ("prompts=text.txt interactive=true", "prompts and interactive"),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(trained, workdir, capsys, overrides, message):
    (workdir / "new.txt").write_text("The\nÜ\n", encoding="utf-8")
    assert run_command("sample", *overrides.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    (sentence,) = [line for line in lines if not line.startswith("runs/")]
    assert message in sentence
    assert not Path("o.jsonl").exists()
