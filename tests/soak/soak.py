"""Soak test: kill and signal the commands at random moments, and compare the results.

    python tests/soak/soak.py                    100 tries; Linux, about half an hour on two cores
    python tests/soak/soak.py --tries 4 --seed 7

Each command first runs without a disturbance. Then it gets SIGKILL up to three times, or Ctrl-C,
SIGTERM or SIGHUP once, at a random moment. The same command must then finish with the same result:
weights, losses, tokens and samples are compared bit by bit. Prints each try.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["OMP_NUM_THREADS"] = "1"

from helpers import TEXT, TINY, load, metrics, summary, untimed  # noqa: E402
from run_helpers import read_files  # noqa: E402

TRAIN = [
    "train.py", *TINY, "train.steps=120", "eval.every=20", "checkpoint.every=7",
    "checkpoint.keep=2", "model.dropout=0.1",
]  # fmt: skip
COMMANDS = {
    "train": [*TRAIN, "name=a"],
    "teachers": [*TRAIN, "train.steps=40", "train.n_teachers=2", "name=t"],
    "prepare": ["prepare.py", "data=text", "data.path=long.txt", "tokenizer.vocab_size=400"],
    "sweep": [*TRAIN, "-m", "seed=1,2", "name=s"],
    "sample": [
        "sample.py", "run=a", "prompts=prompts.txt", "out=o.jsonl", "num_samples=40",
        "max_new_tokens=30",
    ],
}  # fmt: skip
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def read_results(folder: Path) -> list[Any]:
    """The results in a folder as comparable values: runs, prepared data and samples."""
    results: list[Any] = [read_files(path) for path in folder.glob("data/prepared/[!.]*")]
    results += [path.read_bytes() for path in folder.glob("o.jsonl")]
    with chdir(folder):
        for run in sorted(Path("runs").glob("**/metrics.jsonl")):
            name = str(run.parent.relative_to("runs"))
            facts = [summary(name)[key] for key in ("status", "step", "best_step", "best_val_loss")]
            num_checkpoints = len(list(run.parent.glob("checkpoints/*")))
            results.append([untimed(metrics(name)), facts, num_checkpoints])
            for kind in ("last", "best"):
                saved = load(name, kind)
                results.append([to_bytes(saved["model"]), to_bytes(saved["optimizer"])])
    return results


def to_bytes(value: Any) -> Any:
    """Replace tensors in nested dicts by their bytes."""
    if isinstance(value, dict):
        return {key: to_bytes(item) for key, item in value.items()}
    return value.numpy().tobytes() if hasattr(value, "numpy") else value


def start(command: str, folder: Path) -> subprocess.Popen:
    script, *words = COMMANDS[command]
    line = [sys.executable, str(ROOT / script), *words]
    with open(folder / "log", "a", encoding="utf-8") as log:
        return subprocess.Popen(line, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def finish(command: str, folder: Path) -> None:
    """Run a command to its end. Raises RuntimeError if it fails."""
    # sample.py replaces no file; one that exists is complete
    is_sampled = command == "sample" and (folder / "o.jsonl").exists()
    if not is_sampled and start(command, folder).wait() != 0:
        raise RuntimeError((folder / "log").read_text(encoding="utf-8", errors="replace")[-300:])


def kill_all(process: int) -> None:
    """SIGKILL for a process and its descendants (Linux), as after a crash of the machine."""
    children = []
    with suppress(OSError):
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            children += file.read_text(encoding="utf-8").split()
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    for child in children:
        kill_all(int(child))


def disturb(command: str, folder: Path, seconds: float) -> str:
    """Kill or signal a command at random moments. Returns what was done."""
    number = random.choice([0, 0, 1, 2, 3])
    for _ in range(number):
        process = start(command, folder)
        time.sleep(random.uniform(0, seconds))
        kill_all(process.pid)
        process.wait()
    if number > 0:
        return f"{number} kills"
    signum = random.choice(SIGNALS)
    process = start(command, folder)
    time.sleep(random.uniform(0, seconds))
    process.send_signal(signum)
    code = process.wait()
    # while Python itself starts, the signal kills it, or raises outside of the project
    has_traceback = str(ROOT) in (folder / "log").read_text(encoding="utf-8").partition("Trace")[2]
    if code not in (0, 75, -signum) and (code != 1 or has_traceback):
        raise RuntimeError(f"exit code {code} after {signum.name}")
    return signum.name


def soak(command: str, tries: int, parent: Path) -> int:
    """Disturb a command so often. Returns the number of failures."""
    inputs = parent / "inputs"
    folder = parent / command
    inputs.mkdir()
    for name, text in {"text": TEXT, "long": TEXT * 100, "prompts": "The 1\nThe 2\n"}.items():
        (inputs / f"{name}.txt").write_text(text, encoding="utf-8")
    if command == "sample":
        finish("train", inputs)
    shutil.copytree(inputs, folder)
    started = time.perf_counter()
    finish(command, folder)
    seconds = time.perf_counter() - started
    expected = read_results(folder)
    failures = 0
    for _ in range(tries):
        shutil.rmtree(folder)
        shutil.copytree(inputs, folder)
        done = failure = ""
        try:
            done = disturb(command, folder, seconds)
            finish(command, folder)
            failure = "" if read_results(folder) == expected else "another result"
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        failures += failure != ""
        print(f"{command}, {done}: {failure or 'same result'}", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    flags = parser.parse_args()
    random.seed(flags.seed)
    failures = 0
    for command in COMMANDS:
        with tempfile.TemporaryDirectory() as parent:
            failures += soak(command, max(1, flags.tries // len(COMMANDS)), Path(parent))
    print(f"failures: {failures}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
