"""Logs runs to wandb, in a process that WandbLogger starts: python -m training.wandb_process

The first line of stdin has the runs, as JSON. The second line says how the last run has ended. If
stdin ends without it, the process that trains was killed, and this process ends at once: when the
run resumes, all rows are logged again. Lines on stdout are for the user.
"""

import json
import os
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from shutil import rmtree
from threading import Thread
from typing import Any

POLL_INTERVAL_S = 1.0
# time between rows without an evaluation: in seconds, and as a part of the training time so far
MIN_ROW_INTERVAL_S = 0.25
MIN_ROW_INTERVAL = 1 / 4000
MAX_SAMPLES = 100  # rows of the table of samples, which has the newest ones
MAX_REASON_CHARS = 250
INIT_TIMEOUT_S = 10  # less than WandbLogger waits for the end of this process
PINNED_KEYS = ("attention.resolved", "dtype", "device_name")  # wandb shows them first
# File with the last step of a complete folder. A folder without it has no rows. It is not in the
# folder `files`, which wandb uploads.
LAST_STEP = "../last_step"


def main() -> None:
    """Log all runs. Prints how to see them, or one line if wandb fails."""
    os.nice(10)  # training has priority
    sys.stdout.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)
    request = json.loads(sys.stdin.readline())
    os.chdir(request["folder"])
    last_end: Future[dict] = Future()
    Thread(target=read_end, args=[last_end], daemon=True).start()
    hints = {}
    for run in request["runs"]:
        try:
            hints[log_run(request, run, last_end)] = None
        except Exception as error:  # wandb can raise anything
            reason = f"{type(error).__name__}: {one_line(error)}".removesuffix(": ")
            print(f"wandb: {reason}; continuing without wandb, {run['folder']} has all results")
            break
    for hint in hints:
        print(hint)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_REASON_CHARS].removesuffix(".")


def read_end(last_end: Future[dict]) -> None:
    """Wait for the second line of stdin."""
    line = sys.stdin.readline()
    if not line:
        os._exit(1)
    last_end.set_result(json.loads(line))


def log_run(request: dict[str, Any], run: dict[str, Any], last_end: Future[dict]) -> str:
    """Log a run, except rows that the server has.

    request, run: what WandbLogger sends, and a WandbRun of it.
    last_end: how the last run has ended, later.
    Returns the line of make_hint.
    """
    import wandb

    try:
        wandb_run, first_step = start_run(request, run)
    except wandb.Error as error:
        if request["mode"] != "online":
            raise
        print(f"wandb: {one_line(error)}; logging offline")
        wandb.teardown()
        request["mode"] = "offline"
        wandb_run, first_step = start_run(request, run)
    rows = run["rows"]
    if run["metrics"]:
        is_live = run["end"] is None
        metrics = follow_rows(Path(run["metrics"]), last_end if is_live else None)
        rows = select_rows(metrics, first_step)
    step = first_step - 1
    last_step_file = Path(wandb_run.dir, LAST_STEP)
    last_step_file.write_text(str(step), encoding="utf-8")
    for row in rows:
        step = row.get(run["x_axis"])
        wandb_run.log(to_media(row, Path(run["folder"])), step=step, commit=True)
    end = run["end"] or last_end.result()
    wandb_run.summary.update(end["summary"])
    if end.get("alert") and not wandb_run.offline:
        wandb_run.alert(run["name"], end["alert"])
    if end.get("model"):
        wandb_run.log_model(end["model"])
    wandb_run.finish(end["exit_code"])
    last_step_file.write_text(str(step), encoding="utf-8")
    return make_hint(wandb_run, run)


def make_hint(wandb_run: Any, run: dict[str, Any]) -> str:
    """A line with the address of a run, or with the command that uploads it."""
    if not wandb_run.offline:
        return f"wandb    {wandb_run.url}"
    was_online = any(Path(run["wandb_dir"]).glob(f"wandb/run-*-{run['id']}"))
    if was_online and run["metrics"]:
        # only this command knows which rows the server lacks
        return f"upload   python compare.py {shlex.quote(run['folder'])} wandb.mode=online"
    return f"upload   wandb sync {shlex.quote(run['wandb_dir'] + '/wandb')}"


def start_run(request: dict[str, Any], run: dict[str, Any]) -> tuple[Any, int]:
    """Start or resume a wandb run. Returns it, and the first step that the server does not have."""
    import wandb

    sys.argv = run["command"]  # wandb shows it
    last_step = remove_earlier_folders(run)
    arguments = {"dir": Path(run["wandb_dir"]).resolve(), "mode": request["mode"]}
    arguments |= {key: request[key] for key in ("project", "entity", "tags")}
    arguments |= {key: run[key] for key in ("name", "job_type", "group", "notes", "config")}
    if "WANDB_SWEEP_ID" not in os.environ:  # an agent chooses the id
        arguments["id"] = run["id"]
        arguments["resume"] = "allow" if request["mode"] == "online" else None
    settings = {
        "silent": True,
        "console": "off",
        "program": sys.argv[0],
        "init_timeout": INIT_TIMEOUT_S,
        "x_stats_pid": os.getppid(),  # the process that trains
    }
    wandb_run = wandb.init(**arguments, settings=settings)
    if wandb_run.url:
        print(f"wandb    {wandb_run.url}")
    wandb_run.pin_config_keys(PINNED_KEYS)
    for name, options in run["columns"].items():
        wandb_run.define_metric(name, step_metric=run["x_axis"], **options)
    return wandb_run, last_step + 1 if wandb_run.offline else wandb_run.starting_step


def remove_earlier_folders(run: dict[str, Any]) -> int:
    """Remove the folders of earlier processes that were not uploaded.

    Their rows are logged again. Returns the last step of the other folders; -1 without any.
    """
    last_step = -1
    pattern = run["earlier_folders"]
    for folder in Path(run["wandb_dir"]).glob(pattern) if pattern else ():
        is_uploaded = folder.name.startswith("run-") or any(folder.glob("*.sync*"))
        if not is_uploaded or not (folder / "files" / LAST_STEP).exists():
            rmtree(folder)
        elif folder.name.endswith(f"-{run['id']}"):  # not of a run that was copied
            (file,) = folder.glob("run-*.wandb")
            # wandb uploads a file whose end is missing again and again, unless it has this mark
            file.with_name(f"{file.name}.synced").touch()
            last_step = max(last_step, read_last_step(file))
    return last_step


def read_last_step(file: Path) -> int:
    """The last step in wandb's file; -1 without any. If wandb was killed, it lacks logged rows."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    printed = subprocess.run(command, capture_output=True, check=True).stdout
    last_step = -1
    for line in printed.splitlines():
        record = json.loads(line)
        if record["type"] == "history":
            last_step = record["history"]["item"]["_step"]
    return last_step


def follow_rows(path: Path, end: Future[dict] | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of metrics.jsonl, and wait for more until the run has ended.

    end: how it has ended, later. None: it has ended.
    """
    with open(path, "rb") as file:
        while True:
            is_over = end is None or end.done()  # then, all rows are in the file
            position = file.tell()
            for line in iter(file.readline, b""):
                if not line.endswith(b"\n"):  # another process writes the row now
                    file.seek(position)
                    break
                yield json.loads(line)
                position = file.tell()
            if is_over:
                return
            wait([end], POLL_INTERVAL_S)


def select_rows(rows: Iterable[dict[str, Any]], first_step: int) -> Iterator[dict[str, Any]]:
    """Yield all evaluations, with a table of samples, and a few other rows per second.

    wandb draws at most some thousand points, and logging a row takes about a millisecond.
    """
    samples = deque(maxlen=MAX_SAMPLES)
    next_s = 0.0
    for row in rows:
        if "sample" in row:
            samples.append(
                {"step": row["step"], "tokens": row["tokens"], "text": row.pop("sample")}
            )
            row["samples"] = list(samples)
        seconds = row["seconds"]
        if "val/loss" in row or seconds >= next_s:
            next_s = seconds + max(MIN_ROW_INTERVAL_S, MIN_ROW_INTERVAL * seconds)
            if row["step"] >= first_step:
                yield row


def to_media(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Convert a row for wandb: file names to pictures and pages, lists of rows to tables.

    Statistics of single heads are omitted: a picture has them.
    """
    import wandb

    media = {}
    for key, value in row.items():
        if isinstance(value, list):
            data = [list(item.values()) for item in value]
            media[key] = wandb.Table(columns=list(value[0]), data=data)
        elif isinstance(value, str):
            file = folder / value
            if file.suffix == ".html":
                media[key] = wandb.Html(str(file), inject=False)
            elif file.suffix == ".png" and file.exists():
                media[key] = wandb.Image(str(file))
        elif value is not None and "/head_" not in key:
            media[key] = value
    return media


if __name__ == "__main__":
    main()
