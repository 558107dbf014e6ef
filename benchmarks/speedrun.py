"""Run a track of the CPU speedrun, and print its row for the table of records in docs/experiments/speedrun.md.

    python benchmarks/speedrun.py nanogpt-cpu tinyshakespeare.txt --change "smaller model"
    python benchmarks/speedrun.py nanogpt-gpu tinyshakespeare.txt -- train.steps=440
    python benchmarks/speedrun.py five-minutes mybook.txt

nanogpt-cpu: time to the loss of nanoGPT's CPU recipe on Tiny Shakespeare, 1.8982 nats per character.
nanogpt-gpu: time to the loss of its GPU recipe, 2.1203 bits per byte (1.4697 nats per character).
five-minutes: lowest validation loss on any text within five minutes, in bits per byte.

Each seed is a run of train.py with prepared data. Its time is the time of the complete process,
until the validation loss is in metrics.jsonl. Arguments after `--` are overrides for train.py.
The exit code is 1 if the row is no record: too few seeds, p of 0.01 or more, too much time, or more than two threads.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
MAX_P = 0.01
MAX_THREADS = 2


FIXED = {"device": "cpu", "train.init_from": None, "eval.windows": None}
FIXED |= {
    "data.val_fraction": 0.1,
    "data.val_path": None,
    "data.val_documents": None,
    "data.max_documents": None,
}


@dataclass(frozen=True)
class Track:
    """A goal: each run takes less than max_seconds, and the mean loss of min_seeds runs is below max_loss.

    overrides: of train.py. loss: its key in summary.json. fixed: settings that no override may change.
    """

    overrides: list[str]
    loss: str = "last_val_bpb"
    max_loss: float = math.inf
    max_seconds: float = math.inf
    min_seeds: int = 10
    fixed: dict[str, object] = field(default_factory=lambda: FIXED)


FIVE_MINUTES = ["device=cpu", "train.minutes=4.6", "wandb.mode=disabled"]
FIVE_MINUTES += ["eval.every=1000000", "eval.initial=false", "eval.windows=null"]
TRACKS = {
    "nanogpt-cpu": Track(
        ["experiment=shakespeare_char_cpu_fast"],
        loss="last_val_loss",
        max_loss=1.8982,
        fixed=FIXED | {"tokenizer.name": "char", "model.block_size": 64},
    ),
    "nanogpt-gpu": Track(["experiment=shakespeare_cpu_fast"], max_loss=2.1203),
    "five-minutes": Track(FIVE_MINUTES, max_seconds=300.0, min_seeds=3),
}


def main() -> int:
    words = [*sys.argv[1:], "--"]
    separator = words.index("--")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("track", choices=TRACKS)
    parser.add_argument(
        "text", type=Path, help="a text file; Tiny Shakespeare, except for five-minutes"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        help="number of runs, at least 2; a record needs 10, or 3 of five-minutes",
    )
    parser.add_argument(
        "--record", type=float, metavar="LOSS", help="former record of five-minutes, for p"
    )
    parser.add_argument("--machine", default="", help="name of the machine, for the row")
    parser.add_argument("--change", default="", help="description of the change, for the row")
    arguments = parser.parse_args(words[:separator])
    if not arguments.text.is_file():
        parser.error(f"{arguments.text} does not exist; give a text file")
    track, changes = TRACKS[arguments.track], words[separator + 1 : -1]
    num_seeds = track.min_seeds if arguments.seeds is None else arguments.seeds
    if num_seeds < 2:
        parser.error(f"--seeds {num_seeds} is too small for a standard deviation; set 2 or more")
    if arguments.record is not None and track.max_loss < math.inf:
        parser.error(f"--record is for five-minutes; {arguments.track} must reach {track.max_loss}")
    max_loss = track.max_loss if arguments.record is None else arguments.record
    overrides = [*track.overrides, f"data.path={arguments.text.resolve()}", *changes]
    # the speed of the machine is measured once, so that all seeds train the same model
    overrides.append(f"preset={select_preset(overrides)}")

    with tempfile.TemporaryDirectory() as folder:
        # prepares the data
        train(Path(folder), [*overrides, "train.steps=1", "train.minutes=null"], "prepare")
        fixed = track.fixed | {"data.path": str(arguments.text.resolve())}
        check_config(
            yaml.safe_load(Path(folder, "runs/prepare/config.yaml").read_text(encoding="utf-8")),
            fixed,
        )
        results = []
        for seed in range(1, num_seeds + 1):
            seconds, summary = train(Path(folder), [*overrides, f"seed={seed}"], f"seed-{seed}")
            results.append((seconds, summary[track.loss]))
            print(
                f"seed {seed:>2}   {seconds:8.2f} s   {track.loss} {summary[track.loss]:.4f}",
                flush=True,
            )
    seconds, losses = ([result[i] for result in results] for i in (0, 1))
    p = p_value(losses, max_loss) if max_loss < math.inf else 0.0
    cells = [
        str(date.today()),
        arguments.machine,
        arguments.change,
        f"{statistics.mean(seconds):.2f} ± {statistics.stdev(seconds):.2f}",
        str(len(results)),
        f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}",
        f"{p:.1g}" if max_loss < math.inf else "",
    ]
    print("\n| date | machine | change | seconds | seeds | loss | p |", "|---" * 7 + "|", sep="\n")
    print(f"| {' | '.join(cells)} |")
    reasons = []
    if num_seeds < track.min_seeds:
        reasons.append(f"it has {num_seeds} of {track.min_seeds} seeds")
    if max_loss == math.inf:
        reasons.append("it was compared with no record (set --record)")
    if p >= MAX_P:
        reasons.append(f"p is not below {MAX_P}")
    if max(seconds) > track.max_seconds:
        reasons.append(f"a run took {max(seconds):.1f} s")
    if summary["threads"] > MAX_THREADS:
        reasons.append(
            f"the runs used {summary['threads']} threads (set OMP_NUM_THREADS={MAX_THREADS})"
        )
    if reasons:
        print(f"\nno record: {', '.join(reasons)}")
    return int(bool(reasons))


def check_config(config: dict, fixed: dict[str, object]) -> None:
    """Exit with an error if a setting that defines the goal has another value."""
    for key, expected in fixed.items():
        value = config
        for part in key.split("."):
            value = value[part]
        if value != expected:
            expected = "null" if expected is None else expected
            sys.exit(f"{key}={value} changes the goal of the track; set {key}={expected}")


def select_preset(overrides: list[str]) -> str:
    """The preset that train.py selects; auto if it selects none."""
    command = [sys.executable, str(ROOT / "train.py"), *overrides, "--cfg", "job"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode != 0:
        sys.exit(result.returncode)
    return yaml.safe_load(result.stdout)["preset"] or "auto"


def train(folder: Path, overrides: list[str], name: str) -> tuple[float, dict]:
    """Run train.py. Returns (seconds until the last metrics are written, summary). Exits if it fails."""
    started = time.time()
    command = [sys.executable, str(ROOT / "train.py"), *overrides, f"name={name}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    run = folder / "runs" / name
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return (run / "metrics.jsonl").stat().st_mtime - started, summary


def p_value(losses: list[float], max_loss: float) -> float:
    """Probability of a mean this low if the true mean were max_loss: Student's t-test, one-sided.

    The losses must not all be equal.
    """
    degrees = len(losses) - 1
    t = (max_loss - statistics.mean(losses)) / (statistics.stdev(losses) / math.sqrt(len(losses)))
    # the integral of Student's density from t to infinity, with x = sqrt(degrees) tan(angle)
    angle = np.linspace(math.atan(t / math.sqrt(degrees)), math.pi / 2, 100_001)
    density = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(
        math.pi
    )
    return float(density * np.trapezoid(np.cos(angle) ** (degrees - 1), angle))


if __name__ == "__main__":
    sys.exit(main())
