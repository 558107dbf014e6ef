"""What a finished bench leaves behind: its rows, files, output and wandb run."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from bench_helpers import FOLDER, make_words, read_rows, read_summary
from helpers import run_command

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished_bench(tmp_path_factory) -> tuple[Path, str]:
    """A bench of all phases with a refused backend and wandb. Returns (its folder, its output)."""
    folder = tmp_path_factory.mktemp("bench")
    words = make_words("backends=[naive,flash,cudnn]", "wandb.mode=offline", "n_kv_head=1")
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output):
        patch.chdir(folder)
        assert run_command("bench", *words) == 0
    return folder / FOLDER, output.getvalue()


@pytest.fixture
def folder(finished_bench) -> Path:
    return finished_bench[0]


@pytest.fixture
def rows(folder) -> list[dict]:
    return read_rows(folder)


def test_table_has_a_row_per_backend_and_phase_and_a_step_without_attention(rows):
    names = [row["backend"] for row in rows]
    assert names == 4 * ["naive", "flash", "cudnn"] + ["none"]


def test_rows_record_the_kernel_that_ran(rows):
    kernels = {(row["backend"], row["resolved"]) for row in rows if row["resolved"]}
    assert kernels == {("naive", "naive"), ("flash", "flash"), ("none", "none")}


def test_median_is_between_the_quartiles(rows):
    for row in rows:
        if row["status"] == "finished":
            q1, median, q3 = (float(row[f"ms_{key}"]) for key in ("q1", "median", "q3"))
            assert 0 < q1 <= median <= q3


def test_attention_alone_has_errors_from_the_reference(rows):
    finished = [row for row in rows if row["status"] == "finished"]
    errors = [float(row["error_y"]) for row in finished if row["phase"] != "step"]
    assert len(errors) == 6
    assert max(errors) < 1e-5


def test_steps_have_the_heads_of_the_model(rows):
    heads = {(row["phase"] == "step", row["H"], row["G"]) for row in rows}
    assert heads == {(False, "2", "1"), (True, "2", "2")}


def test_refused_backend_has_rows_with_the_reason(rows):
    refused = [row for row in rows if row["backend"] == "cudnn"]
    assert {(row["status"], row["ms_median"]) for row in refused} == {("refused", "")}
    assert all("does not run on cpu" in row["reason"] for row in refused)


def test_output_begins_with_the_recommendation(finished_bench):
    _, printed = finished_bench
    assert printed.index("fastest here") < printed.index("MiB")


def test_folder_has_the_picture_and_the_config(folder):
    assert (folder / "attention.png").stat().st_size > 10_000
    assert (folder / "config.yaml").exists()


def test_summary_has_the_recommendation_and_the_machine(folder):
    summary = read_summary(folder)
    assert (summary["status"], summary["rows"]) == ("finished", 13)
    assert len(summary["answer"]) == 4
    assert summary["device_name"]
    assert summary["versions"]["torch"]


def test_wandb_gets_the_table(folder, rows):
    (path,) = folder.glob("wandb/offline-run-*/files/media/table/attention_*.table.json")
    table = json.loads(path.read_text(encoding="utf-8"))
    assert table["columns"] == list(rows[0])
    assert len(table["data"]) == 13


def test_wandb_gets_the_picture(folder):
    pattern = "wandb/offline-run-*/files/media/images/attention_picture_*.png"
    assert list(folder.glob(pattern))
