"""The first and the last lines of a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.cli import parse_config
from model import GPTConfig
from training.banner import (
    describe_finished_run,
    describe_model,
    format_banner,
    format_epochs,
    format_summary,
    print_report,
)
from training.config import RunConfig, TrainConfig
from training.schedule import ScheduleConfig
from training.train_state import TrainState

SUMMARY = {
    "step": 0,
    "n_params": 12_345,
    "device_name": "a processor, 2 cores",
    "dtype": "float32",
    "compile": False,
    "world_size": 1,
    "attention": {"requested": "sdpa", "resolved": "flash"},
    "accumulation": 1,
    "micro_batch_size": 16,
}
META = {
    "vocab_size": 300,
    "tokenizer": {"name": "bpe"},
    "tokens": {"train": 16_000, "val": 2_000},
    "bytes": {"train": 40_000, "val": 4_000},
}


@pytest.fixture
def config() -> RunConfig:
    """16 x 128 tokens a step, for 1,000 steps."""
    return RunConfig(model=GPTConfig(block_size=128, max_ngram=1))


def banner(config: RunConfig, **changed) -> str:
    run = SimpleNamespace(folder=Path("runs/a"), summary=SUMMARY | changed)
    return format_banner(config, run, META)


@pytest.mark.parametrize(
    "part",
    [
        "run      runs/a\n",
        "python_stdlib, 16,000 training tokens and 2,000 validation tokens",
        "bpe vocabulary of 300",
        "12,345 parameters",
        "a processor, 2 cores, float32, attention sdpa -> flash",
        "training for 1,000 steps of 16 x 128 = 2,048 tokens, 128 epochs",
    ],
    ids=["folder", "data", "vocabulary", "model", "device", "length"],
)
def test_banner_has(config, part):
    assert part in banner(config)


def test_banner_has_the_step_from_which_a_run_resumes(config):
    assert "runs/a, resumed from step 1,200\n" in banner(config, step=1200)


def test_banner_has_the_text_that_replaces_a_named_one():
    words = ["experiment=shakespeare_char_cpu_fast", "data.path=mine.txt"]
    assert "data     mine, 16,000 training" in banner(parse_config("train", "", words))


def test_banner_has_the_preset(config):
    config.preset = "100kB"
    assert "preset   100kB, for 44 kB of text\n" in banner(config)


def test_banner_has_the_size_of_the_ngram_table(config):
    config.model.max_ngram = 3
    config.model.ngram_table_size = 1000
    config.model.n_embd = 64
    assert " parameters, and an n-gram table of 64,000" in banner(config)


@pytest.mark.parametrize(("step", "expected"), [(0, True), (3, False)], ids=["new", "resumed"])
def test_banner_of_a_new_run_has_its_initial_weights(config, step, expected):
    config.train.init_from = "run:b"
    assert ("starting from run:b" in banner(config, step=step)) is expected


def test_banner_says_that_compiling_takes_a_minute(config):
    assert "compiled (can take a minute)" in banner(config, compile=True)
    assert "compiled" not in banner(config)


def test_banner_has_the_number_of_processes(config):
    config.parallel = "fsdp"
    assert "4 processes with fsdp" in banner(config, world_size=4)
    assert "processes" not in banner(config)


@pytest.mark.parametrize(
    ("steps", "minutes", "expected"),
    [
        (1, None, "training for 1 step of"),
        (None, 2.5, "training for 2.5 minutes of"),
        (9, 3, "training for 9 steps or 3 minutes of"),
    ],
    ids=["steps", "minutes", "both"],
)
def test_banner_has_the_limits_of_a_run(config, steps, minutes, expected):
    config.train.steps = steps
    config.train.minutes = minutes
    assert expected in banner(config)


def test_banner_of_a_run_with_a_time_limit_has_no_epochs(config):
    config.train.steps = None
    config.train.minutes = 3
    assert "epochs" not in banner(config)


def test_banner_has_the_micro_batches(config):
    printed = banner(config, accumulation=4, micro_batch_size=1)
    assert "2,048 tokens, 4 micro batches of 1 sequence, " in printed


@pytest.mark.parametrize(
    ("n_kv_head", "expected"),
    [
        (None, "1 layer, 4 heads, 64 channels, context 8"),
        (2, "1 layer, 4 heads (2 key/value), 64 channels, context 8"),
    ],
    ids=["equal", "grouped"],
)
def test_model_is_described_by_its_size(n_kv_head, expected):
    model = GPTConfig(n_layer=1, n_head=4, n_kv_head=n_kv_head, n_embd=64, block_size=8)
    assert describe_model(model) == expected


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [(0.2512, "0.25 epochs"), (9.96, "10 epochs"), (1234.5, "1,234 epochs")],
    ids=str,
)
def test_epochs_are_formatted(epochs, expected):
    assert format_epochs(epochs) == expected


# The last lines


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"steps": 9}, "set a larger train.steps, or another name"),
        ({"steps": None, "minutes": 1}, "set a larger train.minutes, or another name"),
        ({"steps": 9, "minutes": 1}, "set a larger train.steps and train.minutes, or another"),
        ({"steps": 99, "patience": 2}, "set a larger train.patience, or another name"),
    ],
    ids=["steps", "minutes", "both", "patience"],
)
def test_finished_run_names_the_settings_that_ended_it(settings, advice):
    config = TrainConfig(**settings)
    state = TrainState(
        config, ScheduleConfig(), None, [], None, step=9, seconds=60.0, evals_since_best=2
    )
    printed = describe_finished_run(SimpleNamespace(folder=Path("runs/a")), state)
    assert printed.startswith("runs/a is finished at step 9; ")
    assert advice in printed


def test_finished_run_that_had_no_time_for_teachers_needs_minutes():
    """More steps would let its model memorize the text."""
    config = TrainConfig(steps=9, minutes=1, n_teachers=8)
    state = TrainState(config, ScheduleConfig(), None, [], None, step=9, seconds=30.0)
    state.planned_teachers = 0
    printed = describe_finished_run(SimpleNamespace(folder=Path("runs/a")), state)
    assert "set a larger train.minutes, or another name" in printed


RESULTS = {
    "name": "a",
    "step": 6,
    "best_step": 6,
    "best_val_loss": 1.23456,
    "best_val_bpb": 2.3456,
    "last_val_loss": 1.5,
    "wall_seconds": 90.0,
    "tokens_per_second": 1234.5,
}


@pytest.mark.parametrize(
    "part",
    [
        "best validation loss 1.2346, 2.346 bits per byte, at step 6; 6 steps in 0:01:30",
        "1,234 tokens/s",
        "runs/a/checkpoints/best.pt",
        "runs/a/loss.png",
        "sample.py run=a",
    ],
    ids=["losses", "speed", "checkpoint", "curve", "next command"],
)
def test_last_lines_have(part):
    assert part in format_summary(RESULTS, Path("runs/a"))


def test_last_loss_is_printed_if_it_is_not_the_best():
    printed = format_summary(RESULTS | {"best_step": 3}, Path("runs/a"))
    assert "at step 3; last 1.5000; 6 steps" in printed


def report(is_main: bool, **changed) -> None:
    summary = RESULTS | {"status": "finished"} | changed
    print_report(SimpleNamespace(is_main=is_main, folder=Path("runs/a"), summary=summary))


def test_report_of_an_interrupted_run_says_how_it_resumes(capsys):
    report(True, status="interrupted", error="saved at step 3")
    assert capsys.readouterr().err == "train.py: saved at step 3\n"


@pytest.mark.parametrize("is_main", [True, False])
def test_only_rank_0_reports(capsys, is_main):
    report(is_main)
    assert ("best validation loss" in capsys.readouterr().out) is is_main
