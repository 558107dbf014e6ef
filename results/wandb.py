"""Exports to wandb: python -m results.wandb FOLDER [--mode online]

FOLDER is a run, a sweep, a bench, or the output of compare.py. wandb gets the content of its files,
and nothing reads from wandb. train.py starts this command as a child process, which follows
metrics.jsonl: training never waits for wandb, and continues if wandb fails.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from shutil import rmtree
from textwrap import shorten
from threading import Timer
from typing import Any

from common.errors import EXIT_CODES
from common.files import read_json
from common.process import run_main
from results.metrics import DISTINCT, METRICS
from results.read import is_sweep, read_curves, read_table
from training.config import WandbConfig
from training.run_folder import read_config, summary_key

# for the last rows of a run; schedulers kill a process about 30 s after SIGTERM
FINISH_TIMEOUT_S = 15
NOTICE_S = 3  # a longer wait is explained
POLL_INTERVAL_S = 0.2
# A folder that can be exported has one of them.
EXPORTED_FILES = ("metrics.jsonl", "attention.csv", "sweep.json", "comparison.csv")
PINNED_KEYS = ("attention.resolved", "dtype", "device_name")  # wandb shows them first


# The parent: train.py, bench.py or a sweep


class WandbExport(AbstractContextManager):
    """Context manager: a child process that exports a folder. On exit, waits for its end.

    Enter it before the run folder is opened: it then exits when summary.json is final.
    config: the section wandb of a config. Raises UserError for what wandb would refuse.
    """

    process = None

    def __init__(self, config: dict[str, Any]):
        self.mode = WandbConfig(**config).resolve(os.environ).mode

    def start(self, folder: Path) -> None:
        """Start the child process, unless it is disabled."""
        if self.mode == "disabled":
            return
        self.scratch = folder.resolve() / ".wandb-temporary"
        wandb_dir = find_wandb_dir(folder.resolve())
        command = [sys.executable, "-P", "-u", "-m", "results.wandb", str(folder)]
        command += ["--mode", self.mode, "--follow", str(os.getpid())]
        environment = {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONUTF8": "1",
            # The home folder can be read-only. `wandb sync` needs the data of offline runs.
            "TMPDIR": str(self.scratch),
            "WANDB_CACHE_DIR": str(wandb_dir),  # logs, in its folder wandb
            "WANDB_DATA_DIR": str(wandb_dir / "wandb"),
        }
        try:
            self.scratch.mkdir(exist_ok=True)
            self.process = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process
            )
        except OSError as error:  # no memory, for example
            print(f"wandb: {error}; continuing without wandb")

    def __exit__(self, *error: object) -> None:
        """Wait. The run has ended, so Ctrl-C only ends the wait."""
        if self.process is None:
            return
        notice = Timer(NOTICE_S, print, ["waiting for wandb; Ctrl-C ends the wait"])
        with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            notice.start()
            self.process.wait(FINISH_TIMEOUT_S)
        notice.cancel()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(KeyboardInterrupt):
            self.process.wait()
        code = self.process.returncode
        rmtree(self.scratch, ignore_errors=True)
        if code not in (0, 1):  # 1: the child process has printed the reason
            print(f"wandb did not finish (exit code {code}); the run folder has all results")


# The child process


def main() -> int:
    """Export a folder. Returns exit code 1 if that fails."""
    parser = ArgumentParser("python -m results.wandb", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--mode", default="offline", choices=("offline", "online"))
    parser.add_argument("--follow", type=int, metavar="PID", help="process that writes the folder")
    arguments = parser.parse_args()
    if not any((arguments.folder / name).exists() for name in EXPORTED_FILES):
        advice = "set runs/NAME, runs/sweeps/NAME or runs/bench/NAME"
        parser.error(f"{arguments.folder} is not the folder of a run, a sweep or a bench; {advice}")
    os.nice(10)  # training has priority
    try:
        export_folder(arguments.folder, arguments.mode, arguments.follow)
    except Exception as error:  # wandb can raise anything
        again = f"python -m results.wandb {shlex.quote(str(arguments.folder))}"
        print(f"wandb: {shorten(repr(error), 250)}; log the folder later with {again}")
        return 1
    if arguments.mode == "offline":
        wandb_folder = find_wandb_dir(arguments.folder) / "wandb"
        print(f"upload   wandb sync {shlex.quote(str(wandb_folder))}")
    return 0


def export_folder(folder: Path, mode: str, writer: int | None) -> None:
    """Export a run, a bench or a comparison.

    writer: process that writes the folder. None: export all runs of a sweep, too.
    """
    if (folder / "metrics.jsonl").exists():
        export_run(folder, mode, writer)
    elif (folder / "attention.csv").exists():
        export_bench(folder, mode)
    else:
        if writer is None:
            for metrics in sorted(folder.glob("*/metrics.jsonl")):
                export_run(metrics.parent, mode, writer)
        export_comparison(folder, mode)


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read config.yaml and summary.json of a run, a bench, or the first run of a comparison.

    Compared runs that were refused are left out. Both are empty if there is no other.
    """
    compared = read_json(folder / "comparison.json").get("runs", [])
    for run in [folder, *(folder / name for name in compared)]:
        summary = read_json(run / "summary.json")
        is_left_out = run != folder and summary.get("status") == "refused"
        if (run / "config.yaml").exists() and not is_left_out:
            return read_config(run), summary
    return {}, {}


def find_wandb_dir(folder: Path) -> Path:
    """The folder that contains the folder `wandb` of a run. All jobs of a sweep share one."""
    return folder.parent if is_sweep(folder.parent) else folder


def start_run(
    folder: Path, mode: str, x_axis: str | None, group: str | None = None, **arguments: Any
) -> Any:
    """Start or resume a wandb run, and remove what was logged of it offline.

    x_axis: metric that the others are plotted over. group: if no other is set.
    arguments: of wandb.init.
    """
    import wandb

    config, _ = read_run(folder)
    options = WandbConfig(**config.get("wandb", {})).resolve(os.environ)
    wandb_dir = find_wandb_dir(folder).resolve()
    for earlier in wandb_dir.glob(f"wandb/offline-run-*-{arguments.get('id')}"):
        rmtree(earlier)
    run = wandb.init(
        **arguments,
        dir=wandb_dir,
        mode=mode,
        project=options.project,
        entity=options.entity,
        group=options.group or group,
        tags=options.tags,
        resume="allow" if mode == "online" else None,
        settings={
            "silent": True,
            "console": "off",
            "program": sys.argv[0],
            "init_timeout": 10,  # seconds; less than FINISH_TIMEOUT_S
            "x_stats_pid": os.getppid(),  # the process that trains
        },
    )
    if mode == "online":
        print(f"wandb    {run.url}")
    run.define_metric("*", step_metric=x_axis)
    return run


def to_media(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Convert a row for wandb: names of pictures to pictures, and lists of rows to tables."""
    import wandb

    media = dict(row)
    for key, value in row.items():
        if isinstance(value, list):
            data = [list(item.values()) for item in value]
            media[key] = wandb.Table(columns=list(value[0]), data=data)
        elif isinstance(value, str):
            media[key] = wandb.Image(str(folder / value))
    return media


# A training run


def export_run(folder: Path, mode: str, writer: int | None) -> None:
    """Export a training run, from the first step that the server lacks."""
    config, summary = read_run(folder)
    measured = {summary_key(name) for name in read_curves(folder)}
    facts = {key: summary[key] for key in summary.keys() - measured if not is_result(key)}
    attention = config["attention"] | summary["attention"]
    sys.argv = shlex.split(summary["command"])[1:]  # without "python"; wandb shows it
    run = start_run(
        folder,
        mode,
        x_axis="step",
        group=folder.parent.name if is_sweep(folder.parent) else None,
        id=summary["wandb_id"],
        name=folder.name,
        job_type="train",
        config=config | facts | {"attention": attention, "data": config["data"]},
    )
    run.pin_config_keys(PINNED_KEYS)
    for name, metric in METRICS.items():
        run.define_metric(name, step_metric="step", **metric.wandb)
    for row in follow_rows(folder, writer):
        if "sample" in row:
            row["sample"] = [{"step": row["step"], "text": row["sample"]}]
        if row["step"] >= run.starting_step and is_logged(row):
            run.log(to_media(row, folder), step=row["step"], commit=True)
    _, summary = read_run(folder)
    run.summary.update({key: summary[key] for key in filter(is_result, summary)})
    run.summary["kernel"] = attention["resolved"]
    if summary["status"] == "failed":
        run.alert(folder.name, summary["error"])
    if summary["status"] == "finished" and config["wandb"]["log_model"]:
        run.log_model(folder / "checkpoints" / "best.pt")
    run.finish(EXIT_CODES.get(summary["status"], 1))


def is_result(key: str) -> bool:
    """Whether a key of summary.json is a result. The other keys are known when a run starts."""
    is_metric = key in METRICS and METRICS[key].compare != DISTINCT
    return is_metric or key.startswith(("best_", "last_"))


def is_logged(row: dict[str, Any]) -> bool:
    """Whether wandb gets a row of metrics.jsonl: every evaluation, otherwise the step decides.

    wandb draws at most some thousand points. It gets the first 2,000 steps, and 1,000 steps of
    each interval [N, 2N) after them.
    """
    interval = 2 ** (max(1, row["step"] // 1000).bit_length() - 1)
    return "val/loss" in row or row["step"] % interval == 0


def follow_rows(folder: Path, writer: int | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of metrics.jsonl. With a writer, wait for more rows until the run has ended.

    If the writer was killed, this process exits: all rows are exported when the run resumes.
    """
    with open(folder / "metrics.jsonl", encoding="utf-8") as file:
        incomplete = ""
        while True:
            summary = read_json(folder / "summary.json")
            *lines, incomplete = (incomplete + file.read()).split("\n")
            yield from map(json.loads, lines)
            if writer is None or summary["status"] != "running":
                return
            if os.getppid() != writer:
                os._exit(1)
            time.sleep(POLL_INTERVAL_S)


# Tables: a bench and a comparison


def export_bench(folder: Path, mode: str) -> None:
    """Export a bench: a run for each backend, with T as the x axis."""
    config, summary = read_run(folder)
    fastest = [f"{case}: {backend}" for case, backend in summary.pop("fastest").items()]
    table = read_table(folder / "attention.csv")
    for backend in dict.fromkeys(row["backend"] for row in table):
        rows = [row for row in table if row["backend"] == backend]
        kernels = dict.fromkeys(row["resolved"] for row in rows if row["resolved"])
        attention = {"requested": backend, "resolved": ", ".join(kernels) or None}
        run = start_run(
            folder,
            mode,
            x_axis="T",
            group=folder.name,
            name=backend,
            job_type="bench",
            notes="\n".join(["fastest backends:", *fastest]),
            config=config | summary | {"attention": attention},
        )
        for row in rows:
            run.log(name_columns(row, "{phase} {mask} {dtype}") | {"T": row["T"]})
        run.log(to_media({"table": rows, "picture": "attention.png"}, folder))
        run.finish()


def export_comparison(folder: Path, mode: str) -> None:
    """Export a comparison. The comparison of a sweep that is continued is the same wandb run."""
    _, summary = read_run(folder)
    sweep_id = summary.get("wandb_id") if is_sweep(folder) else None
    rows = read_table(folder / "comparison.csv")
    table = [format_row(row) for row in rows]
    sentences = read_json(folder / "comparison.json").get("sentences", [])
    run = start_run(
        folder,
        mode,
        x_axis=None,
        group=folder.name,
        id=sweep_id and f"{sweep_id}-comparison",
        name="comparison" if folder.name == "comparison" else f"{folder.name} comparison",
        job_type="compare",
        notes="\n".join([*sentences, *map(join_cells, table)]),
    )
    for row in rows:
        run.summary.update(name_columns(row, "{variant}"))  # single numbers need no panels
    run.log(to_media({"table": table, "picture": "comparison.png"}, folder))
    run.finish()


def name_columns(row: dict[str, Any], label: str) -> dict[str, Any]:
    """Metrics COLUMN/LABEL of a row. Sizes of tensors, such as T, are upper case, and left out.

    label: format of the label, with names of columns.
    """
    name = re.sub(r"\W+", "_", label.format(**row))
    return {f"{key}/{name}": value for key, value in row.items() if key.islower()}


def join_cells(cells: dict[str, str]) -> str:
    """One line with the known values of a table's row."""
    return "; ".join(f"{header} {cell}" for header, cell in cells.items() if cell)


def format_row(row: dict[str, Any]) -> dict[str, str]:
    """The columns of the terminal's table, status and verdict. Unknown values are empty."""
    cells = {}
    for name, metric in METRICS.items():
        value = row.get(name.replace("/", "_"))
        if metric.header:
            cells[metric.header] = "" if value is None else metric.format(value)
    return cells | {"status": row["status"], "verdict": row["verdict"] or ""}


if __name__ == "__main__":
    sys.exit(run_main(main))
