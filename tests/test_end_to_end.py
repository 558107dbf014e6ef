"""Complete runs: files, resuming, killing, sampling. A resumed run is compared with a run without interruption."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout, suppress
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
import torch
import yaml
from attention_helpers import IS_OLD_GPU, REQUEST_CUDA, choose, resolve_or_skip
from helpers import (
    ROOT,
    TEXT,
    TINY,
    file_size_limit,
    load,
    metrics,
    summary,
    untimed,
    wait_for_step,
)
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import UserError, printable
from data import tokenizer
from data.loader import Loader
from data.prepare import PreparedData, read_meta
from generation.run_paths import find_checkpoint
from model import GPTConfig
from model.attention import naive
from model.gpt import GPT
from training.evaluate import Evaluator
from training.optimizer import OPTIMIZERS
from training.signals import raise_interrupt
from training.speed import Speed


def assert_same_run(a, b):
    """Check that rows, weights and optimizer state are bit-identical."""
    assert untimed(metrics(a)) == untimed(metrics(b))
    assert_same_checkpoints(a, b)


def assert_same_checkpoints(a, b):
    for kind in ("last", "best"):
        one, two = (
            {key: load(run, kind)[key] for key in ("step", "best_val_loss", "model", "optimizer")}
            for run in (a, b)
        )
        assert bool(one["optimizer"]) == (kind == "last")
        torch.testing.assert_close(one, two, atol=0, rtol=0)


def test_run_folder_contains_the_documented_files_and_keys(train, workdir, capsys, monkeypatch):
    monkeypatch.setattr("training.run_logger.peak_flops", lambda *args: 1e9)
    assert train("name=a") == 0
    out = capsys.readouterr().out
    folder = workdir / "runs/a"
    files = {"config.yaml", "metrics.jsonl", "summary.json", "loss.png", "checkpoints"}
    assert files <= {p.name for p in folder.iterdir()}
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"last.pt", "best.pt"}
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (
        yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["train"]["steps"] == 6
    )

    rows = metrics("a")
    assert [row["step"] for row in rows] == list(range(7))
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 3, 6]
    assert [row["tokens"] for row in rows] == [64 * step for step in range(7)]
    recorded = summary("a")
    for row in rows[1:]:
        assert {
            "train/loss",
            "grad_norm",
            "lr",
            "seconds",
            "step_ms",
            "tokens_per_second",
            "mfu",
        } <= set(row)
        assert row["tokens_per_second"] == pytest.approx(1000 * 64 / row["step_ms"])
        assert row["mfu"] == pytest.approx(
            recorded["flops_per_token"] * row["tokens_per_second"] / 1e9
        )

    assert recorded["status"] == "finished"
    assert recorded["step"] == 6
    assert recorded["attention"] == {
        "requested": "sdpa",
        "resolved": "flash",
        "flash_package": None,
    }
    assert recorded["best_val_loss"] == min(
        row["val/loss"] for row in rows if "val/loss" in row and row["step"] > 0
    )
    assert recorded["last_val_loss"] == rows[-1]["val/loss"]
    for key in ("wall_seconds", "step_ms", "tokens_per_second", "n_params", "device", "dtype",
                "versions", "threads", "command", "commit", "error"):  # fmt: skip
        assert key in recorded
    assert f"best validation loss {recorded['best_val_loss']:.4f}" in out
    assert "python sample.py run=a" in out
    assert "attention sdpa -> flash" in out


def test_initial_evaluation_can_be_skipped(train):
    assert train("name=a", "train.steps=4", "eval.every=2", "eval.initial=false") == 0
    assert [row["step"] for row in metrics("a")] == [1, 2, 3, 4]
    assert [row["step"] for row in metrics("a") if "val/loss" in row] == [2, 4]


def test_validation_loss_counts_each_target_of_its_windows_once_without_dropout(train, workdir):
    """The reference computes each target with the complete context of its window."""
    settings = ["train.batch_size=7", "model.dropout=0.5"]
    assert train("name=a", "eval.windows=null", *settings) == 0
    saved = load("a", "last")
    model = GPT(GPTConfig(**saved["model_config"]), saved["vocab_size"], naive)
    model.load_state_dict(saved["model"])
    folder = Path(summary("a")["data"])
    tokens = PreparedData(folder, read_meta(folder)).val[:].astype(np.int64)
    T, nats = 16, []
    for start_of_window in range(0, len(tokens) - 1, T):
        begin = min(start_of_window, len(tokens) - 1 - T)
        x, y = (
            torch.tensor(tokens[begin : begin + T]),
            torch.tensor(tokens[begin + 1 : begin + 1 + T]),
        )
        losses = torch.nn.functional.cross_entropy(model.eval()(x[None])[0], y, reduction="none")
        nats += losses[start_of_window - begin :].tolist()
    assert len(nats) == len(tokens) - 1
    assert metrics("a")[-1]["val/loss"] == pytest.approx(np.mean(nats), abs=1e-5)
    text = tokenizer.from_spec(saved["tokenizer"]).decode(tokens[1:].tolist())
    assert metrics("a")[-1]["val/bpb"] == pytest.approx(
        sum(nats) / math.log(2) / len(text.encode()), abs=1e-5
    )
    assert train("name=b", "eval.windows=9", *settings) == 0  # evenly spread over the split
    starts = [int(i * math.ceil(len(nats) / T) / 9) * T for i in range(9)]
    expected = np.mean([nat for start in starts for nat in nats[start : start + T]])
    assert metrics("b")[-1]["val/loss"] == pytest.approx(expected, abs=1e-5)


def test_each_forward_pass_of_training_has_another_dropout_mask(train, monkeypatch):
    dropout, masks = torch.nn.functional.dropout, []

    def record_and_drop(x, p, training):
        y = dropout(x, p, training)
        masks.extend([(y == 0).numpy().tobytes()] * training)
        return y

    monkeypatch.setattr(torch.nn.functional, "dropout", record_and_drop)
    assert train("name=a", "device=cpu", "model.dropout=0.1", "train.micro_batch_size=2") == 0
    assert len(set(masks)) == len(masks) == 12 * 5, (
        "of embeddings, attention and MLP, but not of the evaluation"
    )


def test_seed_determines_the_run(train):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert train(f"name={name}", f"seed={seed}") == 0
    assert_same_run("a", "b")
    assert metrics("a")[1]["train/loss"] != metrics("c")[1]["train/loss"]


@pytest.mark.parametrize(
    ("optimizer", "dtype"), [("adamw", "float32"), ("muon", "float32"), ("muon", "bfloat16")]
)
def test_extended_run_is_bit_identical_to_a_longer_run(train, capsys, optimizer, dtype):
    """Dropout included. All steps are warmup, so the learning rates do not depend on train.steps."""
    settings = [
        f"optimizer={optimizer}",
        f"dtype={dtype}",
        "model.dropout=0.1",
        "schedule.warmup_steps=100",
    ]
    assert train("name=whole", "train.steps=9", *settings) == 0
    assert train("name=parts", *settings) == 0
    assert "all of them warmup (schedule.warmup_steps=100)" in capsys.readouterr().out
    finished = summary("parts")
    assert train("name=parts", *settings) == 0
    assert "runs/parts is finished at step 6; set a larger train.steps" in capsys.readouterr().out
    assert summary("parts") == finished
    assert train("name=parts", "train.steps=9", *settings) == 0
    assert "resumed from step 6" in capsys.readouterr().out
    assert_same_run("whole", "parts")


def test_accumulation_does_not_change_the_loss(train):
    assert train("name=whole") == 0
    assert train("name=parts", "train.micro_batch_size=1") == 0
    for a, b in zip(metrics("whole"), metrics("parts"), strict=True):
        assert a.get("train/loss") == pytest.approx(b.get("train/loss"), abs=1e-5)
        assert a.get("val/loss") == pytest.approx(b.get("val/loss"), abs=1e-5)
    assert summary("parts")["accumulation"] == 4


@pytest.mark.slow
def test_backends_and_compilation_do_not_change_the_loss_curve(train, capsys):
    runs = {
        "naive": ["attention=naive"],
        "flash": ["attention=flash"],
        "compiled": ["attention=naive", "compile=true"],
    }
    for name, overrides in runs.items():
        with torch.profiler.profile() as profiler:
            assert train(f"name={name}", *overrides, "model.n_layer=1", "train.steps=3") == 0
        ran_flash = any(
            "_flash_attention_for_cpu" in event.key for event in profiler.key_averages()
        )
        assert ran_flash == (name == "flash")  # the compiler must not replace naive by flash
        assert ("compiled (can take a minute)" in capsys.readouterr().out) == (name == "compiled")
        assert summary(name)["attention"]["resolved"] == overrides[0].split("=")[1]
    for name in ("flash", "compiled"):
        for a, b in zip(metrics("naive"), metrics(name), strict=True):
            assert a.get("train/loss") == pytest.approx(b.get("train/loss"), abs=1e-5)
    assert (
        torch.compiler.config.cache_key_tag
        == "AttentionConfig(backend='naive', kernels=None, flash_package=None)"
    )
    assert set(load("compiled", "last")["model"]) == set(load("naive", "last")["model"])


@pytest.mark.compiles
@pytest.mark.slow
def test_broken_compiler_is_reported_in_one_sentence(workdir):
    command = [sys.executable, ROOT / "train.py", *TINY, "compile=true", "name=a"]
    environment = os.environ | {
        "CXX": "/bin/false",
        "TORCHINDUCTOR_CACHE_DIR": str(workdir / "cache"),
    }
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert done.returncode == 1
    assert re.fullmatch(
        r"train.py: torch.compile failed \(.*/bin/false.*\); .* set compile=false .*\n", done.stderr
    )
    assert "torch.compile failed" in summary("a")["error"]


def test_bfloat16_trains_close_to_float32(train):
    settings = ["train.steps=60", "eval.every=60", "eval.windows=null"]
    assert train("name=a", *settings) == 0
    assert train("name=b", "dtype=bfloat16", *settings) == 0
    assert summary("b")["dtype"] == "bfloat16"
    for a, b in zip(metrics("a")[1:4], metrics("b")[1:4], strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=0.02)
    assert summary("a")["last_val_loss"] < metrics("a")[0]["val/loss"] - 1
    assert summary("b")["last_val_loss"] == pytest.approx(summary("a")["last_val_loss"], abs=0.03)
    assert load("b", "last")["model"]["wte.weight"].dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_float16_trains_with_its_scaler_on_cuda(train, optimizer):
    settings = [
        "device=cuda",
        f"optimizer={optimizer}",
        "train.steps=60",
        "train.batch_size=16",
        "eval.every=60",
    ]
    assert train("name=half", "dtype=float16", *settings) == 0
    assert train("name=single", "dtype=float32", *settings) == 0
    half, single = metrics("half"), metrics("single")
    assert load("half", "last")["scaler"]["scale"] > 0
    assert half[-1]["val/loss"] < half[0]["val/loss"] - 0.3
    assert half[-1]["val/loss"] == pytest.approx(single[-1]["val/loss"], abs=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [["compile=false"], pytest.param([], marks=pytest.mark.compiles)])
@pytest.mark.parametrize("backend", ["naive", "sdpa", "flash"])
def test_run_on_cuda_resumes_and_is_compiled_by_default(train, sample, backend, words):
    resolve_or_skip(choose(backend), REQUEST_CUDA)
    settings = [
        "device=cuda",
        f"attention={backend}",
        "model.n_embd=64",
        "schedule.warmup_steps=100",
        *words,
    ]
    assert train("name=a", "dtype=auto", *settings) == 0
    assert train("name=a", "dtype=auto", "train.steps=12", *settings) == 0
    recorded = summary("a")
    expected = {
        "device": "cuda",
        "dtype": "float32" if IS_OLD_GPU else "bfloat16",
        "compile": not words,
        "tf32": False,
    }
    assert {key: recorded[key] for key in expected} == expected
    assert [row["step"] for row in metrics("a")] == list(range(13))
    assert sample("run=a", "device=cuda", "prompt=The 1", "max_new_tokens=5").startswith("The 1")


class WaitIsAnError(TorchDispatchMode):
    """If `active`, operations raise whose result the host needs. On CUDA, PyTorch finds all of them."""

    active = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        indices = args[1] if function.name() == "aten::index.Tensor" else []
        waits = any(i is not None and i.dtype == torch.bool for i in indices)
        waits |= function.name() in (
            "aten::_local_scalar_dense",
            "aten::nonzero",
            "aten::masked_select",
        )
        assert not (waits and self.active), f"{function.name()} waits for the GPU"
        return function(*args, **(kwargs or {}))

    def set_active(self, active: bool) -> None:
        self.active = active
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error" if active else "default")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_step_and_no_validation_window_waits_for_the_gpu(
    train, monkeypatch, request, device, optimizer
):
    mode, read_batch, end_step, set_training = (
        WaitIsAnError(),
        Loader.batch,
        Speed.end_step,
        GPT.train,
    )
    monkeypatch.setattr(Loader, "batch", lambda *a: (read_batch(*a), mode.set_active(True))[0])
    monkeypatch.setattr(Speed, "end_step", lambda self: (mode.set_active(False), end_step(self))[1])
    # the validation calls this before the first window and after the last one
    monkeypatch.setattr(GPT, "train", lambda *a: (mode.set_active(False), set_training(*a))[1])
    settings = [
        f"device={device}",
        f"optimizer={optimizer}",
        "compile=false",
        "train.micro_batch_size=2",
    ]
    request.addfinalizer(lambda: mode.set_active(False))
    with mode:
        assert train("name=a", "model.window=8", *settings) == 0
    assert not mode.active


def test_gradients_are_clipped_and_their_norm_before_clipping_is_logged(train):
    settings = ["optimizer=adamw", "optimizer.eps=1e-3", "schedule.warmup_steps=0"]
    assert train("name=a", "train.grad_clip=1e-6", *settings) == 0
    assert metrics("a")[1]["grad_norm"] > 0.01
    # With gradients much smaller than eps, AdamW hardly changes the weights.
    assert summary("a")["last_val_loss"] == pytest.approx(metrics("a")[0]["val/loss"], abs=1e-3)


def test_deterministic_selects_deterministic_algorithms(train, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the run sets it in this process
    try:
        for deterministic in (False, True):
            assert (
                train(f"name={deterministic}", "train.steps=1", f"deterministic={deterministic}")
                == 0
            )
            assert torch.are_deterministic_algorithms_enabled() == deterministic
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rows_and_files_are_on_the_disk_before_a_checkpoint_replaces_the_previous_one(
    train, monkeypatch
):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))
    )
    monkeypatch.setattr(
        os,
        "replace",
        lambda source, path: (calls.append(f"{path} replaced"), replace(source, path)),
    )
    assert train("name=a", "train.steps=1", "eval.every=9") == 0
    names = [Path(call).name for call in calls]
    (written,) = [i for i, name in enumerate(names) if name.startswith("last.pt.")]
    replaced = names.index("last.pt replaced")
    assert names.index("metrics.jsonl") < names.index("best.pt replaced") < written < replaced, (
        names
    )
    assert "checkpoints" in names[replaced:], "the folder, too"


def test_evaluations_after_step_0_log_and_print_a_sample(train, capsys):
    assert train("name=a", "eval.sample.max_new_tokens=9") == 0
    rows = [row for row in metrics("a") if "val/loss" in row]
    assert [row["step"] for row in rows if "sample" in row] == [3, 6]
    assert [len(row["sample"]) for row in rows[1:]] == [9, 9]
    assert (
        f"  | {printable(rows[1]['sample'].strip(chr(10))).splitlines()[0]}"
        in capsys.readouterr().out
    )
    assert train("name=b", "eval.sample.max_new_tokens=0") == 0
    assert not any(row.get("sample") for row in metrics("b"))
    assert train("name=c", "optimizer=adamw", "optimizer.lr=1e-9") == 0  # the weights hardly change
    assert metrics("c")[3]["sample"] != metrics("c")[6]["sample"]


def test_tf32_is_off_by_default(train):
    for name, overrides, tf32 in (("a", [], False), ("b", ["tf32=true"], True), ("c", [], False)):
        assert train(f"name={name}", "train.steps=1", *overrides) == 0
        assert summary(name)["tf32"] is tf32


def test_time_limit_ends_a_run_and_its_schedule(train, monkeypatch):
    steps, start_step, perf_counter = [], Speed.start_step, time.perf_counter
    monkeypatch.setattr(Speed, "start_step", lambda self: (steps.append(1), start_step(self)))
    monkeypatch.setattr(
        time, "perf_counter", lambda: perf_counter() + 1000 * len(steps)
    )  # a step takes 1,000 s
    assert train("name=a", "train.steps=null", "train.minutes=500", "eval.every=1000000") == 0
    assert summary("a")["status"] == "finished"
    rows = metrics("a")
    assert len(rows) == 31
    assert rows[-1]["seconds"] >= 30_000
    assert "val/loss" in rows[-1]
    assert rows[-1]["lr"] < rows[10]["lr"]


def test_resuming_with_other_settings_is_refused_and_changes_no_file(
    trained, train, workdir, capsys
):
    before = {
        p: p.read_bytes()
        for p in (workdir / "runs/a").rglob("*")
        if p.is_file() and p.name != ".lock"
    }
    for overrides, message in (
        (["model.n_layer=1", "train.steps=9"], r"model.n_layer=2 \(now 1\)"),
        (["tokenizer=byte", "train.steps=9"], r"tokenizer.name=char \(now byte\)"),
        (["data.val_fraction=0.2", "train.steps=9"], r"with data.val_fraction=0.1 \(now 0.2\);"),
        (["optimizer=adamw", "train.steps=9"], r"optimizer.name=muon \(now adamw\)"),
        (["train.batch_size=8", "train.steps=9"], r"train.batch_size=4 \(now 8\)"),
        (["seed=2", "train.steps=9"], r"seed=1337 \(now 2\)"),
        (["resume=false"], "runs/a exists; set another name"),
    ):
        assert train("name=a", *overrides) == 2
        assert re.search(message, capsys.readouterr().err)
    (workdir / "text.txt").write_text(TEXT + "the end", encoding="utf-8")
    assert train("name=a", "train.steps=9") == 2
    assert "was trained with another text than text.txt has now" in capsys.readouterr().err
    (workdir / "text.txt").write_text(TEXT, encoding="utf-8")
    rows = before[metrics_file := workdir / "runs/a/metrics.jsonl"]
    metrics_file.write_bytes(rows[: len(rows) // 2])
    assert train("name=a", "train.steps=9") == 2
    assert "metrics.jsonl has no row of step" in capsys.readouterr().err
    metrics_file.write_bytes(rows)
    assert before == {p: p.read_bytes() for p in before}


def test_run_that_has_lost_its_last_checkpoint_is_refused(trained, train, workdir, capsys):
    (workdir / "runs/a/checkpoints/last.pt").unlink()
    before = {p: p.read_bytes() for p in (workdir / "runs/a").rglob("*") if p.is_file()}
    assert train("name=a") == 2
    assert re.search(
        r"runs/a/checkpoints/last.pt is missing.* set another name", capsys.readouterr().err
    )
    assert before == {p: p.read_bytes() for p in (workdir / "runs/a").rglob("*") if p.is_file()}
    assert train("name=b", "train.init_from=run:a", "tokenizer=run", "tokenizer.run=a") == 0
    shutil.copy("runs/a/checkpoints/best.pt", "runs/a/checkpoints/last.pt")
    assert train("name=a", "train.steps=9") == 0
    assert "has no optimizer state" in capsys.readouterr().out
    assert (
        train("name=a", "train.steps=8") == 2
        and "set train.steps=9 or more" in capsys.readouterr().err
    )


@pytest.mark.parametrize("status", ["running", None])
def test_results_of_a_run_killed_at_its_end_are_those_of_its_last_checkpoint(
    trained, train, workdir, status
):
    recorded, folder = summary("a"), workdir / "runs/a"
    (folder / "summary.json").unlink()
    (folder / "loss.png").unlink()
    if status is not None:  # the summary of an earlier checkpoint
        results = {
            key: 9
            for key in recorded
            if re.search("step|loss|bpb|wall_seconds|mfu|peak|tokens_per", key)
        }
        (folder / "summary.json").write_text(
            json.dumps(recorded | results | {"status": status}), encoding="utf-8"
        )
    assert train("name=a") == 0
    last = {key: metrics("a")[-1][key] for key in ("step_ms", "tokens_per_second", "mfu")}
    command = {"command": summary("a")["command"]}
    assert summary("a") == recorded | last | command  # the speed is not a median
    assert (folder / "loss.png").exists()


WITHOUT_LIMITS = ["train.grad_clip=null", "optimizer.weight_decay=0"]


def test_run_returns_to_an_older_checkpoint_after_it_has_diverged(
    train, sample, workdir, capsys, monkeypatch
):
    monkeypatch.delattr("os.link")  # as on a file system without hard links
    settings = [
        "optimizer=adamw",
        "schedule.warmup_steps=100",
        "checkpoint.every=2",
        "train.steps=12",
    ]
    assert train("name=whole", *settings) == 0
    assert train("name=a", *settings, "train.steps=7", "checkpoint.keep=2") == 0
    folder = workdir / "runs/a/checkpoints"
    assert {path.stem for path in folder.glob("*.pt")} == {
        "best",
        "last",
        "step-000004",
        "step-000006",
    }
    assert load("a", "step-000004")["step"] == 4 and load("a", "last")["step"] == 7

    diverging = ["optimizer.lr=1e9", *WITHOUT_LIMITS, "checkpoint.every=1", "checkpoint.keep=2"]
    assert train("name=a", *settings, *diverging) == 1
    assert summary("a")["status"] == "failed"
    assert torch.isfinite(load("a", "last")["model"]["wte.weight"]).all()
    assert (
        train("name=a", *settings, "checkpoint.keep=2") == 1
    )  # the weights are finite, but too large
    assert "copy an older checkpoint over" in capsys.readouterr().err

    shutil.copy(folder / "step-000006.pt", folder / "last.pt")
    os.utime(folder / "step-000006.pt", (2e9, 2e9))  # the clock was set back after this checkpoint
    assert train("name=a", *settings, "checkpoint.keep=1") == 0
    assert_same_run("whole", "a")
    assert {path.stem for path in folder.glob("*.pt")} == {"best", "last", "step-000010"}

    assert sample("run=a", "checkpoint=step-000010", "max_new_tokens=3")
    with pytest.raises(
        UserError, match=r"step-000002.pt; set run=runs/a checkpoint=best or last or step-000010"
    ):
        find_checkpoint("a", "step-000002")


def test_return_to_an_older_checkpoint_removes_the_files_of_later_steps(trained, train, capsys):
    settings = ["name=a", "checkpoint.every=1", "eval.attention_maps=true"]
    assert train(*settings, "train.steps=9", "checkpoint.keep=9") == 0
    folder = Path("runs/a/checkpoints")
    assert summary("a")["best_step"] == 9
    shutil.copy(folder / "step-000006.pt", folder / "last.pt")
    (folder / "step-9-mine.pt").touch()
    worse = ["optimizer.lr=9", "optimizer.weight_decay=0"]
    assert train(*settings, *worse, "train.steps=8", "checkpoint.keep=2") == 0
    assert {path.stem for path in folder.glob("step-*.pt")} == {
        "step-000006",
        "step-000007",
        "step-9-mine",
    }
    assert [path.stem for path in Path("runs/a/attention").iterdir()] == ["step-000008"]
    assert load("a", "best")["step"] == summary("a")["best_step"] == 6
    assert (
        load("a", "best")["best_val_loss"]
        == summary("a")["best_val_loss"]
        == metrics("a")[6]["val/loss"]
    )
    assert f"best validation loss {summary('a')['best_val_loss']:.4f}" in capsys.readouterr().out


def test_return_to_the_step_at_which_the_run_ends_now_removes_the_files_of_later_steps(
    trained, train
):
    assert train("name=a", "train.steps=9", "checkpoint.keep=9") == 0
    folder = Path("runs/a/checkpoints")
    (folder / "backup").mkdir()
    shutil.copy(folder / "last.pt", folder / "backup/step-000009.pt")
    shutil.copy(folder / "step-000006.pt", folder / "last.pt")
    assert train("name=a", "train.steps=6") == 0
    assert (summary("a")["step"], summary("a")["best_step"], load("a", "best")["step"]) == (6, 6, 6)
    assert metrics("a")[-1]["step"] == 6
    assert (folder / "backup/step-000009.pt").exists(), "a copy of the user stays"


@pytest.mark.parametrize("keep", [0, 2])
def test_full_disk_ends_a_run_and_keeps_the_last_checkpoint(trained, train, capsys, keep):
    with file_size_limit(70_000):
        assert (
            train("name=a", "train.steps=9", "checkpoint.every=8", f"checkpoint.keep={keep}") == 1
        )
    file = "step-000006.pt" if keep else "last.pt"
    assert (
        f"runs/a/checkpoints/{file}: File too large; free some disk space"
        in capsys.readouterr().err
    )
    assert not list(Path("runs/a/checkpoints").glob("*.partial"))
    assert file in summary("a")["error"] and summary("a")["status"] == "failed"
    assert load("a", "last")["step"] == 6
    assert train("name=a", "train.steps=9") == 0


# Killed and interrupted runs


def spawn(*overrides):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *TINY, *overrides], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


LONG = [
    "train.steps=240",
    "eval.every=40",
    "checkpoint.every=15",
    "model.dropout=0.1",
    "optimizer=muon",
]


@pytest.mark.slow
def test_killed_and_resumed_run_is_bit_identical(workdir):
    undisturbed = spawn("name=whole", *LONG)
    assert undisturbed.wait(600) == 0, undisturbed.stderr.read()
    kills = 0
    for step in (25, 150):
        process = spawn("name=killed", *LONG)
        wait_for_step("killed", step, process)
        kills += process.poll() is None
        process.kill()
        process.communicate()
    last = spawn("name=killed", *LONG)
    _, err = last.communicate(timeout=600)
    assert last.returncode == 0, err
    assert kills == 2
    assert [row["step"] for row in metrics("killed")] == list(range(241))
    assert_same_run("whole", "killed")


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.slow
def test_run_leaves_no_temporary_files_and_imports_no_compiler(train, resumed, tmp_path_factory):
    assert not resumed or train("name=a", "train.steps=3") == 0
    elsewhere = tmp_path_factory.mktemp("temporary")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", ROOT / "train.py", *TINY, "wandb.mode=offline", "name=a"],
        env=os.environ | {"TMPDIR": str(elsewhere)}, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ("resumed from step 3" in done.stdout) == resumed
    assert not list(elsewhere.iterdir())
    imported = set(re.findall(r"\S+$", done.stderr, re.MULTILINE))
    assert {"torch", "wandb"} <= imported
    assert not imported & {"torch._dynamo", "sympy"}  # importing them takes two seconds


@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signal_during_imports_is_reported(workdir, signal_name):
    """C code of numpy and torch ignores exceptions that are raised while it imports a module."""
    code = f"import os, signal\ntry:\n    os.kill(os.getpid(), signal.{signal_name})\nexcept BaseException:\n    pass"
    (workdir / "torch.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", *TINY],
        env=os.environ | {"PYTHONPATH": "."},
        text=True,
        capture_output=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (75, "", "train.py: interrupted\n")


def test_interrupted_run_saves_prints_how_to_resume_and_exits_75(workdir):
    process = spawn("name=a", *LONG, "train.steps=100000")
    wait_for_step("a", 10, process)
    process.send_signal(signal.SIGTERM)  # handled like Ctrl-C
    out, err = process.communicate(timeout=600)
    assert process.returncode == 75, (out, err)
    assert "Press Ctrl-C again to quit without saving" in err
    assert re.search(
        r"saved at step \d+; resume with the same command and name=a$", err, re.MULTILINE
    )
    assert "Traceback" not in err
    recorded, saved = summary("a"), load("a", "last")
    assert recorded["status"] == "interrupted"
    assert saved["step"] == metrics("a")[-1]["step"] == recorded["step"] > 0


def test_run_whose_terminal_is_closed_saves_a_checkpoint(workdir):
    master, slave = os.openpty()
    command = [sys.executable, str(ROOT / "train.py"), *TINY, "name=a", *LONG, "train.steps=100000"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    os.set_blocking(master, False)
    while process.poll() is None and not Path("runs/a/checkpoints/last.pt").exists():
        with suppress(BlockingIOError):
            os.read(
                master, 10_000
            )  # otherwise the terminal is full at some time, and the process waits
        time.sleep(0.02)
    os.close(master)  # writing to the terminal fails from now on
    process.send_signal(signal.SIGHUP)  # as the kernel and the shell do
    assert process.wait(600) == 75
    assert summary("a")["status"] == "interrupted"
    assert load("a", "last")["step"] == metrics("a")[-1]["step"] > 0


def raise_in_call(monkeypatch, number: int, target: str, condition=lambda *args: True) -> None:
    """Raise SIGTERM before call `number`, from 1, of a function."""
    function, calls = resolve_name(target), []

    def signal_and_call(*args, **kwargs):
        calls.extend([None] * condition(*args))
        if len(calls) == number:
            calls.append(None)
            signal.raise_signal(signal.SIGTERM)
        return function(*args, **kwargs)

    monkeypatch.setattr(target, signal_and_call)


def is_validation(loader, split, *args) -> bool:
    return split == "val"


# evaluations after the first and after the last step, and the sample of that after the first step
@pytest.mark.parametrize(
    ("step", "target", "call", "condition"),
    [
        (1, "data.loader.Loader.batch", 6, is_validation),
        (6, "data.loader.Loader.batch", 26, is_validation),
        (1, "generation.engine.sample_next_token", 2, lambda *args: True),
    ],
)
def test_evaluation_that_a_signal_stops_is_repeated_on_resume(
    train, capsys, step, target, call, condition
):
    assert train("name=whole", "eval.windows=16", "eval.every=1") == 0
    codes = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            "training.wandb_logger.WandbRun.finish", lambda self, exit_code: codes.append(exit_code)
        )
        raise_in_call(monkeypatch, call, target, condition)
        assert train("name=a", "eval.windows=16", "eval.every=1") == 75
    assert codes == [75], "wandb gets the exit code"
    assert f"saved at step {step}" in capsys.readouterr().err
    assert summary("a")["status"] == "interrupted"
    assert metrics("a")[-1]["step"] == step - 1, "the row of the step waits for its evaluation"
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(ZeroDivisionError):
        monkeypatch.setattr(
            "training.checkpoint.save_checkpoint", lambda path, content: 1 / 0
        )  # a crash after the row
        train("name=a", "eval.windows=16", "eval.every=1")
    assert train("name=a", "eval.windows=16", "eval.every=1") == 0
    assert summary("a")["status"] == "finished"
    assert summary("a")["step_ms"] > 0, "also if only an evaluation was left to do"
    assert_same_checkpoints("whole", "a")
    assert untimed(metrics("a")) == untimed(metrics("whole"))


def test_signal_before_the_first_step_ends_the_run_at_once(train):
    with pytest.MonkeyPatch.context() as monkeypatch:
        raise_in_call(monkeypatch, 1, "model.gpt.GPT.forward")
        handler = signal.signal(
            signal.SIGTERM, signal.default_int_handler
        )  # as in a process of train.py
        assert train("name=a") == 75
        signal.signal(signal.SIGTERM, handler)
    assert summary("a")["status"] == "interrupted"
    assert train("name=a") == 0


@pytest.mark.parametrize("step", [0, 3])
def test_run_whose_output_is_no_longer_read_ends_as_after_a_signal(train, monkeypatch, capfd, step):
    reader, writer = os.pipe()
    evaluate = Evaluator.evaluate

    def close_reader_and_evaluate(evaluator, state, metrics):
        if state.step == step:
            os.close(reader)  # as in train.py | head
        return evaluate(evaluator, state, metrics)

    monkeypatch.setattr(Evaluator, "evaluate", close_reader_and_evaluate)
    handler = signal.signal(signal.SIGTERM, raise_interrupt)  # as in a process of train.py
    try:
        with open(writer, "w", encoding="utf-8") as output, redirect_stdout(output):
            assert train("name=a") == 75
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert summary("a")["status"] == "interrupted"
    error = capfd.readouterr().err
    assert "the output is no longer read" in error
    if step:
        assert "saved at step 4; resume with the same command and name=a" in error
        assert load("a")["step"] == metrics("a")[-1]["step"] == 4


def test_tiny_text_trains_with_the_default_tokenizer(train, workdir):
    (workdir / "poem.txt").write_text(
        "\n".join(
            f"{a} {b}" for a in ("roses", "are", "red", "violets", "blue") for b in "abcdefgh"
        ),
        encoding="utf-8",
    )
    assert train("name=a", "data.path=poem.txt", "tokenizer=bpe", "model.block_size=8") == 0
