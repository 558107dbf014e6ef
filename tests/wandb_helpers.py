"""Reads the files that wandb has written offline, with wandb's own reader."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class OfflineRun:
    """The content of a folder that wandb has written."""

    folder: Path
    run: dict[str, Any] = field(default_factory=dict)  # run_id, display_name, run_group, ...
    config: dict[str, Any] = field(default_factory=dict)  # keys of wandb itself: _wandb. ...
    rows: list[dict[str, Any]] = field(default_factory=list)  # nested keys have periods
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, dict] = field(default_factory=dict)  # of define_metric
    artifacts: list[dict] = field(default_factory=list)
    program: list[str] = field(default_factory=list)  # and its arguments
    exit_code: int | None = None  # None: the run has not finished

    @property
    def id(self) -> str:
        return self.run["run_id"]

    @property
    def steps(self) -> list[int]:
        return [row["_step"] for row in self.rows]

    def media(self, key: str) -> list[Path]:
        """The files of a picture, table or page, in order."""
        paths = [row[f"{key}.path"] for row in self.rows if f"{key}.path" in row]
        return [self.folder / "files" / path for path in paths]

    def table(self, key: str) -> list[dict[str, Any]]:
        """The rows of the newest table."""
        table = json.loads(self.media(key)[-1].read_text(encoding="utf-8"))
        return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def read_offline_run(folder: Path) -> OfflineRun:
    """Read a folder offline-run-TIME-ID."""
    (file,) = folder.glob("run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result = OfflineRun(folder)
    for line in printed.splitlines():
        record = json.loads(line)
        content = record[record["type"]]
        match record["type"]:
            case "run":
                result.run = content
                result.config |= content["config"]["update"]
            case "config":
                result.config |= content["update"]
            case "history":
                result.rows.append(content["item"])
            case "summary":
                result.summary |= content.get("update", {})
            case "metric":
                result.metrics[content.get("name") or content["glob_name"]] = content
            case "artifact":
                result.artifacts.append(content)
            case "environment" if "program" in content:
                result.program = [content["program"], *content.get("args", [])]
            case "exit":
                result.exit_code = content.get("exit_code", 0)
    return result


def read_offline_runs(folder: Path) -> list[OfflineRun]:
    """Read all runs below <folder>/wandb, in the order of their start."""
    return [read_offline_run(path) for path in sorted(folder.glob("wandb/offline-run-*"))]
