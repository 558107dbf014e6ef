"""The command bench.py: its files, output and exit codes."""

import csv
import json
import multiprocessing
from pathlib import Path
from unittest.mock import Mock

import pytest
from attention_helpers import HALF, REQUEST_CUDA, backends_on, choose, per_device, resolve_or_skip
from bench_helpers import make_row
from helpers import run_command

FOLDER = Path("runs/bench/x")
TINY = ["name=x", "head_size=8", "batch_size=1", "block_sizes=[8]", "dtypes=[float32]"]
TINY += ["rounds=1", "seconds=0.001", "time_limit=300", "wandb.mode=disabled"]


def read_rows(folder: Path = FOLDER) -> list[dict]:
    with open(folder / "attention.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_summary(folder: Path = FOLDER) -> dict:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture
def fake_bench(workdir, monkeypatch):
    """fake_bench(result, ...) runs a bench whose groups have these results.

    A result is a row, or an exception that is raised.
    """

    def run(*results, words: tuple = ()) -> int:
        groups = [[result] if isinstance(result, dict) else result for result in results]
        monkeypatch.setattr("bench.measure_group", Mock(side_effect=groups))
        monkeypatch.setattr("bench.plot_results", lambda rows, machine, path: path.touch())
        contexts = f"block_sizes={[*range(1, 1 + len(groups))]}"
        return run_command("bench", *TINY, contexts, "phases=[forward]", *words)

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
    assert fake_bench(*rows) == code


def test_interrupted_bench_writes_and_prints_its_rows(fake_bench, capsys):
    fake_bench(FINISHED, KeyboardInterrupt())
    assert [row["backend"] for row in read_rows()] == ["naive"]
    assert (FOLDER / "attention.png").exists()
    assert "ms (quartiles)" in capsys.readouterr().out
    assert read_summary()["status"] == "interrupted"


def test_existing_bench_is_not_overwritten(fake_bench, capsys):
    fake_bench(FINISHED)
    before = (FOLDER / "summary.json").read_bytes()
    assert fake_bench(FINISHED, FINISHED) == 2
    message = capsys.readouterr().err
    assert str(FOLDER) in message
    assert "set another" in message
    assert (FOLDER / "summary.json").read_bytes() == before


def test_folder_without_a_name_has_the_device(fake_bench):
    fake_bench(FINISHED, words=("name=null", "device=cpu"))
    (folder,) = FOLDER.parent.iterdir()
    assert folder.name.endswith("-cpu")


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("backends=[naiv]", "did you mean naive?); set one of naive, sdpa, flash"),
        ("phases=[train]", "set one of forward, forward+backward"),
        ("phases=[]", "leaves nothing to measure"),
        ("masks=[window]", "set one of causal, window:N"),
        ("masks=[documents:0]", "set 1 or more"),
        ("dtypes=[int8]", "set one of auto, float32"),
        ("n_kv_head=3", "does not divide the 2 heads"),
        ("device=tpu", "set one of auto, cpu"),
        ("name=a/b", "is not a folder name"),
    ],
)
def test_invalid_setting_is_refused_before_anything_is_written(override, advice, workdir, capsys):
    assert run_command("bench", override) == 2
    message = capsys.readouterr().err
    assert override.split("=")[0] in message
    assert advice in message
    assert message.count("\n") == 1
    assert not (workdir / "runs").exists()


@pytest.fixture(scope="module")
def finished_bench(tmp_path_factory) -> Path:
    """The folder of a bench of all phases, with a refused backend."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_command("bench", *TINY, "backends=[naive,flash,cudnn]", "device=cpu") == 0
    return folder / FOLDER


@pytest.mark.slow
def test_finished_bench_leaves_no_process(finished_bench):
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_rows_have_kernels_times_and_errors(finished_bench):
    rows = read_rows(finished_bench)
    finished = [row for row in rows if row["status"] == "finished"]
    assert [row["resolved"] for row in finished] == 3 * ["naive", "flash"]
    for row in finished:
        assert 0 < float(row["ms_q1"]) <= float(row["ms_median"]) <= float(row["ms_q3"])
        assert float(row["error_y"]) < 1e-5


@pytest.mark.slow
def test_refused_backend_has_rows_with_the_reason(finished_bench):
    refused = [row for row in read_rows(finished_bench) if row["backend"] == "cudnn"]
    assert [row["status"] for row in refused] == 3 * ["refused"]
    assert "does not run on cpu" in refused[0]["reason"]


@pytest.mark.slow
def test_folder_has_the_fastest_backends_and_the_machine(finished_bench):
    summary = read_summary(finished_bench)
    assert (finished_bench / "config.yaml").exists()
    assert summary["fastest"]["decode, causal, float32, T = 8"] in ("naive", "flash")
    assert len(summary["fastest"]) == 3
    assert summary["status"] == "finished"
    assert summary["versions"]["torch"]


@pytest.mark.parametrize(
    ("device", "name"), per_device(cpu=[], cuda=[*backends_on("cuda"), "linear"])
)
def test_rows_on_cuda(workdir, device, name):
    resolve_or_skip(choose(name), REQUEST_CUDA)
    dtype = str(HALF).removeprefix("torch.")
    shapes = ["block_sizes=[128,1024]", "head_size=64", f"dtypes=[{dtype}]"]
    assert run_command("bench", *TINY, f"backends=[{name}]", "device=cuda", *shapes) == 0
    assert {row["status"] for row in read_rows()} == {"finished"}
