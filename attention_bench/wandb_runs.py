"""The results of a bench as wandb runs: one per backend and dtype, with T as the x axis."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attention_bench.config import BenchConfig
from attention_bench.results import find_fastest, group_rows
from training.wandb_logger import WandbRun, to_metric_name


def make_bench_runs(
    rows: list[dict], config: BenchConfig, environment: dict[str, Any], folder: Path
) -> list[WandbRun]:
    """The wandb runs of a bench.

    environment: of describe_environment.
    folder: the bench's folder, with attention.png.
    """
    settings = asdict(config)
    del settings["wandb"]
    dtypes = {row["dtype"] for row in rows}
    runs = []
    for (backend, dtype), lines in group_rows(rows, "backend", "dtype").items():
        answer = {}
        for row in find_fastest([row for row in rows if row["dtype"] == dtype]):
            answer[f"fastest/{to_metric_name(row['phase'])}"] = row["backend"]
        kernels = dict.fromkeys(row["resolved"] for row in lines if row["resolved"])
        attention = {"requested": backend, "resolved": ", ".join(kernels) or None}
        lines.sort(key=lambda row: row["T"])
        points = [_make_point(group) for group in group_rows(lines, "T").values()]
        points[-1] |= {"timings": lines, "picture": "attention.png"}
        runs.append(
            WandbRun(
                folder=str(folder),
                wandb_dir=str(folder),
                name=backend if len(dtypes) == 1 else f"{backend} {dtype}",
                job_type="bench",
                group=config.wandb.group or os.environ.get("WANDB_RUN_GROUP") or folder.name,
                config=settings | environment | {"dtype": dtype, "attention": attention},
                x_axis="T",
                columns={"*": {}},
                rows=points,
                end={"exit_code": 0, "summary": answer},
            )
        )
    return runs


def _make_point(rows: list[dict]) -> dict[str, Any]:
    """The columns of all phases at one T."""
    point: dict[str, Any] = {"T": rows[0]["T"]}
    for row in rows:
        values = {
            "ms": row["ms_median"],
            "ms_q1": row["ms_q1"],
            "ms_q3": row["ms_q3"],
            "tflops": row["flops_per_second"] and row["flops_per_second"] / 1e12,
            "memory_mib": row["peak_memory_bytes"] and row["peak_memory_bytes"] / 2**20,
            "error": row["error_y"],
            "error_gradients": row["error_gradients"],
        }
        title = row["phase"] if row["mask"] == "causal" else f"{row['phase']}, {row['mask']}"
        for name, value in values.items():
            point[f"{to_metric_name(title)}/{name}"] = value
    return point
