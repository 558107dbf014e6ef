"""The folder of a run: lock, config.yaml and summary.json, and runs that are refused."""

import json
import math
from pathlib import Path

import pytest
import yaml
from data_helpers import write_file
from helpers import TEXT, summary

from common.errors import TrainingFailed, UserError
from configs.cli import parse_config
from training.config import RunConfig, TrainConfig
from training.run_folder import RunFolder, summary_key
from training.runtime import Dist
from training.schedule import ScheduleConfig
from training.train_state import TrainState


def open_folder(name: str | None = "a", resume: bool = True) -> RunFolder:
    return RunFolder(RunConfig(name=name, resume=resume), Dist())


def test_run_in_use_is_refused(workdir):
    message = "runs/a is being trained by another process; wait, or set another name"
    with open_folder(), pytest.raises(UserError, match=message):
        open_folder()


def test_run_is_unlocked_after_an_error(workdir):
    with pytest.raises(ZeroDivisionError), open_folder() as run:
        run.start({}, {})
        raise ZeroDivisionError
    with open_folder():
        pass


@pytest.mark.parametrize("file", ["config.yaml", "checkpoints/last.pt", "attention/step-1.png"])
def test_partial_files_of_a_killed_process_are_removed(workdir, file):
    partial = Path(write_file(f"runs/a/{file}.1.partial", ""))
    with open_folder():
        assert not partial.exists()


def test_unnamed_run_is_named_after_data_model_and_attention(workdir):
    config = RunConfig()
    config.data.name = "novel"
    config.model.name = "small"
    config.attention.backend = "naive"
    with RunFolder(config, Dist()) as run:
        assert run.name.endswith("-novel-small-naive")


def test_unnamed_run_is_named_after_the_text_that_replaces_a_named_one(workdir):
    words = ["experiment=shakespeare_char_cpu_fast", "data.path=mine.txt"]
    with RunFolder(parse_config("train", "", words), Dist()) as run:
        assert run.name.endswith("-mine-modern-auto")


def test_config_is_written_as_yaml(workdir):
    with open_folder() as run:
        run.start({"seed": 1, "data": {"path": "été.txt"}}, {})
    text = Path("runs/a/config.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == {"seed": 1, "data": {"path": "été.txt"}}


def make_state(**fields) -> TrainState:
    return TrainState(TrainConfig(steps=9), ScheduleConfig(), None, [], None, **fields)


@pytest.mark.parametrize(
    ("stopped", "status", "error"),
    [
        (False, "finished", None),
        (True, "interrupted", "saved at step 3; resume with the same command and name=a"),
    ],
    ids=["finished", "interrupted"],
)
def test_summary_records_how_the_loop_ended(workdir, stopped, status, error):
    with open_folder() as run:
        run.start({}, {})
        run.end(make_state(step=3, stopped=stopped))
    assert (summary("a")["status"], summary("a")["error"]) == (status, error)


def test_end_of_an_interrupted_run_is_one_write(workdir, monkeypatch):
    """A kill between two writes must not leave the run as finished."""
    with open_folder() as run:
        run.start({}, {})
        statuses = []
        monkeypatch.setattr(
            "training.run_folder.write_json",
            lambda path, content: statuses.append(content["status"]),
        )
        run.end(make_state(step=3, stopped=True))
    assert statuses == ["interrupted"]


@pytest.mark.parametrize(
    ("status", "step", "expected"),
    [("finished", 9, True), ("finished", 3, False), ("running", 9, False)],
    ids=["finished", "raised limit", "killed at the end"],
)
def test_run_is_finished_until_a_limit_is_raised(workdir, status, step, expected):
    write_file("runs/a/checkpoints/last.pt", "")
    write_file("runs/a/summary.json", json.dumps({"status": status, "step": step}))
    with open_folder() as run:
        assert run.is_finished(make_state(step=step)) is expected


@pytest.mark.parametrize(
    ("name", "key"), [("val/loss", "last_val_loss"), ("grad_norm", "grad_norm")]
)
def test_metrics_have_a_name_in_the_summary(name, key):
    assert summary_key(name) == key


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("no"), "refused", "no"),
        (TrainingFailed("nan"), "failed", "nan"),
        (KeyboardInterrupt("saved"), "interrupted", "saved"),
        (ValueError("odd"), "failed", "ValueError: odd"),
    ],
    ids=repr,
)
def test_summary_records_the_error_that_ended_a_run(workdir, error, status, message):
    with pytest.raises(type(error)), open_folder() as run:
        run.start({}, {})
        raise error
    assert (summary("a")["status"], summary("a")["error"]) == (status, message)


def test_infinite_results_become_null_because_json_has_no_infinity(workdir):
    with open_folder() as run:
        run.start({}, {"best_val_loss": math.inf, "mfu": math.nan, "step": 2})
    recorded = summary("a")
    assert [recorded[key] for key in ("best_val_loss", "mfu", "step")] == [None, None, 2]


def test_existing_run_is_refused_without_resume(workdir):
    with open_folder() as run:
        run.start({}, {})
    with pytest.raises(UserError, match="runs/a exists; set another name, or resume=true"):
        open_folder(resume=False)


@pytest.mark.parametrize("content", ["null", "[1]", '{"sta'])
def test_damaged_summary_is_refused(workdir, content):
    write_file("runs/a/summary.json", content)
    with pytest.raises(UserError, match=r"runs/a/summary.json cannot be read .* restore it"):
        open_folder()


# Runs that are refused after their folder was opened


@pytest.fixture
def texts(workdir) -> None:
    """A document that is too short, and a document with a character that text.txt lacks."""
    (workdir / "short.txt").write_text("The 7th line", encoding="utf-8")
    (workdir / "other.txt").write_text(TEXT + "日本", encoding="utf-8")


REFUSED = {
    "text too short": (["data.path=short.txt"], "use a longer text"),
    "unknown character": (
        ["data.path=other.txt", "tokenizer=run", "tokenizer.run=a"],
        "'日'",
    ),
    "tokenizer of no run": (
        ["tokenizer=run", "tokenizer.run=none"],
        "run=none has no checkpoint",
    ),
    "weights of no run": (
        ["tokenizer=byte", "train.init_from=run:none"],
        "run=none has no checkpoint",
    ),
    "weights of another model": (
        ["tokenizer=run", "tokenizer.run=a", "train.init_from=run:a", "model.n_layer=1"],
        "set model.n_layer=2",
    ),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_run_leaves_no_folder(trained, texts, train, capsys, words, message):
    assert train("name=b", *words) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in Path("runs").iterdir()] == ["a"]


def test_first_run_that_is_refused_leaves_no_folder_of_runs_and_can_start_again(train, texts):
    assert train("name=b", "data.path=short.txt") == 2
    assert not Path("runs").exists()
    assert train("name=b") == 0


def test_refused_job_of_a_sweep_leaves_its_log(train, texts):
    log = Path(write_file("runs/sweeps/s/seed=1/train.log", "refused"))
    assert train("name=sweeps/s/seed=1", "data.path=short.txt") == 2
    assert list(log.parent.iterdir()) == [log]


def test_run_that_is_interrupted_before_its_start_leaves_no_folder(train, monkeypatch):
    """Such as by Ctrl-C while the data is prepared."""

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("train.build_data", interrupt)
    assert train("name=b") == 75
    assert not Path("runs").exists()
