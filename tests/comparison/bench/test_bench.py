"""The command bench.py: its files, rows, refusals and exit codes."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attention_helpers import HALF, REQUEST_CUDA, backends_on, choose, per_device, resolve_or_skip
from bench_helpers import COLUMNS, make_row
from helpers import ROOT, run_command

TINY = "model.n_layer=1 model.n_embd=16 model.n_head=2 optimizer=adamw vocab_size=64 rounds=1 repeats=1 seconds=0.001 "
TINY += "time_limit=300 wandb.mode=disabled block_sizes=[8] dtypes=[float32] name=x"
FOLDER = Path("runs/bench/x")


def override_tiny(*overrides: str) -> list[str]:
    """The words of TINY, with other values of some keys."""
    return [
        f"{key}={value}"
        for key, value in dict(word.split("=", 1) for word in [*TINY.split(), *overrides]).items()
    ]


@pytest.fixture
def bench(workdir, capsys):
    """bench("phases=[step]", ...) returns (exit code, the rows of attention.csv, the output)."""

    def run(*overrides: str) -> tuple[int, list[dict], str]:
        code = run_command("bench", *override_tiny(*overrides))
        return code, read_rows(), "".join(capsys.readouterr())

    return run


def read_rows() -> list[dict]:
    with open(FOLDER / "attention.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_bench_writes_a_table_a_picture_and_a_summary(bench):
    code, rows, printed = bench("backends=[naive,flash,cudnn]", "wandb.mode=offline", "n_kv_head=1")
    assert code == 0
    assert len(rows) == 4 * 3 + 1  # and the step without attention
    finished = [row for row in rows if row["status"] == "finished"]
    assert {row["backend"] for row in finished} == {"naive", "flash", "none"}
    assert all(
        row["resolved"] == row["backend"] and float(row["ms_q1"]) <= float(row["ms_median"])
        for row in finished
    )
    assert all(float(row["error_y"]) < 1e-5 for row in finished if row["phase"] != "step")
    assert {(row["phase"] == "step", row["H"], row["G"]) for row in rows} == {
        (False, "2", "1"),
        (True, "2", "2"),
    }
    refused = [row for row in rows if row["backend"] == "cudnn"]
    assert {(row["status"], row["ms_median"]) for row in refused} == {("refused", "")}
    assert all("does not run on cpu" in row["reason"] for row in refused)
    assert printed.index("fastest here") < printed.index("MiB") and "cudnn: refused" in printed
    assert (FOLDER / "attention.png").stat().st_size > 10_000 and (FOLDER / "config.yaml").exists()
    summary = json.loads((FOLDER / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "finished" and summary["rows"] == 13 and summary["answer"]
    assert summary["device_name"] and summary["versions"]["torch"]
    (table,) = FOLDER.glob("wandb/offline-run-*/files/media/table/attention_*.table.json")
    logged = json.loads(table.read_text(encoding="utf-8"))
    assert logged["columns"] == COLUMNS.split(",") and len(logged["data"]) == 13
    assert list(FOLDER.glob("wandb/offline-run-*/files/media/images/attention_picture_*.png"))


@pytest.mark.slow
def test_failures_are_rows_and_an_existing_bench_is_not_overwritten(bench, monkeypatch):
    overrides = "phases=[forward]", "backends=[naive]", "block_sizes=[8,1048576]", "n_head=1"
    code, rows, printed = bench(*overrides)
    assert code == 0
    assert [row["status"] for row in rows] == ["finished", "out of memory"]
    assert "allocate" in rows[1]["reason"] and "out of memory" in printed
    code, unchanged, printed = bench(*overrides)
    assert code == 2 and "runs/bench/x exists; set another name" in printed and unchanged == rows
    code, _, printed = bench("backends=[cudnn]", "phases=[decode]", "name=refused")
    assert code == 2 and "none: cudnn refused" in printed
    row = make_row("naive", 8, None, status="failed")
    monkeypatch.setattr(
        "comparison.bench.runner.measure_groups",
        lambda groups, config, table, rows: rows.append(row),
    )
    assert bench("name=failed", *overrides)[0] == 1


@pytest.mark.slow
def test_ctrl_c_keeps_the_finished_rows(workdir):
    contexts = f"block_sizes={[*range(8, 2000)]}".replace(" ", "")
    command = [sys.executable, str(ROOT / "bench.py"), *override_tiny(contexts)]
    bench = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    table = FOLDER / "attention.csv"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not (
        table.exists() and table.read_text(encoding="utf-8").count("\n") > 4
    ):
        time.sleep(0.1)
    os.killpg(bench.pid, signal.SIGINT)  # as a terminal does: to the complete process group
    out, err = bench.communicate(timeout=300)
    assert bench.returncode == 75, err
    rows = read_rows()
    assert len(rows) >= 3 and {row["status"] for row in rows} == {"finished"}
    assert f"stopped after {len(rows)} rows" in err and "Traceback" not in err + out
    assert "fastest here" in out and (FOLDER / "attention.png").exists()
    assert (
        json.loads((FOLDER / "summary.json").read_text(encoding="utf-8"))["status"] == "interrupted"
    )


@pytest.mark.parametrize(
    "override, advice",
    [
        ("backends=[naiv]", "set one or more of naive, sdpa, sdpa:cudnn"),
        ("backends=[naive,naive]", "contains a value twice"),
        ("phases=[train]", "set one of forward, forward+backward"),
        ("masks=[window]", "set causal, window:256"),
        ("dtypes=[int8]", "set one or more of float32"),
        ("n_kv_head=3", "does not divide the 2 heads"),
        ("device=tpu", "device=tpu is unknown"),
    ],
)
def test_invalid_settings_are_refused_before_anything_is_written(override, advice, workdir, capsys):
    assert run_command("bench", override) == 2
    printed = capsys.readouterr().err
    assert override.split("=")[0] in printed and advice in printed and printed.count("\n") == 1
    assert not (workdir / "runs").exists()


@pytest.mark.parametrize(
    ("device", "name"), per_device(cpu=[], cuda=[*backends_on("cuda"), "linear"])
)
def test_rows_on_cuda(bench, device, name):
    resolve_or_skip(choose(name), REQUEST_CUDA)
    overrides = [
        "device=cuda",
        f"dtypes=[{str(HALF)[6:]}]",
        "block_sizes=[128,1024]",
        "head_size=64",
    ]
    code, rows, printed = bench(
        f"backends=[{name}]", *overrides, "compile=false", "model.n_embd=128"
    )
    assert code == 0 and {row["status"] for row in rows} == {"finished"}, printed
