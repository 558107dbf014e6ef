"""train.py: the files of a run, and the training loop."""

import math
import re
import time
from contextlib import chdir
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from attention_helpers import IS_OLD_GPU, REQUEST_CUDA, choose, resolve_or_skip
from helpers import ROOT, TINY, load, metrics, run_command, summary
from run_helpers import assert_same_run, train_in, val_losses
from torch.utils._python_dispatch import TorchDispatchMode

from configs.cli import parse_config
from data.loader import Loader
from model.gpt import GPT
from training.optimizer import OPTIMIZERS
from training.presets import choose_preset
from training.speed import Speed

# The files of a run

PEAK = 1e9  # FLOP/s, which are not measured


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with the run a. Tests only read it."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.log.peak_flops", lambda device, dtype: PEAK)
        train_in(folder, "name=a")
    return folder


@pytest.fixture
def rows(finished) -> list[dict]:
    with chdir(finished):
        return metrics("a")


@pytest.fixture
def recorded(finished) -> dict:
    with chdir(finished):
        return summary("a")


def test_run_folder_has_the_documented_files(finished):
    run = finished / "runs/a"
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    checkpoints = {"checkpoints/last.pt", "checkpoints/best.pt"}
    assert files - {".lock"} == checkpoints | {
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "loss.png",
    }


def test_config_yaml_has_the_complete_config(finished):
    with chdir(finished):
        config = asdict(choose_preset(parse_config("train", "", [*TINY, "name=a"])))
    text = (finished / "runs/a/config.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == config


OF_ALL_ROWS = {"step", "tokens", "seconds", "flops"}
OF_STEPS = {"train/loss", "grad_norm", "lr", "step_ms", "tokens_per_second", "mfu"}
OF_EVALUATIONS = {"val/loss", "val/bpb", "peak_memory_bytes"}
OF_SAMPLES = {"sample"}


@pytest.mark.parametrize(
    ("step", "keys"),
    [
        (0, OF_ALL_ROWS | OF_EVALUATIONS),
        (1, OF_ALL_ROWS | OF_STEPS),
        (3, OF_ALL_ROWS | OF_STEPS | OF_EVALUATIONS | OF_SAMPLES),
    ],
    ids=["initial evaluation", "step", "evaluation"],
)
def test_row_has_the_documented_keys(rows, step, keys):
    assert set(rows[step]) == keys


def test_rows_count_tokens_and_flops_of_each_step(rows, recorded):
    for step, row in enumerate(rows):
        assert (row["step"], row["tokens"]) == (step, 64 * step)
        assert row["flops"] == row["tokens"] * recorded["flops_per_token"]


def test_throughput_is_tokens_by_time_and_mfu_is_relative_to_the_peak(rows, recorded):
    for row in rows[1:]:
        assert row["tokens_per_second"] == pytest.approx(1000 * 64 / row["step_ms"])
        flops_per_second = recorded["flops_per_token"] * row["tokens_per_second"]
        assert row["mfu"] == pytest.approx(flops_per_second / PEAK)


def test_summary_has_the_documented_keys(recorded):
    text = (ROOT / "docs/run-folder.md").read_text(encoding="utf-8")
    section = text.partition("\n## summary.json\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert set(recorded) == {key for row in rows for key in re.findall("`(.*?)`", row)}


def test_summary_has_status_kernel_and_best_loss_of_trained_weights(recorded, rows):
    assert (recorded["status"], recorded["step"], recorded["error"]) == ("finished", 6, None)
    kernel = {"requested": "auto", "resolved": "flash", "flash_package": None}
    assert recorded["attention"] == kernel
    assert recorded["tf32"] is False
    losses = {row["val/loss"]: row["step"] for row in rows[1:] if "val/loss" in row}
    assert recorded["best_val_loss"] == min(losses)
    assert recorded["best_step"] == losses[min(losses)]


# The training loop


def test_equal_seeds_give_equal_runs_and_another_seed_another_one(trained, train):
    assert train("name=b") == 0
    assert_same_run("a", "b")
    assert train("name=c", "seed=2") == 0
    assert metrics("a")[1]["train/loss"] != metrics("c")[1]["train/loss"]


def assert_close_losses(a: str, b: str, key: str = "train/loss", tolerance: float = 1e-5) -> None:
    for one, two in zip(metrics(a), metrics(b), strict=True):
        assert one.get(key) == pytest.approx(two.get(key), abs=tolerance), one["step"]


@pytest.mark.parametrize(("size", "accumulation"), [(1, 4), (2, 2)])
def test_micro_batches_do_not_change_the_losses(trained, train, size, accumulation):
    assert train("name=b", f"train.micro_batch_size={size}") == 0
    assert summary("b")["accumulation"] == accumulation
    assert_close_losses("a", "b")
    assert_close_losses("a", "b", "val/loss")


def test_each_forward_pass_of_training_has_another_dropout_mask(train, monkeypatch):
    """Of embeddings, attention and MLP, but not of evaluations."""
    masks = []
    dropout = torch.nn.functional.dropout

    def record_and_drop(x, p, training):
        y = dropout(x, p, training)
        if training:
            masks.append((y == 0).numpy().tobytes())
        return y

    monkeypatch.setattr(torch.nn.functional, "dropout", record_and_drop)
    assert train("name=a", "device=cpu", "model.dropout=0.1", "train.micro_batch_size=2") == 0
    assert len(masks) == 12 * 5
    assert len(set(masks)) == len(masks)


def test_gradients_are_clipped_and_their_norm_before_clipping_is_logged(train):
    """Much smaller gradients than eps: AdamW hardly changes the weights."""
    settings = ["optimizer=adamw", "optimizer.eps=1e-3", "schedule.warmup_steps=0"]
    assert train("name=a", "train.grad_clip=1e-6", *settings) == 0
    losses = val_losses("a")
    assert losses[6] == pytest.approx(losses[0], abs=1e-3)
    assert metrics("a")[1]["grad_norm"] > 0.01


def test_learning_rate_of_each_step_is_logged(train):
    settings = ["schedule=linear", "schedule.warmup_steps=1", "optimizer.lr=0.1"]
    assert train("name=a", "train.steps=5", *settings) == 0
    rates = [row["lr"] for row in metrics("a")[1:]]
    assert rates == pytest.approx([0.05, 0.1, 0.075, 0.05, 0.025])


def test_learning_rate_of_the_schedule_is_applied(train):
    """Half of 0.2 in the warmup is 0.1."""
    settings = ["train.steps=1", "optimizer=adamw"]
    assert train("name=a", *settings, "optimizer.lr=0.1", "schedule.warmup_steps=0") == 0
    assert train("name=b", *settings, "optimizer.lr=0.2", "schedule.warmup_steps=1") == 0
    torch.testing.assert_close(load("a")["model"], load("b")["model"])


def test_time_limit_ends_a_run_after_a_decay_and_with_an_evaluation(train, monkeypatch):
    """A limit of 500 minutes. Each step takes 1,000 seconds."""
    steps = []
    start_step = Speed.start_step
    perf_counter = time.perf_counter

    def count_step(speed):
        steps.append(1)
        start_step(speed)

    monkeypatch.setattr(Speed, "start_step", count_step)
    monkeypatch.setattr(time, "perf_counter", lambda: perf_counter() + 1000 * len(steps))
    settings = ["train.steps=null", "train.minutes=500", "eval.every=1000000"]
    assert train("name=a", *settings) == 0
    rows = metrics("a")
    assert len(rows) == 31
    assert rows[-1]["seconds"] >= 30_000
    assert "val/loss" in rows[-1]
    rates = [row["lr"] for row in rows[11:]]  # after the warmup
    assert rates == sorted(rates, reverse=True)
    assert 0 <= rates[-1] < rates[0] / 10


class WaitIsAnError(TorchDispatchMode):
    """If `active`, operations raise whose result the host needs.

    On CUDA, PyTorch finds all of them.
    """

    active = False
    waiting = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        indices = args[1] if function.name() == "aten::index.Tensor" else []
        has_mask = any(i is not None and i.dtype == torch.bool for i in indices)
        waits = has_mask or function.name() in self.waiting
        assert not (waits and self.active), f"{function.name()} waits for the GPU"
        return function(*args, **(kwargs or {}))

    def set_active(self, active: bool) -> None:
        self.active = active
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error" if active else "default")


@pytest.fixture
def wait_is_an_error(monkeypatch):
    """From the first batch to the end of a step or a validation, waiting is an error."""
    mode = WaitIsAnError()
    read_batch = Loader.batch
    end_step = Speed.end_step
    set_training = GPT.train

    def read_batch_and_start(*args):
        batch = read_batch(*args)
        mode.set_active(True)
        return batch

    def stop_and_end_step(speed):
        mode.set_active(False)
        return end_step(speed)

    def stop_and_set_training(*args):  # called before the first window and after the last one
        mode.set_active(False)
        return set_training(*args)

    monkeypatch.setattr(Loader, "batch", read_batch_and_start)
    monkeypatch.setattr(Speed, "end_step", stop_and_end_step)
    monkeypatch.setattr(GPT, "train", stop_and_set_training)
    with mode:
        yield
    mode.set_active(False)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_step_and_no_validation_window_waits_for_the_gpu(
    train, wait_is_an_error, device, optimizer
):
    settings = [f"device={device}", f"optimizer={optimizer}", "compile=false"]
    assert train("name=a", "model.window=8", "train.micro_batch_size=2", *settings) == 0


# Precision, kernels and compilation


def test_bfloat16_learns_as_much_as_float32(train):
    for dtype in ("float32", "bfloat16"):
        settings = ["train.steps=30", "eval.every=30", "eval.windows=null"]
        assert train(f"name={dtype}", f"dtype={dtype}", *settings) == 0
    for a, b in zip(metrics("float32")[1:4], metrics("bfloat16")[1:4], strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=0.02)
    single, half = val_losses("float32"), val_losses("bfloat16")
    assert single[30] < single[0] - 0.5
    assert half[30] == pytest.approx(single[30], abs=0.03)
    assert summary("bfloat16")["dtype"] == "bfloat16"
    assert {weight.dtype for weight in load("bfloat16")["model"].values()} == {torch.float32}


@pytest.mark.compiles
@pytest.mark.slow
def test_compilation_changes_neither_losses_nor_names(train):
    for name, compiles in (("a", "false"), ("b", "true")):
        words = ["attention=naive", f"compile={compiles}", "model.n_layer=1", "train.steps=3"]
        assert train(f"name={name}", *words) == 0
    assert_close_losses("a", "b")
    assert set(load("a")["model"]) == set(load("b")["model"])
    # the settings are a part of the key of the compile cache
    config = "AttentionConfig(backend='naive', kernels=None, flash_package=None)"
    assert torch.compiler.config.cache_key_tag == config


# GPUs


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
    half, single = val_losses("half"), val_losses("single")
    assert load("half")["scaler"]["scale"] > 0
    assert half[60] < half[0] - 0.3
    assert half[60] == pytest.approx(single[60], abs=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.compiles)])
@pytest.mark.parametrize("backend", ["naive", "sdpa", "flash"])
def test_run_on_cuda_resumes_and_can_be_sampled(train, sample, backend, compiles):
    """By default, it is compiled and in bfloat16."""
    resolve_or_skip(choose(backend), REQUEST_CUDA)
    settings = ["name=a", "device=cuda", "dtype=auto", f"attention={backend}"]
    settings += ["model.n_embd=64", "schedule.warmup_steps=100"]
    settings += [] if compiles else ["compile=false"]
    assert train(*settings) == 0
    assert train(*settings, "train.steps=12") == 0
    assert [row["step"] for row in metrics("a")] == list(range(13))
    recorded = summary("a")
    assert (recorded["device"], recorded["compile"]) == ("cuda", compiles)
    assert recorded["dtype"] == ("float32" if IS_OLD_GPU else "bfloat16")
    assert sample("run=a", "device=cuda", "prompt=The 1", "max_new_tokens=5").startswith("The 1")


def test_epochs_end_a_run_when_each_window_has_been_read_so_often(workdir):
    words = ["train.steps=null", "train.epochs=1.5", "train.batch_size=64"]
    printed = train_in(workdir, "name=a", *words)
    windows = -(-int(re.search(r"([\d,]+) training tokens", printed)[1].replace(",", "")) // 16)
    assert "training for 1.5 epochs of 64 x 16" in printed
    assert metrics("a")[-1]["step"] == math.ceil(1.5 * windows / 64)


def test_run_with_minutes_keeps_its_preset_when_it_resumes(workdir, monkeypatch, capsys):
    words = ["data.path=text.txt", "name=a", "wandb.mode=disabled"]
    words += ["eval.every=1000000", "eval.windows=4", "eval.sample.max_new_tokens=0"]
    words += ["model.n_layer=1", "model.n_head=1", "model.n_embd=16", "model.ngram_table_size=64"]
    assert run_command("train", *words, "train.minutes=1e-6") == 0
    first = yaml.safe_load(Path("runs/a/config.yaml").read_text(encoding="utf-8"))
    assert f"preset   {first['preset']}, for " in capsys.readouterr().out
    monkeypatch.setattr("training.presets.measure_speed", lambda *_: 1e18)  # of another machine
    assert run_command("train", *words, "train.minutes=10") == 0
    second = yaml.safe_load(Path("runs/a/config.yaml").read_text(encoding="utf-8"))
    assert second["preset"] == first["preset"]
    assert second["tokenizer"] == first["tokenizer"]
    assert "resumed from step" in capsys.readouterr().out
