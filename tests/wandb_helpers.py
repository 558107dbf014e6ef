"""Reads the files that wandb has written offline, with wandb's own reader."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any


class OfflineRun:
    """The content of a folder that wandb has written: <folder>/wandb/offline-run-TIME-ID."""

    def __init__(self, folder: Path):
        (file,) = folder.glob("run-*.wandb")
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        records: dict[str, list[dict]] = defaultdict(list)
        for line in printed.splitlines():
            record = json.loads(line)
            records[record["type"]].append(record[record["type"]])
        self.folder = folder
        self.run: dict[str, Any] = records["run"][0]  # run_id, display_name, run_group, ...
        self.config: dict[str, Any] = self.run["config"]["update"]
        self.rows = [record["item"] for record in records["history"]]  # nested keys have periods
        self.summary: dict[str, Any] = {}
        for record in records["summary"]:
            self.summary |= record.get("update", {})
        # of define_metric
        self.metrics = {record.get("name", "*"): record for record in records["metric"]}
        self.artifacts = records["artifact"]
        self.environment = records["environment"]
        self.exit_code: int = records["exit"][0].get("exit_code", 0)

    @property
    def steps(self) -> list[int]:
        return [row["_step"] for row in self.rows]

    def read_media(self, key: str) -> list[bytes]:
        """The files of a picture or a table, in order."""
        paths = [row[f"{key}.path"] for row in self.rows if f"{key}.path" in row]
        return [(self.folder / "files" / path).read_bytes() for path in paths]

    def read_table(self, key: str) -> list[list]:
        """The rows of all tables."""
        return [row for file in self.read_media(key) for row in json.loads(file)["data"]]


def read_offline_runs(folder: Path) -> dict[str, OfflineRun]:
    """Read all runs below <folder>/wandb, by name."""
    runs = [OfflineRun(path) for path in sorted(folder.glob("wandb/offline-run-*"))]
    assert len({run.run["display_name"] for run in runs}) == len(runs)
    return {run.run["display_name"]: run for run in runs}
