"""Progress of a sweep, read from the files of its runs, which may be on other machines."""

import math
import threading
import time

from common.console import ProgressBar, format_duration, format_number, pluralize
from common.errors import UserError
from common.run_dir import read_summary
from compare.sweep.jobs import Job, read_new_outcome

POLL_INTERVAL_S = 0.5


class SweepProgress:
    """Context manager: a progress bar on a terminal, and one line for each job that ends."""

    def __init__(self, jobs: list[Job], todo: list[Job]):
        self.jobs, self.waiting = jobs, list(todo)
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
        width, progress, details = max(len(job.name) for job in self.jobs), 0.0, ""
        for job in list(self.waiting):
            try:
                outcome, summary = read_new_outcome(job, self.started), read_summary(job.folder)
            except UserError:  # a damaged file: train_job reports it
                continue
            if outcome is not None:
                self.waiting.remove(job)
                line = _describe(summary) if outcome.status == "finished" else f"{outcome.status}: {outcome.reason}"
                self.bar.print(f"{job.name:<{width}}  {line}")
            elif summary.get("status") == "running":  # the step of its last checkpoint
                step, steps = summary.get("step", 0), job.config["train"]["steps"]
                progress += step / steps if steps else 0.0
                details = f"{job.name} step {step}" + (f"/{steps}" if steps else "")
        ended = len(self.jobs) - len(self.waiting)
        label = f"{ended} of {pluralize(len(self.jobs), 'run')}"
        self.bar.update(self.bar.total - len(self.waiting) + progress, label, details)


def _describe(summary: dict) -> str:
    val_loss, step_ms = (summary.get(key) or math.nan for key in ("last_val_loss", "step_ms"))
    duration = format_duration(summary.get("wall_seconds") or 0)
    return f"val loss {val_loss:.4f}  {format_number(step_ms)} ms/step  {duration}"
