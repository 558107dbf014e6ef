"""The command bench.py: its files, output and exit codes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attention_helpers import HALF, REQUEST_CUDA, backends_on, choose, per_device, resolve_or_skip
from bench_helpers import FOLDER, make_row, make_words, read_rows, read_summary
from helpers import ROOT, run_command

ONE_ROW = ("phases=[forward]", "backends=[naive]", "n_head=1")


@pytest.fixture
def bench(workdir):
    """bench("phases=[step]", ...) runs a tiny bench in this process -> exit code."""

    def run(*overrides: str) -> int:
        return run_command("bench", *make_words(*overrides))

    return run


@pytest.fixture
def fake_bench(bench, monkeypatch):
    """fake_bench([row, ...], ...) runs a bench that measures nothing and has these rows.

    Another item of the list is an exception, which is raised.
    """

    def run(results: list, *overrides: str) -> int:
        def measure_groups(groups, config, table, rows):
            for result in results:
                if isinstance(result, BaseException):
                    raise result
                rows.append(result)

        monkeypatch.setattr("bench.measure_groups", measure_groups)
        return bench(*overrides)

    return run


FINISHED = make_row("naive", 8, 1.0)
REFUSED = make_row("cudnn", 8, None, status="refused")
FAILED = make_row("naive", 8, None, status="failed")
TOO_LARGE = make_row("naive", 8, None)


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        pytest.param([FINISHED], 0, id="finished"),
        pytest.param([FINISHED, REFUSED], 0, id="one refused"),
        pytest.param([FINISHED, TOO_LARGE], 0, id="out of memory"),
        pytest.param([FINISHED, FAILED], 1, id="one failed"),
        pytest.param([REFUSED, REFUSED], 2, id="all refused"),
        pytest.param([FINISHED, KeyboardInterrupt()], 75, id="interrupted"),
        pytest.param([KeyboardInterrupt()], 75, id="interrupted without a row"),
    ],
)
def test_exit_code_says_how_the_rows_ended(fake_bench, rows, code):
    assert fake_bench(rows) == code


def test_interrupted_bench_plots_and_prints_its_rows(fake_bench, capsys):
    fake_bench([FINISHED, KeyboardInterrupt()])
    assert (FOLDER / "attention.png").exists()
    assert "fastest here" in capsys.readouterr().out


def test_summary_of_an_interrupted_bench_has_the_status(fake_bench):
    fake_bench([FINISHED, KeyboardInterrupt()])
    summary = read_summary()
    assert (summary["status"], summary["rows"]) == ("interrupted", 1)


def test_existing_bench_is_not_overwritten(fake_bench, capsys):
    fake_bench([FINISHED])
    before = (FOLDER / "summary.json").read_bytes()
    assert fake_bench([FINISHED, FINISHED]) == 2
    message = capsys.readouterr().err
    assert str(FOLDER) in message
    assert "set another" in message
    assert (FOLDER / "summary.json").read_bytes() == before


def test_folder_without_a_name_has_the_device_and_the_model(fake_bench):
    fake_bench([FINISHED], "name=null", "model=gpt2")
    (folder,) = FOLDER.parent.iterdir()
    assert folder.name.endswith("-cpu-gpt2")


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("backends=[naiv]", "set one or more of naive, sdpa, sdpa:cudnn"),
        ("backends=[naive,naive]", "contains a value twice"),
        ("phases=[train]", "set one of forward, forward+backward"),
        ("masks=[window]", "set causal, window:256"),
        ("dtypes=[int8]", "set one of auto, float32"),
        ("n_kv_head=3", "does not divide the 2 heads"),
        ("device=tpu", "set one of auto, cpu"),
        ("model.attention_type=linear", "set backends=[sdpa,linear]"),
    ],
)
def test_invalid_setting_is_refused_before_anything_is_written(override, advice, workdir, capsys):
    assert run_command("bench", override) == 2
    message = capsys.readouterr().err
    assert override.split("=")[0] in message
    assert advice in message
    assert message.count("\n") == 1
    assert not (workdir / "runs").exists()


@pytest.mark.slow
def test_case_that_needs_too_much_memory_is_a_row(bench):
    assert bench(*ONE_ROW, "block_sizes=[8,1048576]") == 0
    small, large = read_rows()
    assert (small["status"], large["status"]) == ("finished", "out of memory")
    assert "allocate" in large["reason"]


def wait_for_rows(table: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if table.exists() and table.read_text(encoding="utf-8").count("\n") > count:
            return
        time.sleep(0.1)


@pytest.mark.slow
def test_ctrl_c_keeps_the_finished_rows(workdir):
    contexts = ",".join(map(str, range(8, 2000)))
    command = [sys.executable, str(ROOT / "bench.py"), *make_words(f"block_sizes=[{contexts}]")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    bench = subprocess.Popen(command, **pipes, start_new_session=True)
    wait_for_rows(FOLDER / "attention.csv", 4)
    os.killpg(bench.pid, signal.SIGINT)  # as a terminal does: to the complete process group
    out, err = bench.communicate(timeout=300)
    assert bench.returncode == 75, err
    rows = read_rows()
    assert {row["status"] for row in rows} == {"finished"}
    assert f"stopped after {len(rows)} rows" in err
    assert "Traceback" not in err + out


@pytest.mark.parametrize(
    ("device", "name"), per_device(cpu=[], cuda=[*backends_on("cuda"), "linear"])
)
def test_rows_on_cuda(bench, device, name):
    resolve_or_skip(choose(name), REQUEST_CUDA)
    dtype = str(HALF).removeprefix("torch.")
    shapes = ["block_sizes=[128,1024]", "head_size=64", "model.n_embd=128"]
    where = ["device=cuda", f"dtypes=[{dtype}]", "compile=false"]
    assert bench(f"backends=[{name}]", *shapes, *where) == 0
    assert {row["status"] for row in read_rows()} == {"finished"}
