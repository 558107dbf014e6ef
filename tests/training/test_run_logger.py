"""What a run prints and logs: progress, evaluations, samples, and results in summary.json."""

import re
from contextlib import chdir

import pytest
from helpers import metrics, summary
from run_helpers import train_in

from common.console import PlainConsole
from training.log import SUMMARY_METRICS


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that prints a line of progress each step, and what it prints."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.console.LINE_INTERVAL_S", 0.0)
        patch.setattr("training.log.FLUSH_INTERVAL_S", 0.0)
        printed = train_in(folder, "name=a", "eval.sample.max_new_tokens=9")
    return folder, printed


@pytest.fixture
def printed(run) -> str:
    return run[1]


@pytest.fixture
def rows(run) -> list[dict]:
    with chdir(run[0]):
        return metrics("a")


@pytest.fixture
def recorded(run) -> dict:
    with chdir(run[0]):
        return summary("a")


@pytest.mark.parametrize("step", [1, 3, 6])
def test_line_of_progress_has_loss_speed_and_remaining_time(printed, rows, step):
    loss = f"{rows[step]['train/loss']:.3f}"
    speed = f"{rows[step]['tokens_per_second']:,.0f}"
    line = rf"^step {step}/6  loss {loss}  {speed} tokens/s  \d:\d\d:\d\d left$"
    assert re.search(line, printed, re.MULTILINE)


def test_line_of_progress_before_the_first_step_has_no_loss(printed):
    assert "\nstep 0/6\n" in printed


def test_run_with_a_time_limit_has_progress_without_a_number_of_steps(workdir, monkeypatch):
    monkeypatch.setattr("common.console.LINE_INTERVAL_S", 0.0)
    settings = ["train.steps=null", "train.minutes=1e-6", "eval.initial=false"]
    assert re.search(r"^step 1( .*)?$", train_in(workdir, "name=a", *settings), re.MULTILINE)


def test_banner_is_printed_before_the_progress_starts(printed):
    """On a terminal, it would otherwise be printed into the progress bar."""
    assert printed.index("run      runs/a") < printed.index("evaluating")


def test_terminal_has_a_progress_bar_until_the_last_step(workdir, monkeypatch):
    monkeypatch.setattr(PlainConsole, "is_terminal", True)
    bar = train_in(workdir, "name=a").rpartition("━")[2]
    loss = metrics("a")[-1]["train/loss"]
    assert f"step 6/6  loss {loss:.3f}  " in bar
    assert " tokens/s" in bar
    assert " left" in bar


@pytest.mark.parametrize("step", [3, 6])
def test_evaluation_prints_its_losses(printed, rows, step):
    loss = f"{rows[step]['val/loss']:.4f}"
    bpb = f"{rows[step]['val/bpb']:.3f}"
    assert f"\nstep {step}: validation loss {loss}, {bpb} bits per byte, the best so far" in printed


def test_initial_weights_are_not_called_the_best(printed):
    (line,) = re.findall(r"^step 0: .*", printed, re.MULTILINE)
    assert "the best" not in line


def test_evaluation_prints_its_sample_with_a_margin(printed, rows):
    first_line = rows[3]["sample"].strip("\n").splitlines()[0]
    assert f"\n  | {first_line}" in printed


@pytest.mark.parametrize("name", sorted(SUMMARY_METRICS))
def test_summary_has_the_newest_value_of_each_metric(recorded, rows, name):
    values = [row[SUMMARY_METRICS[name]] for row in rows if SUMMARY_METRICS[name] in row]
    if name in ("step_ms", "tokens_per_second", "mfu"):
        assert recorded[name] in values[5:]  # the median without warmup
    else:
        assert recorded[name] == (values[-1] if values else None)


def test_summary_has_the_time_of_all_steps(recorded, rows):
    assert recorded["wall_seconds"] == rows[-1]["seconds"]
