"""Runs that stop and continue: extended, refused, killed and interrupted.

A resumed run is compared with a run without interruption.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
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
from run_helpers import (
    assert_same_run,
    copy_here,
    read_files,
    restored_signal_handlers,
    run_in,
    train_in,
)

from common.process import raise_interrupt
from training.evaluate import Evaluator

WARMUP = "schedule.warmup_steps=100"  # the learning rates do not depend on the length of a run


def list_checkpoints(name: str) -> set[str]:
    return {path.stem for path in Path(f"runs/{name}/checkpoints").glob("*.pt")}


# Runs that finish, and continue


@pytest.mark.parametrize(
    ("optimizer", "dtype"), [("adamw", "float32"), ("muon", "float32"), ("muon", "bfloat16")]
)
def test_extended_run_is_bit_identical_to_a_longer_run(train, optimizer, dtype):
    """With dropout."""
    settings = [f"optimizer={optimizer}", f"dtype={dtype}", "model.dropout=0.1", WARMUP]
    assert train("name=whole", "train.steps=9", *settings) == 0
    assert train("name=parts", *settings) == 0
    assert train("name=parts", "train.steps=9", *settings) == 0
    assert_same_run("whole", "parts")


def test_resumed_run_prints_its_step(trained, train, capsys):
    assert train("name=a", "train.steps=9") == 0
    assert "runs/a, resumed from step 6" in capsys.readouterr().out


def test_finished_run_does_not_train_again(trained, train, capsys):
    before = read_files(Path("runs/a"))
    assert train("name=a") == 0
    assert "runs/a is finished at step 6; set a larger train.steps" in capsys.readouterr().out
    assert read_files(Path("runs/a")) == before


def test_command_of_each_process_is_recorded(trained, train, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "name=a", "train.steps=7"])
    assert train("name=a", "train.steps=7") == 0
    assert summary("a")["command"] == "python train.py name=a train.steps=7"


@pytest.mark.parametrize("status", ["running", None], ids=["old summary", "no summary"])
def test_run_that_was_killed_at_its_end_gets_the_results_of_its_last_checkpoint(
    trained, train, status
):
    before = summary("a")
    Path("runs/a/summary.json").unlink()
    Path("runs/a/loss.png").unlink()
    if status is not None:
        results = "step|loss|bpb|wall_seconds|mfu|peak|tokens_per"
        wrong = {key: 9 for key in before if re.search(results, key)}
        text = json.dumps(before | wrong | {"status": status})
        Path("runs/a/summary.json").write_text(text, encoding="utf-8")
    assert train("name=a") == 0
    # the speed is of the last step, and no median
    last = {key: metrics("a")[-1][key] for key in ("step_ms", "tokens_per_second", "mfu")}
    new = {key: summary("a")[key] for key in ("command", "wandb_id", "peak_flops")}
    assert summary("a") == before | last | new
    assert Path("runs/a/loss.png").exists()


# Runs that are refused


@pytest.fixture
def refuse(trained, train, capsys):
    """refuse("seed=2") continues the run a, which is refused. Returns the error."""

    def train_and_compare(*words: str) -> str:
        before = read_files(Path("runs"))
        capsys.readouterr()
        assert train("name=a", "train.steps=9", *words) == 2
        assert read_files(Path("runs")) == before
        return capsys.readouterr().err

    return train_and_compare


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.n_layer=1", "model.n_layer=2 (now 1)"),
        ("tokenizer=byte", "tokenizer.name=char (now byte)"),
        ("data.val_fraction=0.2", "with data.val_fraction=0.1 (now 0.2);"),
        ("optimizer=adamw", "optimizer.name=muon (now adamw)"),
        ("train.batch_size=8", "train.batch_size=4 (now 8)"),
        ("seed=2", "seed=1337 (now 2)"),
        ("resume=false", "runs/a exists; set another name"),
        ("train.steps=5", "set train.steps=6 or more"),
    ],
)
def test_run_with_other_settings_is_refused_and_changes_no_file(refuse, word, message):
    assert message in refuse(word)


def test_run_with_another_text_is_refused_and_changes_no_file(refuse):
    Path("text.txt").write_text(TEXT + "the end", encoding="utf-8")
    assert "was trained with another text than text.txt has now" in refuse()


def test_run_with_a_missing_row_of_metrics_is_refused_and_changes_no_file(refuse):
    file = Path("runs/a/metrics.jsonl")
    rows = file.read_bytes()
    file.write_bytes(rows[: len(rows) // 2])
    assert "metrics.jsonl has no row of step" in refuse()


def test_run_that_has_lost_its_last_checkpoint_is_refused_and_changes_no_file(refuse):
    Path("runs/a/checkpoints/last.pt").unlink()
    error = refuse()
    assert "runs/a/checkpoints/last.pt is missing" in error
    assert "set another name" in error


def test_run_continues_from_a_copy_of_best_without_optimizer_state(trained, train, capsys):
    shutil.copy("runs/a/checkpoints/best.pt", "runs/a/checkpoints/last.pt")
    assert train("name=a", "train.steps=9") == 0
    assert "has no optimizer state" in capsys.readouterr().out


# Runs that fail, and runs that return to an older checkpoint


SETTINGS = ["optimizer=adamw", WARMUP, "checkpoint.every=2", "train.steps=12"]
DIVERGING = ["optimizer.lr=1e9", "train.grad_clip=null", "optimizer.weight_decay=0"]


@pytest.fixture(scope="module")
def diverged_folder(tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder with a run "whole", and a run "a" that has diverged after step 7.

    Also what two processes have printed: the diverging process, and the next one.
    """
    folder = tmp_path_factory.mktemp("diverged")
    train_in(folder, "name=whole", *SETTINGS)
    keep = [*SETTINGS, "name=a", "checkpoint.keep=2"]
    train_in(folder, *keep, "train.steps=7")
    printed = []
    for words in ([*DIVERGING, "checkpoint.every=1"], []):
        code, output = run_in(folder, *keep, *words)
        assert code == 1
        printed.append(output)
    return folder, printed


@pytest.fixture
def diverged(diverged_folder, workdir) -> list[str]:
    """What the two processes have printed. The current folder has a copy."""
    folder, printed = diverged_folder
    copy_here(folder)
    return printed


def test_diverged_run_is_recorded_as_failed(diverged):
    assert summary("a")["status"] == "failed"


def test_diverged_run_does_not_save_weights_that_are_not_finite(diverged):
    assert torch.isfinite(load("a")["model"]["wte.weight"]).all()


def test_diverged_run_says_what_to_lower(diverged):
    assert "Lower optimizer.lr, then run the command again" in diverged[0]


def test_run_with_too_large_weights_says_what_to_copy(diverged):
    """They are finite, but their loss is not."""
    assert "copy an older checkpoint over last.pt" in diverged[1]


def copy_over_last(checkpoint: str) -> None:
    folder = Path("runs/a/checkpoints")
    shutil.copy(folder / f"{checkpoint}.pt", folder / "last.pt")


def test_run_that_returns_to_an_older_checkpoint_is_bit_identical(diverged, train):
    copy_over_last("step-000006")
    assert train("name=a", *SETTINGS) == 0
    assert_same_run("whole", "a")


@pytest.fixture(scope="module")
def returned_folder(tmp_path_factory, folder_with_a_run) -> Path:
    """A run with all checkpoints until step 9 that has returned to step 6, and ended at step 8.

    Its losses after step 6 are higher.
    """
    folder = tmp_path_factory.mktemp("returned")
    shutil.copytree(folder_with_a_run, folder, dirs_exist_ok=True)
    settings = ["name=a", "checkpoint.every=1", "eval.attention_maps=true"]
    train_in(folder, *settings, "train.steps=9", "checkpoint.keep=9")
    with chdir(folder):
        assert summary("a")["best_step"] == 9
        copy_over_last("step-000006")
    worse = ["optimizer.lr=9", "optimizer.weight_decay=0"]
    train_in(folder, *settings, *worse, "train.steps=8", "checkpoint.keep=2")
    return folder


@pytest.fixture
def returned(returned_folder, monkeypatch) -> None:
    monkeypatch.chdir(returned_folder)


def test_return_removes_checkpoints_of_later_steps(returned):
    assert list_checkpoints("a") == {"best", "last", "step-000006", "step-000007"}


def test_return_removes_attention_maps_of_later_steps(returned):
    assert [path.stem for path in Path("runs/a/attention").iterdir()] == ["step-000008"]


def test_return_removes_rows_of_later_steps(returned):
    assert [row["step"] for row in metrics("a")] == list(range(9))


def test_return_writes_the_best_checkpoint_again(returned):
    best = load("a", "best")
    assert best["step"] == summary("a")["best_step"] == 6
    assert best["best_val_loss"] == summary("a")["best_val_loss"] == metrics("a")[6]["val/loss"]


def test_return_to_the_step_at_which_the_run_ends_now_removes_later_steps(trained, train):
    assert train("name=a", "train.steps=9", "checkpoint.keep=9") == 0
    copy_over_last("step-000006")
    assert train("name=a", "train.steps=6") == 0
    assert metrics("a")[-1]["step"] == 6
    assert summary("a")["step"] == 6
    assert load("a", "best")["step"] == summary("a")["best_step"] == 6


@pytest.fixture(scope="module", params=[0, 2], ids=["keep=0", "keep=2"])
def full_disk(request, tmp_path_factory, folder_with_a_run) -> tuple[Path, str, str]:
    """A folder with a run that could not save step 8, the file that failed, and the output."""
    keep = request.param
    folder = tmp_path_factory.mktemp("full")
    shutil.copytree(folder_with_a_run, folder, dirs_exist_ok=True)
    settings = ["name=a", "train.steps=9", "checkpoint.every=8", f"checkpoint.keep={keep}"]
    with file_size_limit(70_000):
        code, printed = run_in(folder, *settings)
    assert code == 1
    return folder, "step-000006.pt" if keep else "last.pt", printed


def test_full_disk_is_reported_with_the_file(full_disk):
    _, file, printed = full_disk
    assert f"runs/a/checkpoints/{file}: File too large; free some disk space" in printed


def test_full_disk_is_recorded(full_disk):
    folder, file, _ = full_disk
    with chdir(folder):
        assert summary("a")["status"] == "failed"
        assert file in summary("a")["error"]


def test_full_disk_leaves_the_last_checkpoint_and_no_partial_file(full_disk):
    with chdir(full_disk[0]):
        assert load("a")["step"] == 6
        files = {path.name for path in Path("runs/a/checkpoints").iterdir()}
    assert files == {"best.pt", "last.pt"}


def test_run_continues_after_a_full_disk(full_disk, train):
    copy_here(full_disk[0])
    assert train("name=a", "train.steps=9") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rows_and_files_are_on_the_disk_before_a_checkpoint_replaces_the_previous_one(
    train, monkeypatch
):
    names = []
    fsync = os.fsync
    replace = os.replace

    def record_and_sync(descriptor):
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def record_and_replace(source, path):
        names.append(f"{Path(path).name} replaced")
        replace(source, path)

    monkeypatch.setattr(os, "fsync", record_and_sync)
    monkeypatch.setattr(os, "replace", record_and_replace)
    assert train("name=a", "train.steps=1", "eval.every=9") == 0
    (written,) = [i for i, name in enumerate(names) if name.startswith("last.pt.")]
    replaced = names.index("last.pt replaced")
    order = [names.index("metrics.jsonl"), names.index("best.pt replaced"), written, replaced]
    assert order == sorted(order), names
    assert "checkpoints" in names[replaced:], "the folder, too"


# Killed runs

LONG = [
    "train.steps=240",
    "eval.every=40",
    "checkpoint.every=15",
    "model.dropout=0.1",
    "optimizer=muon",
]
ENDLESS = [*LONG, "train.steps=100000"]


def spawn(*overrides: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *TINY, *overrides],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen) -> None:
    _, error = process.communicate(timeout=600)
    assert process.returncode == 0, error


@pytest.mark.slow
def test_killed_and_resumed_run_is_bit_identical(workdir):
    finish(spawn("name=whole", *LONG))
    for step in (25, 150):
        process = spawn("name=killed", *LONG)
        wait_for_step("killed", step, process)
        assert process.poll() is None
        process.kill()
        process.communicate()
    finish(spawn("name=killed", *LONG))
    assert [row["step"] for row in metrics("killed")] == list(range(241))
    assert_same_run("whole", "killed")


@dataclass
class TracedRun:
    """A process that has trained a run."""

    temporary: Path  # its $TMPDIR
    imported: set[str]  # modules
    printed: str


@pytest.fixture(scope="module", params=[False, True], ids=["new", "resumed"])
def traced(request, tmp_path_factory) -> TracedRun:
    folder = tmp_path_factory.mktemp("traced")
    temporary = tmp_path_factory.mktemp("temporary")
    train_in(folder, "name=prepared", "train.steps=1")
    if request.param:
        train_in(folder, "name=a", "train.steps=3")
    command = [sys.executable, "-X", "importtime", ROOT / "train.py", *TINY]
    done = subprocess.run(
        [*command, "wandb.mode=offline", "name=a"],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(temporary)},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert ("resumed from step 3" in done.stdout) == request.param
    imported = set(re.findall(r"\S+$", done.stderr, re.MULTILINE))
    return TracedRun(temporary, imported, done.stdout)


@pytest.mark.slow
def test_run_leaves_no_temporary_files(traced):
    assert not list(traced.temporary.iterdir())


@pytest.mark.slow
def test_run_imports_neither_the_compiler_nor_wandb(traced):
    """Importing them takes seconds. Another process imports wandb."""
    assert "torch" in traced.imported
    assert not traced.imported & {"torch._dynamo", "sympy", "wandb"}


# Signals


@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signal_during_imports_is_reported(workdir, signal_name):
    """C code of numpy and torch ignores exceptions that are raised while it imports a module."""
    lines = ["import os, signal", "try:", f"    os.kill(os.getpid(), signal.{signal_name})"]
    lines += ["except BaseException:", "    pass"]
    (workdir / "torch.py").write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, ROOT / "train.py", *TINY]
    environment = os.environ | {"PYTHONPATH": "."}
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (75, "", "train.py: interrupted\n")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> tuple[Path, int, str]:
    """The folder, exit code and stderr of a process that got SIGTERM after some steps."""
    folder = tmp_path_factory.mktemp("interrupted")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    with chdir(folder):
        process = spawn("name=a", *ENDLESS)
        wait_for_step("a", 10, process)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=600)
    return folder, process.returncode, error


def test_interrupted_process_exits_with_75(interrupted):
    _, code, error = interrupted
    assert code == 75, error


def test_interrupted_process_says_how_to_quit_and_how_to_resume(interrupted):
    _, _, error = interrupted
    stopping, *_, saved = error.strip().splitlines()
    assert "Press Ctrl-C again to quit without saving" in stopping
    assert re.fullmatch(
        r"train.py: saved at step \d+; resume with the same command and name=a", saved
    )
    assert "Traceback" not in error


def test_interrupted_process_saves_its_last_step(interrupted):
    with chdir(interrupted[0]):
        assert summary("a")["status"] == "interrupted"
        assert load("a")["step"] == metrics("a")[-1]["step"] == summary("a")["step"] > 0


def test_run_whose_terminal_is_closed_saves_a_checkpoint(workdir):
    controller, terminal = os.openpty()
    command = [sys.executable, str(ROOT / "train.py"), *TINY, "name=a", *ENDLESS]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    os.set_blocking(controller, False)
    while process.poll() is None and not Path("runs/a/checkpoints/last.pt").exists():
        with suppress(BlockingIOError):
            os.read(controller, 10_000)  # a process waits if its terminal is full
        time.sleep(0.02)
    os.close(controller)  # writing to the terminal fails from now on
    process.send_signal(signal.SIGHUP)  # as the kernel and the shell do
    assert process.wait(600) == 75
    assert summary("a")["status"] == "interrupted"
    assert load("a")["step"] == metrics("a")[-1]["step"] > 0


@contextmanager
def signal_in_call(number: int, target: str, counts: Callable[..., bool]) -> Iterator[list]:
    """Context manager: SIGTERM before call `number`, from 1, of a function.

    counts: whether a call counts, by its arguments.
    Yields the list of the arguments of all calls.
    """
    function = resolve_name(target)
    calls = []

    def signal_and_call(*args, **kwargs):
        if counts(*args):
            calls.append(args)
            if len(calls) == number:
                signal.raise_signal(signal.SIGTERM)
        return function(*args, **kwargs)

    with restored_signal_handlers(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, signal_and_call)
        yield calls


def is_validation(loader, split: str, *args) -> bool:
    return split == "val"


def is_any(*args) -> bool:
    return True


EVERY_STEP = ["name=a", "eval.windows=16", "eval.every=1"]
STOPPED = {  # step of the evaluation, and the call in which the signal arrives
    "loss after the first step": (1, 6, "data.loader.Loader.batch", is_validation),
    "loss after the last step": (6, 26, "data.loader.Loader.batch", is_validation),
    "sample after the first step": (1, 2, "generation.engine.sample_next_token", is_any),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train_in(folder, *EVERY_STEP)
    (folder / "runs/a").rename(folder / "runs/whole")
    return folder


@dataclass
class StoppedRun:
    folder: Path  # also with the run "whole"
    step: int  # of the evaluation that a signal has stopped
    code: int
    printed: str
    wandb_codes: list[int]
    calls_after: int  # in the evaluation, after the signal


@pytest.fixture(scope="module", params=STOPPED)
def stopped(request, uninterrupted, tmp_path_factory) -> StoppedRun:
    """A run with an evaluation that a signal has stopped. Tests only read it."""
    step, *call = STOPPED[request.param]
    folder = tmp_path_factory.mktemp("stopped")
    shutil.copytree(uninterrupted, folder, dirs_exist_ok=True)
    codes = []

    def record(logger, exit_code, **end):
        codes.append(exit_code)

    with signal_in_call(*call) as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.wandb_logger.WandbLogger.finish", record)
        code, printed = run_in(folder, *EVERY_STEP)
    return StoppedRun(folder, step, code, printed, codes, len(calls) - call[0])


def test_run_whose_evaluation_is_stopped_saves_its_step(stopped):
    assert stopped.code == 75
    assert f"saved at step {stopped.step}; resume with" in stopped.printed
    with chdir(stopped.folder):
        assert summary("a")["status"] == "interrupted"
        assert load("a")["step"] == stopped.step


def test_signal_stops_an_evaluation_after_its_current_forward_pass(stopped):
    assert stopped.calls_after == 0


def test_wandb_gets_the_exit_code_of_an_interrupted_run(stopped):
    assert stopped.wandb_codes == [75]


def test_row_of_a_stopped_evaluation_is_not_written(stopped):
    with chdir(stopped.folder):
        assert metrics("a")[-1]["step"] == stopped.step - 1


def test_stopped_evaluation_is_repeated_on_resume(stopped, workdir, train):
    copy_here(stopped.folder)
    assert train(*EVERY_STEP) == 0
    assert_same_run("whole", "a")


def test_resumed_run_that_has_only_an_evaluation_left_has_a_speed(stopped, workdir, train):
    copy_here(stopped.folder)
    assert train(*EVERY_STEP) == 0
    assert summary("a")["step_ms"] > 0


def test_row_of_a_repeated_evaluation_is_not_written_twice_after_a_crash(stopped, workdir, train):
    """The process is killed after the row, and before the checkpoint."""

    def crash(*args):
        raise ZeroDivisionError

    copy_here(stopped.folder)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("training.checkpoint.save_checkpoint", crash)
        train(*EVERY_STEP)
    assert metrics("a")[-1]["step"] == stopped.step
    assert train(*EVERY_STEP) == 0
    assert untimed(metrics("a")) == untimed(metrics("whole"))


@pytest.fixture
def interrupted_at_the_start(train) -> int:
    """Exit code of a run that a signal stops in its evaluation before the first step."""
    with signal_in_call(1, "model.gpt.GPT.forward", is_any):
        signal.signal(signal.SIGTERM, raise_interrupt)  # as in a process of train.py
        return train("name=a")


def test_signal_before_the_first_step_ends_the_run_at_once(interrupted_at_the_start):
    assert interrupted_at_the_start == 75
    assert summary("a")["status"] == "interrupted"
    assert list_checkpoints("a") == set()


def test_run_that_was_interrupted_before_its_first_step_can_start_again(
    interrupted_at_the_start, train
):
    assert train("name=a") == 0


def train_for_closed_reader(train, step: int) -> int:
    """Train with an output that is closed in the evaluation of a step, as in train.py | head."""
    reader, writer = os.pipe()
    evaluate = Evaluator.evaluate

    def close_reader_and_evaluate(evaluator, state, metrics):
        if state.step == step:
            os.close(reader)
        return evaluate(evaluator, state, metrics)

    with pytest.MonkeyPatch.context() as patch, open(writer, "w", encoding="utf-8") as output:
        patch.setattr(Evaluator, "evaluate", close_reader_and_evaluate)
        signal.signal(signal.SIGTERM, raise_interrupt)  # as in a process of train.py
        with redirect_stdout(output):
            return train("name=a")


@pytest.mark.parametrize("step", [0, 3])
def test_run_whose_output_is_no_longer_read_ends_as_after_a_signal(train, capfd, step):
    assert train_for_closed_reader(train, step) == 75
    assert summary("a")["status"] == "interrupted"
    assert "the output is no longer read" in capfd.readouterr().err


def test_run_whose_output_is_no_longer_read_saves(train, capfd):
    assert train_for_closed_reader(train, 3) == 75
    assert "saved at step 4; resume with the same command and name=a" in capfd.readouterr().err
    assert load("a")["step"] == metrics("a")[-1]["step"] == 4
