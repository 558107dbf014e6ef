"""The command line: flags, the help page, unknown words, and errors of real processes."""

import os
import subprocess
import sys
from contextlib import chdir

import pytest
import torch
import yaml
from config_helpers import refuse
from data_helpers import write_file
from helpers import ROOT, run_command

from configs.cli import parse_config
from configs.schema import SCRIPTS


def print_page(capsys, script: str, *words: str) -> str:
    """What a command prints that only prints a page."""
    with pytest.raises(SystemExit) as stopped:
        parse_config(script, "the docstring", list(words))
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("part", ["the docstring", "cosine | linear | wsd", "--config-dir"])
def test_help_page_has_the_docstring_the_choices_and_the_flags(flag, part, capsys):
    assert part in print_page(capsys, "train", flag)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_page_fits_into_100_columns(script, capsys):
    assert max(map(len, print_page(capsys, script, "--help").splitlines())) <= 100


def print_config(capsys, *words: str) -> dict:
    return yaml.safe_load(print_page(capsys, "train", "--cfg", "job", *words))


def test_cfg_job_prints_the_config_with_the_values_of_its_preset(workdir, capsys):
    config = print_config(capsys, "data.path=text.txt", "train.steps=77", "seed=3")
    assert (config["seed"], config["train"]["steps"]) == (3, 77)
    assert (config["preset"], config["train"]["batch_size"]) == ("20kB", 4)


def test_cfg_job_is_yaml_on_a_terminal_without_unicode():
    command = [sys.executable, ROOT / "sample.py", "--cfg", "job", "run=a", "prompt=\xe9"]
    output = subprocess.check_output(command, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert yaml.safe_load(output)["prompt"] == "\xe9"


def test_cfg_job_does_not_measure_the_machine(workdir, capsys, monkeypatch):
    monkeypatch.setattr("training.presets.measure_speed", lambda *_: pytest.fail("measured"))
    assert print_config(capsys, "data.path=text.txt", "train.minutes=5")["preset"] == "auto"


@pytest.mark.parametrize(
    "words",
    [
        ["--cfg=all"],
        ["--cfg"],
        ["--help=1"],
        ["--config-dir"],
        ["--config-dir="],
        ["--config-dir", "missing"],
    ],
    ids=" ".join,
)
def test_wrong_value_of_a_flag_is_refused(words, capsys):
    assert words[0].partition("=")[0] in refuse(capsys, "train", *words)


def test_compare_takes_words_without_a_key_as_folders(workdir):
    (workdir / "attention=flash,seed=1").mkdir()
    words = ["runs/a", "out=there", "attention=flash,seed=1"]
    config = parse_config("compare", "", words)
    assert config.folders == ["runs/a", "attention=flash,seed=1"]
    assert config.out == "there"


# Unknown words


OURS = {
    "learning_rate": "optimizer.lr", "max_iters": "train.steps", "eval_interval": "eval.every",
    "out_dir": "name", "gradient_accumulation_steps": "train.micro_batch_size",
    "train.hidden_size": "model.n_embd", "stepss": "train.steps", "layers": "model.n_layer",
    "lrr": "optimizer.lr", "context": "model.block_size",
    "batch": "train.batch_size or train.micro_batch_size", "embd": "model.n_embd",
    "save_every": "checkpoint.every", "checkpoint_every": "checkpoint.every",
    "temp": "eval.sample.temperature", "every": "eval.every or checkpoint.every",
    "precision": "dtype", "flash": "attention=flash", "min_lr": "schedule.final_fraction",
    "window_size": "model.window", "eval_iters": "eval.windows", "wandb.log": "wandb.mode",
    "wandb_log": "wandb.mode", "wandb_run_name": "name", "wandb_project": "wandb.project",
    "fp16": "dtype=float16", "bf16": "dtype=bfloat16", "gpu": "device=cuda",
    "max_iter": "train.steps", "n_ctx": "model.block_size", "ctx": "model.block_size",
    "warmup_iters": "schedule.warmup_steps", "beta2": "optimizer.betas",
    "accumulate": "train.micro_batch_size", "grad_accum": "train.micro_batch_size",
    # other ways to write a key
    "eval-every": "eval.every", "train.batch-size": "train.batch_size",
    "batch-size": "train.batch_size", "train/batch_size": "train.batch_size",
    "Train.steps": "train.steps", "LR": "optimizer.lr", "data_path": "data.path",
    "data/path": "data.path",
    # misspelled keys and groups
    "train.stesp": "train.steps", "steps": "train.steps", "modle": "model",
}  # fmt: skip
OF_SAMPLING = {
    "start": "prompt", "temp": "temperature", "n": "num_samples", "length": "max_new_tokens",
    "name": "run", "ckpt": "run or checkpoint", "num_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens", "top-k": "top_k", "max-new-tokens": "max_new_tokens",
}  # fmt: skip


@pytest.mark.parametrize(
    ("script", "key", "ours"),
    [
        *(("train", key, ours) for key, ours in OURS.items()),
        *(("sample", key, ours) for key, ours in OF_SAMPLING.items()),
        ("bench", "block_size", "block_sizes"),
        ("compare", "ouy", "out"),
    ],
)
def test_unknown_key_gets_a_suggestion(script, key, ours, capsys):
    error = refuse(capsys, script, f"{key}=1")
    assert f"{key}: there is no such key (did you mean {ours}?)" in error


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("--device=cpu", "device"),
        ("-device=cpu", "device"),
        ("--steps", "train.steps"),
        ("--eval-every", "eval.every"),
        ("--learning_rate=1", "optimizer.lr"),
        ("++seed=1", "seed"),
        ("+train.stesp=1", "train.steps"),
    ],
)
def test_word_with_a_prefix_gets_a_suggestion(word, ours, capsys):
    error = refuse(capsys, "train", word, "3")
    key = word.partition("=")[0]
    assert f"{key}: there is no such key (did you mean {ours}?)" in error


@pytest.mark.parametrize("word", ["+train.foo=1", "~seed", "=1", "été=1", "--foo", "a.txt"])
def test_word_that_is_no_setting_is_refused(word, capsys):
    error = refuse(capsys, "train", word)
    assert f"{word.partition('=')[0]}: there is no such key" in error


def test_text_without_quotes_gets_advice(capsys):
    error = refuse(capsys, "sample", "prompt=Hello", "world")
    assert "world: there is no such key" in error
    assert "text with spaces needs quotes" in error


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("train", "hydra.run.dir=x"),
        ("train", "hydra/launcher=submitit_local"),
        ("export", "experiment=gpt2_124m"),
        ("bench", "attention=flash"),
        ("sample", "model.n_layer=2"),
    ],
)
def test_key_that_a_script_does_not_have_is_refused(script, word, capsys):
    key = word.partition("=")[0]
    assert f"{key}: there is no such key" in refuse(capsys, script, word)


@pytest.mark.parametrize(
    "word",
    [
        "hydra/launcher=nowhere",
        "hydra.launcher._target_=os.system",
        "hydra.launcher.x={_target_:os.system}",
        "hydra.sweeper.params=x",
    ],
)
def test_sweep_accepts_no_setting_of_hydra_that_could_run_code(word, capsys):
    key = word.partition("=")[0]
    assert f"{key}: there is no such key" in refuse(capsys, "train", "-m", "seed=1,2", word)


# Real processes, as a user starts them


def refuse_in_process(folder, script: str, *words: str, **environment: str) -> str:
    """The only line that a command prints that is refused, and writes nothing."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(ROOT / f"{script}.py"), *words],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert not list(folder.iterdir())
    return done.stderr


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("train", ["train.stesp=3"], "train.py: train.stesp: there is no such key"),
        ("train", ["model.n_head=5"], "model.n_embd=128 must be a multiple of model.n_head=5"),
        ("train", ["train.minutes=many"], "train.minutes=many: set a value of type float | null"),
        (
            "train",
            ["-m", "seed=1,2", "data.path=missing.txt"],
            "data.path=missing.txt has no file to read",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_command_is_refused_before_torch_is_imported(script, words, message, tmp_path):
    failing_import = "raise SystemExit('torch was imported')"
    write_file(f"{tmp_path}/modules/torch.py", failing_import)
    environment = {"PYTHONPATH": str(tmp_path / "modules")}
    assert message in refuse_in_process(tmp_path / "folder", script, *words, **environment)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["device=cuda"], "set device=cpu"),
        (["attention=flash", "model.dropout=0.1", "device=cpu"], "set model.dropout=0, or attent"),
        (["data.path=missing.txt"], "data.path=missing.txt has no file to read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_command_that_this_machine_cannot_run_is_refused(words, message, tmp_path, capsys):
    if words == ["device=cuda"] and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with chdir(tmp_path):
        assert run_command("train", *words) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
