"""A comparison as a wandb run, and the runs that it compares."""

import hashlib
import os
from pathlib import Path
from typing import Any

from common.errors import EXIT_CODES
from common.files import parse_yaml, read_file, write_json
from common.settings import nest_dict
from results.compare import flatten_row, format_cell
from results.metrics import METRICS, Value
from results.read import Run, Variant, read_variants
from training.config import WandbConfig
from training.run_folder import make_wandb_id
from training.wandb_logger import (
    WandbLogger,
    WandbRun,
    make_training_run,
    make_training_summary,
    to_metric_name,
)

# columns of comparison.csv
SCALARS = (
    "val_loss",
    "val_loss_low",
    "difference",
    "difference_low",
    "speedup",
    "speedup_low",
    "speedup_high",
    "speedup_per_step",
    "divergence",
    "step_ms",
    "tokens_per_second",
    "peak_memory_bytes",
)
NOTED_COLUMNS = ("kernel", "difference", "speedup", "peak_memory_bytes", "step_ms")


def log_comparison(
    config: WandbConfig,
    folders: list[Path],
    rows: list[dict[str, Value]],
    out: Path,
    with_runs: bool = False,
) -> None:
    """Log a comparison to wandb.

    folders, rows, out: arguments and result of `compare`.
    with_runs: also log the runs, unless they are complete offline.
    """
    settings = read_variants(folders)
    wandb_runs = []
    if with_runs:
        runs = [run for setting in settings for run in setting.runs]
        for run in runs:
            has_started = (run.folder / "metrics.jsonl").exists()  # a refused run has no metrics
            if has_started and run.status != "running":
                wandb_run = restore_training_run(run)
                if config.mode != "offline" or not is_logged(run):
                    wandb_runs.append(wandb_run)
    wandb_runs.append(make_comparison_run(config, settings, rows, out))
    WandbLogger(config, wandb_runs).finish()


def is_logged(run: Run) -> bool:
    """Whether wandb has logged the last step of a run, into the folder of the run or the sweep."""
    pattern = f"wandb/*run-*-{run.summary['wandb_id']}/last_step"
    files = [*run.folder.glob(pattern), *run.folder.parent.glob(pattern)]
    return str(run.summary["step"]) in [file.read_text(encoding="utf-8") for file in files]


def make_comparison_run(
    config: WandbConfig, settings: list[Variant], rows: list[dict[str, Value]], out: Path
) -> WandbRun:
    """The wandb run of a comparison: scalars by setting, the table, the picture and the report."""
    ids = [run.summary.get("wandb_id") for setting in settings for run in setting.runs]
    first_id = next(filter(None, ids), None)
    # the same command updates the same wandb run
    run_id = hashlib.sha256(f"{first_id} {out.name}".encode()).hexdigest()[:8]
    row: dict[str, Any] = {}
    texts = {}
    notes = []
    table = []
    for values in rows:
        stats = flatten_row(values)
        first_ms = rows[0]["step_ms"].value
        name = to_metric_name(stats["variant"])
        for field in SCALARS:
            row[f"{field}/{name}"] = stats[field]
        cells = [
            f"{METRICS[column].header} {format_cell(values, column)}" for column in NOTED_COLUMNS
        ]
        if stats["step_ms"] and first_ms:
            ratio = first_ms / stats["step_ms"]
            row[f"speed_ratio/{name}"] = ratio
            cells.append(f"{ratio:.2f} times as fast")
        baseline = "baseline" if values is rows[0] else f"no pair of runs ({stats['status']})"
        texts[f"verdict/{name}"] = stats["verdict"] or baseline
        texts[f"kernel/{name}"] = stats["kernel"]
        notes.append("; ".join([f"{stats['variant']}: {texts[f'verdict/{name}']}", *cells]))
        table.append(stats)
    files = {"picture": "comparison.png"}
    return WandbRun(
        folder=str(out),
        wandb_dir=str(out),
        id=run_id,
        earlier_folders=f"wandb/*run-*-{run_id}",
        name=f"{out.name} comparison",
        job_type="compare",
        group=config.group or os.environ.get("WANDB_RUN_GROUP") or out.name,
        notes="\n".join(notes),
        config=_list_common_settings(settings),
        rows=[row | {"comparison": table} | files],
        end={"exit_code": 0, "summary": texts},
    )


def _list_common_settings(settings: list[Variant]) -> dict[str, Any]:
    """The settings that all runs share, as nested dicts."""
    common = dict(settings[0].config)
    for setting in settings:
        common = {key: value for key, value in common.items() if setting.config.get(key) == value}
    return nest_dict(common)


def restore_training_run(run: Run) -> WandbRun:
    """The wandb run of a run that has ended. A run without an id gets one."""
    summary = run.summary
    name = summary["name"]
    if not run.folder.resolve().as_posix().endswith(f"/{name}"):  # the folder was copied
        name = run.folder.name
    summary |= {"wandb_id": make_wandb_id(summary, name), "name": name}
    write_json(run.folder / "summary.json", summary)
    config = read_file(run.folder / "config.yaml", parse_yaml)
    end = {"exit_code": EXIT_CODES[run.status], "summary": make_training_summary(summary)}
    return make_training_run(run.folder, config, summary, end)
