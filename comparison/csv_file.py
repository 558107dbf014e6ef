"""Writes tables of results as CSV files: attention.csv of a bench, comparison.csv of runs."""

import csv
import io
from dataclasses import asdict, fields
from pathlib import Path

from common.files import atomic_write


def write_csv(rows: list, path: Path) -> None:
    """Write dataclasses as rows, with a column for each field. None is an empty cell."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, [field.name for field in fields(rows[0])])
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    atomic_write(path, file.getvalue())
