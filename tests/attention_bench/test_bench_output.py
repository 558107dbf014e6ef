"""What a finished bench leaves behind: its rows, files, output and wandb run."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from bench_helpers import CONFIG, FOLDER, make_row, make_words, read_rows, read_summary
from helpers import run_command
from wandb_helpers import OfflineRun, read_offline_runs

from attention_bench.wandb_runs import make_bench_runs

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


@pytest.fixture(scope="module")
def logged(finished_bench) -> dict[str, OfflineRun]:
    """The wandb runs, by name."""
    return {run.run["display_name"]: run for run in read_offline_runs(finished_bench[0])}


def test_wandb_has_a_run_per_backend(logged):
    assert logged.keys() == {"naive", "flash", "cudnn", "none"}
    assert len({run.id for run in logged.values()}) == 4


def test_names_of_wandb_runs_have_the_dtype_if_there_are_several():
    rows = [make_row("naive", 8, 1.0, dtype=dtype) for dtype in ("float32", "bfloat16")]
    runs = make_bench_runs(rows, CONFIG, {}, FOLDER)
    assert [run.name for run in runs] == ["naive float32", "naive bfloat16"]
    assert [run.config["dtype"] for run in runs] == ["float32", "bfloat16"]


@pytest.mark.parametrize(("key", "value"), [("job_type", "bench"), ("run_group", "x")])
def test_wandb_runs_of_a_bench_are_a_group(logged, key, value):
    assert {run.run[key] for run in logged.values()} == {value}


@pytest.mark.parametrize(
    ("name", "kernel"), [("naive", "naive"), ("flash", "flash"), ("cudnn", None)]
)
def test_wandb_config_has_the_kernel(logged, name, kernel):
    assert logged[name].config["attention"] == {"requested": name, "resolved": kernel}


@pytest.mark.parametrize("key", ["dtype", "device", "versions", "model", "batch_size", "phases"])
def test_wandb_config_has_the_shapes_and_the_machine(logged, key):
    assert logged["flash"].config[key] is not None


def test_wandb_plots_over_the_context_length(logged):
    assert logged["flash"].metrics["*"]["step_metric"] == "T"


@pytest.mark.parametrize(
    ("key", "column", "unit"),
    [
        ("ms", "ms_median", 1),
        ("tflops", "flops_per_second", 1e12),
        ("memory_mib", "peak_memory_bytes", 2**20),
        ("error", "error_y", 1),
    ],
)
@pytest.mark.parametrize("phase", ["forward", "forward+backward", "decode"])
def test_wandb_row_has_the_figures_of_all_phases(logged, rows, phase, key, column, unit):
    (row,) = logged["flash"].rows
    (expected,) = (r for r in rows if (r["backend"], r["phase"]) == ("flash", phase))
    assert (row["_step"], row["T"]) == (8, 8)
    value = row[f"{phase.replace('+', '_')}/{key}"]
    assert value == pytest.approx(float(expected[column]) / unit)


def test_wandb_summary_has_the_medians_and_the_recommendation(logged, folder):
    recommended = {line[0]: line[2] for line in read_summary(folder)["answer"]}
    summary = logged["flash"].summary
    assert summary["forward/ms"] == logged["flash"].rows[-1]["forward/ms"]
    assert summary["fastest/step_float32"] == recommended["step, float32"]


def test_wandb_notes_have_the_recommendation(logged, folder):
    lines = [f"{phase}, {T}: {text}" for phase, T, text in read_summary(folder)["answer"]]
    assert logged["flash"].run["notes"].splitlines() == lines


def test_wandb_has_the_table_of_a_backend(logged, rows):
    expected = [row["phase"] for row in rows if row["backend"] == "flash"]
    assert [row["phase"] for row in logged["flash"].table("timings")] == expected


def test_wandb_has_the_picture(logged, folder):
    (picture,) = logged["naive"].media("picture")
    assert picture.read_bytes() == (folder / "attention.png").read_bytes()


def test_output_has_the_command_that_uploads_the_runs(finished_bench):
    assert "upload   wandb sync runs/bench/x/wandb" in finished_bench[1].splitlines()
