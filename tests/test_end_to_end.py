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
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from data_helpers import write_file
from helpers import (
    ROOT,
    TINY,
    file_size_limit,
    load,
    metrics,
    run_command,
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

from common.checkpoint_file import save_checkpoint
from common.process import raise_interrupt
from training.evaluate import Evaluator

WARMUP = "schedule.warmup_steps=100"  # the learning rates do not depend on the length of a run


def list_checkpoints(name: str) -> set[str]:
    return {path.stem for path in Path(f"runs/{name}/checkpoints").glob("*.pt")}


# Runs that finish, and continue


@pytest.mark.parametrize(("optimizer", "dtype"), [("adamw", "float32"), ("muon", "bfloat16")])
def test_extended_run_is_bit_identical_to_a_longer_run(train, optimizer, dtype, capsys):
    """With dropout."""
    settings = [f"optimizer={optimizer}", f"dtype={dtype}", "model.dropout=0.1", WARMUP]
    assert train("name=whole", "train.steps=9", *settings) == 0
    assert train("name=parts", *settings) == 0
    assert train("name=parts", "train.steps=9", *settings) == 0
    printed = capsys.readouterr().out
    assert "runs/parts, resumed from step 6" in printed
    assert "changed  train.steps=6 (now 9)\n" in printed
    assert_same_run("whole", "parts")


def test_finished_run_does_not_train_again(trained, train, capsys):
    before = read_files(Path("runs/a"))
    assert train("name=a") == 0
    assert "runs/a is finished at step 6; set a larger train.steps" in capsys.readouterr().out
    assert read_files(Path("runs/a")) == before


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
        ("resume=false", "runs/a exists; set another name"),
        ("train.steps=5", "reached train.steps=6 (now 5) at step 6; set a larger value"),
    ],
)
def test_run_with_other_settings_is_refused_and_changes_no_file(refuse, word, message):
    assert message in refuse(word)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("text.txt", "was trained with another text than text.txt has now"),
        ("runs/a/metrics.jsonl", "metrics.jsonl has no row of step"),
        ("runs/a/checkpoints/last.pt", "runs/a/checkpoints/last.pt is damaged"),
    ],
)
def test_run_with_a_cut_file_is_refused_and_changes_no_file(refuse, file, message):
    content = Path(file).read_bytes()
    Path(file).write_bytes(content[: len(content) // 2])
    assert message in refuse()


def test_run_that_has_lost_its_last_checkpoint_is_refused_and_changes_no_file(refuse):
    Path("runs/a/checkpoints/last.pt").unlink()
    assert "runs/a/checkpoints/last.pt is missing" in refuse()


# Runs that fail


SETTINGS = ["optimizer=adamw", WARMUP, "checkpoint.every=2", "checkpoint.keep=2"]
DIVERGING = ["optimizer.lr=1e9", "train.grad_clip=null", "optimizer.weight_decay=0"]


def test_diverged_run_fails_and_another_run_starts_from_its_older_checkpoint(workdir, train):
    train_in(workdir, "name=a", "train.steps=7", *SETTINGS)
    for words in (["checkpoint.every=1", *DIVERGING], []):  # the weights, then the loss
        code, printed = run_in(workdir, "name=a", *SETTINGS, "train.steps=12", *words)
        assert code == 1
        assert "Lower optimizer.lr, then resume with the same command and name=a" in printed
        assert summary("a")["status"] == "failed"
        assert torch.isfinite(load("a")["model"]["wte.weight"]).all()
    assert "start another run from an older checkpoint with train.init_from" in printed
    checkpoint = "a/checkpoints/step-000006.pt"
    tokenizer = ["tokenizer=run", f"tokenizer.run={checkpoint}"]
    frozen = ["optimizer=adamw", "optimizer.lr=1e-12", "train.steps=1"]
    assert train("name=b", f"train.init_from=run:{checkpoint}", *tokenizer, *frozen) == 0
    older = load("a", "step-000006")["model"]
    torch.testing.assert_close(load("b")["model"], older, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("keep", "file"), [(0, "last.pt"), (2, "step-000006.pt")])
def test_full_disk_leaves_the_last_checkpoint_from_which_the_run_continues(
    trained, workdir, train, keep, file
):
    settings = ["name=a", "train.steps=9", "checkpoint.every=8", f"checkpoint.keep={keep}"]
    with file_size_limit(70_000):
        code, printed = run_in(workdir, *settings)
    assert code == 1
    assert f"runs/a/checkpoints/{file}: File too large; free some disk space" in printed
    assert summary("a")["status"] == "failed"
    assert load("a")["step"] == 6
    assert {path.name for path in Path("runs/a/checkpoints").iterdir()} == {"best.pt", "last.pt"}
    assert train("name=a", "train.steps=9") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_files_are_on_the_disk_in_an_order_from_which_every_kill_resumes(train, monkeypatch):
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
    rows = names.index("metrics.jsonl", names.index("summary.json replaced"))
    order = [rows, names.index("best.pt replaced"), written, replaced]
    order.append(names.index("checkpoints", replaced))  # the folder, too
    order.append(names.index("summary.json replaced", replaced))
    assert order == sorted(order), names


# Killed runs

LONG = [
    "train.steps=240",
    "eval.every=40",
    "checkpoint.every=15",
    "model.dropout=0.1",
    "optimizer=muon",
]
ENDLESS = [*LONG, "train.steps=100000"]


def crash(*args):
    raise ZeroDivisionError


KEPT = ["train.steps=9", "eval.attention_maps=true", "checkpoint.keep=1"]


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory) -> Path:
    """A folder with a run that keeps checkpoints and pictures. Tests only read it."""
    folder = tmp_path_factory.mktemp("kept")
    train_in(folder, "name=whole", *KEPT)
    return folder


@pytest.mark.parametrize("file", ["best", "last"])
def test_run_that_was_killed_before_a_checkpoint_was_written_is_bit_identical(
    kept_run, workdir, train, file
):
    """It leaves rows, attention maps and, if last.pt is missing, a best.pt of a later step."""
    copy_here(kept_run)

    def save_or_crash(path, content):
        if path.stem == file and content["step"] == 6:
            raise ZeroDivisionError
        save_checkpoint(path, content)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("training.checkpoint.save_checkpoint", save_or_crash)
        train("name=a", *KEPT)
    assert load("a", "best")["step"] == (3 if file == "best" else 6)
    assert load("a")["step"] == 3
    assert metrics("a")[-1]["step"] == 6
    assert train("name=a", *KEPT) == 0
    assert_same_run("whole", "a")
    assert list_checkpoints("a") == list_checkpoints("whole")


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


@pytest.mark.slow
def test_resumed_run_leaves_no_temporary_files_and_imports_no_compiler(workdir, tmp_path_factory):
    """Importing the compiler or wandb takes seconds. Another process imports wandb."""
    temporary = tmp_path_factory.mktemp("temporary")
    train_in(workdir, "name=a", "train.steps=3")
    command = [sys.executable, "-X", "importtime", ROOT / "train.py", *TINY]
    done = subprocess.run(
        [*command, "wandb.mode=offline", "name=a"],
        env=os.environ | {"TMPDIR": str(temporary)},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    imported = set(re.findall(r"\S+$", done.stderr, re.MULTILINE))
    assert "torch" in imported
    assert not imported & {"torch._dynamo", "sympy", "wandb"}
    assert not list(temporary.iterdir())


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


def test_interrupted_process_saves_its_last_step_and_says_how_to_resume(workdir):
    process = spawn("name=a", *ENDLESS)
    wait_for_step("a", 10, process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=600)
    assert process.returncode == 75, error
    stopping, *_, saved = error.strip().splitlines()
    step = load("a")["step"]
    assert "Press Ctrl-C again to quit without saving" in stopping
    assert saved == f"train.py: saved at step {step}; resume with the same command and name=a"
    assert summary("a")["status"] == "interrupted"
    assert step == metrics("a")[-1]["step"] == summary("a")["step"] > 0


@pytest.mark.slow
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


@pytest.fixture(scope="module", params=STOPPED)
def stopped(request, uninterrupted, tmp_path_factory) -> tuple[Path, int]:
    """A folder with a run "a" whose evaluation a signal has stopped, and the run "whole".

    Also the step of the evaluation.
    """
    step, *call = STOPPED[request.param]
    folder = tmp_path_factory.mktemp("stopped")
    shutil.copytree(uninterrupted, folder, dirs_exist_ok=True)
    with signal_in_call(*call) as calls:
        code, printed = run_in(folder, *EVERY_STEP)
    assert code == 75
    assert f"saved at step {step}; resume with" in printed
    assert len(calls) == call[0], "the evaluation stops after its current forward pass"
    return folder, step


def test_stopped_evaluation_is_saved_without_its_row(stopped, monkeypatch):
    folder, step = stopped
    monkeypatch.chdir(folder)
    assert summary("a")["status"] == "interrupted"
    assert load("a")["step"] == step
    assert metrics("a")[-1]["step"] == step - 1


def test_stopped_evaluation_is_repeated_on_resume(stopped, workdir, train):
    copy_here(stopped[0])
    assert train(*EVERY_STEP) == 0
    assert_same_run("whole", "a")
    assert summary("a")["step_ms"] > 0
    assert all("step_ms" in row for row in metrics("a")[1:])


def test_row_of_a_repeated_evaluation_is_not_written_twice_after_a_crash(stopped, workdir, train):
    """The process is killed after the row, and before the checkpoint."""
    folder, step = stopped
    copy_here(folder)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("training.checkpoint.save_checkpoint", crash)
        train(*EVERY_STEP)
    assert metrics("a")[-1]["step"] == step
    assert train(*EVERY_STEP) == 0
    assert untimed(metrics("a")) == untimed(metrics("whole"))


def test_signal_before_the_first_step_ends_a_run_at_once_which_can_start_again(train):
    with signal_in_call(1, "model.gpt.GPT.forward", is_any):
        signal.signal(signal.SIGTERM, raise_interrupt)  # as in a process of train.py
        assert train("name=a") == 75
    assert summary("a")["status"] == "interrupted"
    assert list_checkpoints("a") == set()
    assert train("name=a") == 0


@pytest.mark.parametrize(("step", "saved"), [(0, None), (3, 4)])
def test_run_whose_output_is_no_longer_read_ends_as_after_a_signal(train, capfd, step, saved):
    """As in train.py | head. The output is closed in the evaluation of a step."""
    reader, writer = os.pipe()
    evaluate = Evaluator.evaluate

    def close_reader_and_evaluate(evaluator, state):
        if state.step == step:
            os.close(reader)
        return evaluate(evaluator, state)

    with pytest.MonkeyPatch.context() as patch, open(writer, "w", encoding="utf-8") as output:
        patch.setattr(Evaluator, "evaluate", close_reader_and_evaluate)
        signal.signal(signal.SIGTERM, raise_interrupt)  # as in a process of train.py
        with redirect_stdout(output):
            assert train("name=a") == 75
    assert summary("a")["status"] == "interrupted"
    error = capfd.readouterr().err
    assert "the output is no longer read" in error
    if saved is not None:
        assert f"saved at step {saved}; resume with the same command and name=a" in error
        assert load("a")["step"] == metrics("a")[-1]["step"] == saved


@pytest.mark.parametrize(
    "words",
    [
        ["sample", "run=~/runs/a", "prompt_file=~/text.txt", "max_new_tokens=1"],
        ["sample", "run=~/runs/a", "prompts=~/line.txt", "out=~/new.jsonl", "max_new_tokens=1"],
        ["eval", "run=~/runs/a/checkpoints/last.pt", "data.path=~/line.txt", "out=~/new.jsonl"],
        ["compare", "~/runs/a", "out=~/new.jsonl"],
        ["export", "run=~/runs/llama", "out=~/new.jsonl"],
        ["sample", "--config-dir", "~/own", "attention=mine", "run=~/runs/a", "max_new_tokens=1"],
        ["prepare", "data.path=~/text.txt", "tokenizer=run", "tokenizer.run=~/runs/a"],
    ],
    ids=" ".join,
)
def test_paths_can_start_in_the_home_folder(words, trained, train, workdir, monkeypatch):
    if words[0] == "export":
        assert train("name=llama", "model=llama", "train.steps=1") == 0
    write_file("line.txt", "The 7th line")
    write_file("own/attention/mine.yaml", "backend: naive")
    monkeypatch.setenv("HOME", str(workdir))
    (workdir / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert run_command(*words) == 0
    assert not Path("~").exists()
    assert (workdir / "new.jsonl").exists() == any("new.jsonl" in word for word in words)
