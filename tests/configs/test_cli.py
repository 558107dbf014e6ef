"""The command line: flags, the help page, and errors of real processes."""

import os
import subprocess
import sys

import pytest
from data_helpers import write_file
from helpers import ROOT, run_command
from omegaconf import OmegaConf

from common.errors import UserError
from configs.cli import parse_config
from configs.error_messages import SYNONYMS
from configs.schema import SCRIPTS, key_types
from training.signals import run_main


def test_help_page_has_groups_keys_and_examples(capsys):
    import train

    with pytest.raises(SystemExit) as stopped:
        parse_config("train", train.__doc__, ["--help"])
    page = capsys.readouterr().out
    for part in (
        "python train.py data.path=",
        "train.steps=N",
        "attention=",
        "cosine | linear | wsd",
        "--config-dir",
    ):
        assert part in page
    assert stopped.value.code == 0 and page.count("\n") < 60
    for script in SCRIPTS:
        run_command(script, "--help")
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_cfg_job_prints_the_composed_config(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_config("train", "", ["--cfg", "job", "train.steps=77"])
    assert stopped.value.code == 0
    assert OmegaConf.create(capsys.readouterr().out).train.steps == 77


# Real processes, as a user starts them.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train.stesp=3"],
            "train.py: train.stesp: there is no such key (did you mean train.steps?)",
        ),
        (["model.n_head=5"], "model.n_embd=128 must be a multiple of model.n_head=5"),
        (["data=text", "data.path=missing.txt"], "data.path=missing.txt has no file to read"),
        (["train.micro_batch_size=3"], "set one of 1, 2, 4, 8, 16"),
        (["device=cuda"], " finds no cuda device; set device=cpu"),
        (
            ["attention=flash", "model.dropout=0.1"],
            "set model.dropout=0, or attention=naive or sdpa",
        ),
        (["dtype=float16"], "set dtype=bfloat16 or float32"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_command_prints_one_line_and_writes_nothing(words, message, tmp_path):
    import torch

    if words == ["device=cuda"] and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    folder, without_torch = tmp_path / "folder", tmp_path / "without_torch"
    folder.mkdir()
    write_file(
        f"{without_torch}/torch.py",
        "raise SystemExit('torch is imported before the command line is checked')",
    )
    needs_torch = any(word.startswith(("device", "dtype", "attention=flash")) for word in words)
    environment = {} if needs_torch else {"PYTHONPATH": str(without_torch)}
    device = [] if "device=cuda" in words else ["device=cpu"]
    command, options = (
        [sys.executable, str(ROOT / "train.py"), *words, *device],
        {"cwd": folder, "timeout": 300},
    )
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, **options
    )
    assert message in done.stderr
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert not list(folder.iterdir())


OURS = {
    "learning_rate": "optimizer.lr", "max_iters": "train.steps", "eval_interval": "eval.every", "out_dir": "name",
    "gradient_accumulation_steps": "train.micro_batch_size", "train.hidden_size": "model.n_embd",
    "stepss": "train.steps", "layers": "model.n_layer", "lrr": "optimizer.lr", "context": "model.block_size",
    "batch": "train.batch_size or train.micro_batch_size", "embd": "model.n_embd", "save_every": "checkpoint.every",
    "checkpoint_every": "checkpoint.every", "temp": "eval.sample.temperature",
    "every": "eval.every or checkpoint.every", "precision": "dtype", "flash": "attention=flash",
    "min_lr": "schedule.final_fraction", "window_size": "model.window", "eval_iters": "eval.windows",
    "wandb.log": "wandb.mode", "wandb_log": "wandb.mode", "wandb_run_name": "name", "wandb_project": "wandb.project",
    "fp16": "dtype=float16", "bf16": "dtype=bfloat16", "gpu": "device=cuda", "max_iter": "train.steps",
    "n_ctx": "model.block_size", "ctx": "model.block_size", "warmup_iters": "schedule.warmup_steps",
    "beta2": "optimizer.betas", "accumulate": "train.micro_batch_size", "grad_accum": "train.micro_batch_size",
    # other ways to write a key
    "eval-every": "eval.every", "train.batch-size": "train.batch_size", "batch-size": "train.batch_size",
    "train/batch_size": "train.batch_size", "Train.steps": "train.steps", "LR": "optimizer.lr",
    "data_path": "data.path", "data/path": "data.path",
}  # fmt: skip
OF_SAMPLING = {
    "start": "prompt", "temp": "temperature", "n": "num_samples", "length": "max_new_tokens", "name": "run",
    "ckpt": "run or checkpoint", "num_tokens": "max_new_tokens", "max_tokens": "max_new_tokens", "top-k": "top_k",
    "max-new-tokens": "max_new_tokens",
}  # fmt: skip
NO_KEY = "there is no such key (did you mean"
NO_SETTING = "is not a setting of the form key=value (did you mean"


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        *(("train", [f"{key}=1"], f"py: {key}: {NO_KEY} {ours}?)") for key, ours in OURS.items()),
        *(
            ("sample", [f"{key}=1"], f"py: {key}: {NO_KEY} {ours}?)")
            for key, ours in OF_SAMPLING.items()
        ),
        ("train", ["--device=cpu"], f"'--device=cpu' {NO_SETTING} device?)"),
        ("train", ["-device=cpu"], f"'-device=cpu' {NO_SETTING} device?)"),
        ("train", ["-model=gpt2"], f"'-model=gpt2' {NO_SETTING} model?)"),
        ("train", ["--steps", "3"], f"'--steps' {NO_SETTING} train.steps?); see"),
        ("train", ["train.steps", "=", "3"], f"'train.steps' {NO_SETTING} train.steps?); see"),
        ("train", ["--eval-every", "5"], f"'--eval-every' {NO_SETTING} eval.every?); see"),
        (
            "train",
            ["wandb=false"],
            "wandb=false must be a section; set its keys, such as wandb.mode",
        ),
        (
            "train",
            ["wandb=disabled"],
            "wandb=disabled must be a section; set its keys, such as wandb.mode",
        ),
        ("train", ["text.txt"], "(did you mean data.path=text.txt?)"),
        ("bench", ["block_size=64"], "(did you mean block_sizes?)"),
        ("sample", ["--foo"], "'--foo' is not a setting of the form key=value; see --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_settings_of_other_programs_get_a_suggestion(
    script, words, message, workdir, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", [f"{script}.py"])
    with pytest.raises(SystemExit) as exit:
        parse_config(script, "", words)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_suggested_settings_exist():
    keys = set().union(*(key_types(script) for script in SCRIPTS))
    assert {suggestion.split("=")[0] for suggestion in SYNONYMS} <= keys


@pytest.mark.parametrize(
    "words",
    [
        ["train.stesp=1", "modle=gpt2"],
        ["--stesp=1", "modle=gpt2"],
        ["-m", "seed=1,2", "train.stesp=1,2", "modle=gpt2"],
    ],
    ids=" ".join,
)
def test_all_wrong_keys_are_reported_at_once(words, capsys):
    with pytest.raises(SystemExit):
        parse_config("train", "", words)
    error = capsys.readouterr().err
    assert "(did you mean train.steps?)" in error and f"modle: {NO_KEY} model?)" in error


def test_suggestions_are_keys_of_the_script(capsys):
    with pytest.raises(SystemExit):
        parse_config("prepare", "", ["learning_rate=1"])
    assert "learning_rate: there is no such key; see" in capsys.readouterr().err


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="torch's builds for Linux contain GNU's OpenMP"
)
@pytest.mark.parametrize(
    ("variables", "spin_count"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000"),
    ],
)
def test_idle_threads_soon_sleep_unless_the_user_sets_a_policy(variables, spin_count):
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    environment |= {
        "OMP_DISPLAY_ENV": "VERBOSE"
    } | variables  # the library prints its settings when it is loaded
    code = "from training.signals import start_process; start_process(); import torch"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this build of torch has another OpenMP")
    assert f"GOMP_SPINCOUNT = '{spin_count}'" in done.stderr


def fail(error):
    raise error


def test_rank_0_reports_errors_first(monkeypatch, capsys):
    waits = []
    monkeypatch.setattr("training.signals.time.sleep", waits.append)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("RANK", "0")
    assert (
        run_main(fail, UserError("wrong")) == 2
        and capsys.readouterr().err == "train.py: wrong\n"
        and not waits
    )
    monkeypatch.setenv("RANK", "3")
    assert run_main(fail, KeyboardInterrupt()) == 75 and capsys.readouterr().err == "" and not waits
    assert (
        run_main(fail, UserError("wrong")) == 2 and len(waits) == 1
    )  # torchrun ends the rank while it waits
    assert capsys.readouterr().err == "train.py, rank 3: wrong\n"
    with pytest.raises(KeyError):  # a bug
        run_main(fail, KeyError("wrong"))
    assert len(waits) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_full_disk_at_the_last_flush_is_reported():
    code = "from training.signals import run_process; run_process(lambda: print('result') or 0)"
    command = (
        f"cd '{ROOT}'; env -u PYTHONUNBUFFERED '{sys.executable}' -c \"{code}\" 2>&1 >/dev/full"
    )
    status, output = subprocess.getstatusoutput(command)
    assert status == 1 and "free some disk space" in output
