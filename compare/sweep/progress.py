"""Progress of a sweep, read from the files of its runs, which may be on other machines."""

import json
import math
import threading
import time
from pathlib import Path

from common.console import ProgressBar, format_duration, format_number, pluralize
from common.run_dir import EXIT_CODES, read_summary
from compare.sweep.jobs import Job, shorten_reason

POLL_INTERVAL_S = 0.5


class SweepProgress:
    """Context manager: a progress bar on a terminal, and one line for each job that ends."""

    def __init__(self, jobs: list[Job], todo: list[Job]):
        self.jobs, self.waiting = jobs, {job.name: job for job in todo}
        self.name_width = max(len(job.name) for job in jobs)
        self.started = time.time()
        self.bar = ProgressBar(len(todo), write_line=lambda line: None)  # a log shows only one line per job
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> "SweepProgress":
        self.bar.__enter__()
        self.thread.start()
        return self

    def __exit__(self, *error) -> None:
        self.stop.set()
        self.thread.join()
        self.bar.__exit__(*error)

    def _poll(self) -> None:
        while not self.stop.wait(POLL_INTERVAL_S):
            self._update()
        self._update()

    def _update(self) -> None:
        """Print a line for each job that has ended since the last call, and move the bar."""
        running, details = 0.0, ""
        for job in list(self.waiting.values()):
            summary, row = read_summary(job.folder), read_last_row(job.folder)
            path = job.folder / "summary.json"
            if summary.get("status") in EXIT_CODES and path.stat().st_mtime >= self.started:
                del self.waiting[job.name]
                self.bar.print(f"{job.name:<{self.name_width}}  {_describe(summary)}")
            elif summary.get("status") == "running" and row:
                steps = job.config["train"]["steps"]
                running += row["step"] / steps if steps else 0.0
                details = f"{job.name} step {row['step']}" + (f"/{steps}" if steps else "")
        ended = len(self.jobs) - len(self.waiting)
        self.bar.update(
            self.bar.total - len(self.waiting) + running, f"{ended} of {pluralize(len(self.jobs), 'run')}", details
        )


def read_last_row(folder: Path) -> dict | None:
    """Read the last complete row of a run's metrics.jsonl; None if there is none yet."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))  # bytes; more than the longest row
        lines = file.read().split(b"\n")[:-1]
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        return None


def _describe(summary: dict) -> str:
    if summary["status"] != "finished":
        return f"{summary['status']}: {shorten_reason(summary)}"
    val_loss, step_ms = (summary.get(key) or math.nan for key in ("last_val_loss", "step_ms"))
    duration = format_duration(summary.get("wall_seconds") or 0)
    return f"val loss {val_loss:.4f}  {format_number(step_ms)} ms/step  {duration}"
