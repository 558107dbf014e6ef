"""Repeats the first steps of runs on this machine, and compares the training losses with the recorded ones.

Each repeat is `python train.py` with the recorded config in a temporary run folder. Its schedule is that of the
recorded run; the process is killed after the last step to compare.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

import yaml

from common.console import ProgressBar
from common.errors import TrainingFailed, UserError
from common.run_dir import ROOT, make_new_folder, read_summary
from compare.runs.read import Run, read_settings
from compare.runs.statistics import ROUNDING_STEPS, rounding_tolerance

SCRIPT = Path(__file__).parents[2] / "train.py"
POLL_INTERVAL_S = 0.1
# Settings that have no effect on the losses of the first steps.
NO_EVALUATIONS = {"every": 10**12, "batches": 1, "attention_stats": False}
NO_CHECKPOINTS = {"every": 10**12, "optimizer": False}
NO_WANDB = {"mode": "disabled", "attention_maps": False}


def verify_runs(folders: list[Path], n_steps: int) -> int:
    """Repeat the first steps of all runs, and print a line for each. Returns the exit code: 1 if any is not verified.

    Runs without a step, such as refused ones, are skipped. Raises UserError for a folder that is not a run.
    """
    runs = [run for setting in read_settings(folders) for run in setting.runs]
    verified = []
    with ProgressBar(len(runs) * n_steps, write_line=lambda line: None) as bar:
        for index, run in enumerate(runs):

            def show(step: int, done: int = index * n_steps, name: str = run.folder.name) -> None:
                bar.update(done + step, name, f"step {step}/{n_steps}")

            try:
                is_verified, line = _verify(run, n_steps, show)
            except (UserError, TrainingFailed) as error:
                is_verified, line = False, f"failed: {error}"
            verified.append(is_verified)
            bar.print(f"{run.folder.name}: {line}")
    return 0 if all(verified) else 1


def _verify(run: Run, n_steps: int, show: Callable[[int], None]) -> tuple[bool, str]:
    """Whether the repeat agrees with the run, and the line to print."""
    if not (run.folder / "metrics.jsonl").exists():
        return True, f"{run.status}, without a step to repeat"
    recorded, rates = (_read_values(run.folder, key, n_steps) for key in ("train/loss", "lr"))
    if not recorded:
        return True, f"{run.status}, without a step to repeat"
    if run.config.get("train.minutes") is not None:
        return True, "not repeated: with train.minutes, the learning rate depends on the speed of the machine"
    repeated, repeated_rates, summary = _repeat(run, max(recorded), show)
    if any(repeated_rates.get(step) != rate for step, rate in rates.items() if step in repeated):
        return True, "not repeated: a setting of its learning rate, such as train.steps, was changed after its start"
    # a step without a finite loss in one of the two runs differs infinitely
    steps = [step for step in sorted({*recorded, *repeated}) if step <= max(recorded)]
    pairs = {step: (recorded.get(step, inf), repeated.get(step, inf)) for step in steps}
    differences = {step: abs(old - new) for step, (old, new) in pairs.items() if old != new}
    if not differences:
        return True, f"equal for {len(recorded)} steps"
    first, largest = min(differences), max(differences, key=lambda step: differences[step])
    tolerance = rounding_tolerance(run.summary)  # rounding errors of later steps have no bound
    is_rounding = all(
        difference <= tolerance * step * abs(pairs[step][0]) or (step > ROUNDING_STEPS and difference < inf)
        for step, difference in differences.items()
    )
    verdict = "rounding" if is_rounding else f"more than rounding, which is {tolerance:.0e} of the loss x the step"
    line = f"first difference at step {first}: {differences[first]:.1e} of {pairs[first][0]:.2f}"
    line += f", largest at step {largest}: {differences[largest]:.1e}" if largest != first else ""
    return is_rounding, f"{line} ({verdict}); {_describe_changes(run.summary, summary)}"


def _repeat(run: Run, last_step: int, show: Callable[[int], None]) -> tuple[dict[int, float], dict[int, float], dict]:
    """Train the first steps of a run again -> losses and learning rates by step, and summary.json.

    Raises UserError or TrainingFailed.
    """
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    config["train"] |= {"micro_batch_size": run.summary["micro_batch_size"], "patience": None, "profile": False}
    config["eval"] |= NO_EVALUATIONS
    config["eval"]["sample"]["max_new_tokens"] = 0
    config["checkpoint"] |= NO_CHECKPOINTS
    config["wandb"] |= NO_WANDB
    config["dtype"], config["resume"] = run.summary["dtype"], True
    config = {key: value for key, value in config.items() if key not in ("name", "text_size")}  # a preset's name
    optimizer = {"override /optimizer": config["optimizer"]["name"]}
    name = make_new_folder(ROOT, "verify")
    folder = ROOT / name
    try:
        (folder / "experiment").mkdir()
        recipe = {"defaults": [optimizer, "_self_"]} | config
        (folder / "experiment/repeat.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        with open(folder / "train.log", "wb") as log:
            command = [sys.executable, SCRIPT, "--config-dir", folder, "experiment=repeat", f"name={name}"]
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while child.poll() is None and max(losses := _read_values(folder, "train/loss"), default=0) < last_step:
                show(max(losses, default=0))
                time.sleep(POLL_INTERVAL_S)
        finally:
            child.kill()
            child.wait()
        losses = _read_values(folder, "train/loss")
        if max(losses, default=0) < last_step:
            lines = (folder / "train.log").read_text(errors="replace").split("\n")
            raise TrainingFailed(next((line for line in reversed(lines) if line), f"exit code {child.returncode}"))
        return losses, _read_values(folder, "lr"), read_summary(folder)
    finally:
        shutil.rmtree(folder)


def _read_values(folder: Path, key: str, last_step: float = inf) -> dict[int, float]:
    """{step: finite value} of a metric in the complete rows of metrics.jsonl, to which a process may be writing."""
    path, values = folder / "metrics.jsonl", {}
    for line in path.open() if path.exists() else ():
        row = json.loads(line) if line.endswith("\n") else {}
        if row.get("step", 0) > last_step:
            break
        if row.get(key) is not None:
            values[row["step"]] = row[key]
    return values


def _describe_changes(recorded: dict, now: dict) -> str:
    """What differs between the machines and the software of two summaries."""
    keys = ("device_name", "threads", "compile", "world_size", "commit")
    old, new = (
        {key: summary.get(key) for key in keys}
        | {"torch": summary.get("versions", {}).get("torch"), "kernel": summary.get("attention", {}).get("resolved")}
        for summary in (recorded, now)
    )
    changes = [f"{key} {old[key]}, now {new[key]}" for key in old if old[key] != new[key]]
    return "; ".join(changes) or f"same {', '.join(old)}"
