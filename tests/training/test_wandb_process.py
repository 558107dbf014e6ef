"""What a training run logs to wandb, read from the files that wandb has written offline."""

from contextlib import chdir
from pathlib import Path

import pytest
from helpers import metrics, summary
from run_helpers import train_in
from wandb_helpers import OfflineRun, read_offline_runs

from training.wandb_process import select_rows

WORDS = [
    "name=a", "wandb.mode=offline", "eval.attention_maps=true", "eval.attention_stats=true",
    "wandb.log_model=true",
]  # fmt: skip
ENVIRONMENT = {
    "WANDB_PROJECT": "p",
    "WANDB_ENTITY": "e",
    "WANDB_RUN_GROUP": "g",
    "WANDB_TAGS": "x,y",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the run a. Tests only read it."""
    folder = tmp_path_factory.mktemp("logged")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setattr("sys.argv", ["train.py", *WORDS])
        printed = train_in(folder, *WORDS)
    (folder / "printed").write_text(printed, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def logged(folder) -> OfflineRun:
    (run,) = read_offline_runs(folder / "runs/a")
    return run


@pytest.fixture(scope="module")
def rows(folder) -> list[dict]:
    """The rows of metrics.jsonl."""
    with chdir(folder):
        return metrics("a")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("job_type", "train"),
        ("display_name", "a"),
        ("project", "p"),
        ("entity", "e"),
        ("run_group", "g"),
        ("tags", ["x", "y"]),
    ],
)
def test_run_has_its_name_and_the_settings_of_the_environment(logged, key, value):
    assert logged.run[key] == value


def test_run_has_the_id_of_its_folder(logged, folder):
    with chdir(folder):
        assert logged.id == summary("a")["wandb_id"]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("attention", {"requested": "auto", "resolved": "flash", "flash_package": None}),
        ("model", {"n_layer": 2, "block_size": 16}),
        ("train", {"batch_size": 4, "steps": 6}),
    ],
)
def test_config_is_nested_and_has_resolved_values(logged, section, expected):
    assert expected.items() <= logged.config[section].items()


@pytest.mark.parametrize(
    "key",
    [
        "device", "device_name", "dtype", "compile", "n_params", "flops_per_token",
        "kv_cache_bytes_per_token", "world_size",
        "micro_batch_size", "versions", "commit", "command",
    ],
)  # fmt: skip
def test_config_has_the_facts_of_the_run(logged, folder, key):
    with chdir(folder):
        assert logged.config[key] == summary("a")[key]


def test_wandb_shows_the_command_of_the_run(logged):
    assert logged.program == ["train.py", *WORDS]


def test_three_keys_of_the_config_are_pinned(logged):
    pinned = logged.config["_wandb.pinned_keys"]
    assert pinned == ["attention.resolved", "dtype", "device_name"]


def test_evaluations_have_the_values_of_metrics_jsonl(logged, rows):
    for step in (0, 3, 6):
        (row,) = (row for row in logged.rows if row["_step"] == step)
        numbers = {
            key: value
            for key, value in rows[step].items()
            if isinstance(value, int | float) and "head_" not in key
        }
        assert {"val/loss", "peak_memory_bytes", "attention/entropy"} <= numbers.keys()
        assert {key: row.get(key) for key in numbers} == pytest.approx(numbers)


@pytest.mark.parametrize("axis", ["step", "tokens", "seconds", "flops"])
def test_rows_have_all_x_axes(logged, rows, axis):
    (last,) = logged.rows[-1:]
    assert last[axis] == rows[-1][axis] > 0


@pytest.mark.parametrize("axis", ["step", "tokens", "seconds", "flops"])
def test_x_axes_have_no_plots(logged, axis):
    assert logged.metrics[axis]["options"]["hidden"]


def test_curves_are_plotted_over_the_step(logged):
    assert logged.metrics["*"]["step_metric"] == "step"


@pytest.mark.parametrize("key", ["train/loss", "val/loss", "val/bpb"])
def test_summary_has_the_smallest_loss(logged, rows, key):
    assert logged.metrics[key]["summary"] == {"min": True}
    smallest = min(row[key] for row in logged.rows if key in row)
    assert logged.summary[key] == {"min": pytest.approx(smallest)}


@pytest.mark.parametrize(
    "key",
    [
        "step_ms", "tokens_per_second", "peak_memory_bytes", "best_step", "best_val_bpb",
        "last_val_loss",
    ],
)  # fmt: skip
def test_summary_has_the_results(logged, folder, key):
    with chdir(folder):
        assert logged.summary[key] == pytest.approx(summary("a")[key])


def test_summary_has_the_kernel(logged):
    assert logged.summary["kernel"] == "flash"


def test_samples_are_a_table(logged, rows):
    expected = [
        {"step": row["step"], "tokens": row["tokens"], "text": row["sample"]}
        for row in rows
        if "sample" in row
    ]
    assert [row["step"] for row in expected] == [3, 6]
    assert logged.table("samples") == expected


@pytest.mark.parametrize("key", ["attention_maps", "attention_heads"])
def test_attention_is_a_picture_per_evaluation(logged, folder, rows, key):
    pictures = [picture.read_bytes() for picture in logged.media(key)]
    paths = [row[key] for row in rows if key in row]
    assert pictures == [(folder / "runs/a" / path).read_bytes() for path in paths]
    assert len(pictures) == 3


def test_statistics_of_single_heads_are_not_logged(logged):
    assert not [key for row in logged.rows for key in row if "head_" in key]


def test_names_of_metrics_are_accepted_by_wandb(rows):
    """Each part is a word of letters, digits and underscores, so that wandb can sort by it."""
    parts = {part for row in rows for key in row for part in key.split("/")}
    assert all(part.isidentifier() for part in parts)


def test_best_weights_are_an_artifact_of_type_model(logged):
    (artifact,) = (entry for entry in logged.artifacts if entry["type"] == "model")
    (content,) = artifact["manifest"]["contents"]
    assert content["path"] == "best.pt"


def test_run_has_its_exit_code(logged):
    assert logged.exit_code == 0


def test_run_prints_the_command_that_uploads_it(folder):
    assert "upload   wandb sync runs/a/wandb\n" in (folder / "printed").read_text(encoding="utf-8")


# Selection of rows


def make_rows(*seconds: float) -> list[dict]:
    return [{"step": step, "seconds": value} for step, value in enumerate(seconds)]


def select_steps(rows: list[dict], first_step: int = 0) -> list[int]:
    return [row["step"] for row in select_rows(rows, first_step)]


def test_rows_are_logged_four_times_a_second():
    assert select_steps(make_rows(0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.56)) == [0, 3, 6]


def test_later_rows_are_farther_apart():
    steps = select_steps(make_rows(*range(10_000)))
    assert steps[:4001] == list(range(4001))
    assert steps[-1] - steps[-2] == 3


def test_every_evaluation_is_logged():
    rows = make_rows(0, 0.01, 0.02)
    rows[2]["val/loss"] = 1.0
    assert select_steps(rows) == [0, 2]


def test_rows_that_the_server_has_are_not_logged():
    assert select_steps(make_rows(0, 1, 2, 3), first_step=2) == [2, 3]


def test_table_has_the_newest_hundred_samples():
    rows = [{"step": n, "tokens": n, "seconds": n, "sample": "text"} for n in range(150)]
    *_, last = select_rows(rows, 149)
    assert [sample["step"] for sample in last["samples"]] == list(range(50, 150))
