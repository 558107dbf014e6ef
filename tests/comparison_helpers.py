"""Folders of runs and sweeps, as train.py writes them, for the tests of the comparison."""

import json
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from results.compare import Row, compare_variants
from results.read import read_variants

CONFIG = {
    "device": "auto",
    "resume": True,
    "model.name": "small",
    "model.n_layer": 2,
    "model.dropout": 0.0,
    "attention.backend": "naive",
    "attention.flash_package": None,
    "optimizer.name": "adamw",
    "optimizer.lr": 0.001,
    "optimizer.beta": 0.9,
    "train.steps": 10,
    "wandb.mode": "offline",
    "wandb.group": None,
}
NEGLIGIBLE = 0.005
KERNEL = {"attention.backend": "flex"}  # changes the implementation
LR = {"optimizer.lr": 0.1}  # changes the training


def make_metrics(losses: Sequence[float], val: float) -> list[dict]:
    """Rows of metrics.jsonl: one per training loss, and two evaluations."""
    rows = [{"step": 0, "seconds": 0.0, "val/loss": 4.0}]
    for step, loss in enumerate(losses, 1):
        step_ms = 100.0 if step <= 5 else 10.0 + step
        speed = {"step_ms": step_ms, "tokens_per_second": 1000.0 + step}
        rows.append({"step": step, "seconds": float(step), "train/loss": loss} | speed)
    rows[-1]["val/loss"] = val
    return rows


def write_run(
    folder: Path,
    seed: int = 1,
    *,
    losses: Sequence[float] = (3.0, 2.0, 1.0),
    val: float = 1.0,
    status: str = "finished",
    error: str | None = None,
    changes: dict | None = None,
    **facts,
) -> Path:
    """Write a run folder. A refused run has no metrics.

    losses: training losses of steps 1, 2, ... val: validation loss of the last step.
    changes: values of the config that differ from CONFIG. facts: values of summary.json.
    """
    folder.mkdir(parents=True)
    config = CONFIG | (changes or {}) | {"seed": seed, "name": folder.name}
    nested = OmegaConf.create()
    for key, value in config.items():
        OmegaConf.update(nested, key, value)
    OmegaConf.save(nested, folder / "config.yaml")
    summary = {"name": folder.name, "status": status, "error": error}
    if status != "refused":
        lines = [json.dumps(row) + "\n" for row in make_metrics(losses, val)]
        (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
        kernel = {"requested": "a", "resolved": config["attention.backend"], "flash_package": None}
        summary |= {
            "step": len(losses),
            "best_val_loss": val,
            "last_val_loss": val,
            "last_val_bpb": val / 2,
            "peak_memory_bytes": 2**20,
            "device": "cpu",
            "device_name": "a chip",
            "dtype": "float32",
            "vocab_size": 65,
            "attention": kernel,
            "command": f"python train.py name={folder.name}",
        }
    text = json.dumps(summary | facts)
    (folder / "summary.json").write_text(text, encoding="utf-8")
    return folder


def write_sweep(folder: Path, jobs: list[str]) -> Path:
    """Write the folder of a sweep, without the runs of its jobs."""
    folder.mkdir(parents=True)
    text = json.dumps({"command": "python train.py -m ...", "jobs": jobs})
    (folder / "sweep.json").write_text(text, encoding="utf-8")
    return folder


def compare_rows(folders: list[Path]) -> list[Row]:
    """The rows of a comparison, without files."""
    return compare_variants(read_variants(folders), NEGLIGIBLE)
