"""Compares finished runs, and writes comparison.csv, comparison.png and report.html.

read.py groups runs into settings, statistics.py computes a row per setting, and the other files
show the rows.
"""

from pathlib import Path

from common.console import PlainConsole
from common.files import write_csv
from results.comparison_plot import plot_comparison
from results.read import read_settings
from results.report import write_report
from results.statistics import SettingStats, compute_stats
from results.table import TERMINAL_COLUMNS, list_notes, make_terminal_table

FILES = ("report.html", "comparison.png", "comparison.csv")


def compare(folders: list[Path], out: Path, difference: float | None = None) -> list[SettingStats]:
    """Compare runs, and write FILES.

    out: folder for the files, which is created if needed.
    difference: nats per token. The table then has a column with the number of seeds that find this
        difference.
    Returns statistics per setting. Raises UserError for a folder that is not a run and for a
    damaged file.
    """
    settings = read_settings(folders)
    rows = compute_stats(settings, difference)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(rows, out / "comparison.csv")
    plot_comparison(settings, rows, out / "comparison.png")
    write_report(settings, rows, out / "comparison.png", out / "report.html")
    return rows


def print_comparison(rows: list[SettingStats], out: Path) -> None:
    """Print the table, its notes, and the names of the files."""
    console = PlainConsole()
    console.print(make_terminal_table(rows))
    for note in list_notes(rows, TERMINAL_COLUMNS):
        console.print(note, soft_wrap=True)  # a command in a note can be copied
    console.print("report.html has more columns.")
    console.print_text(f"\nwritten  {'  '.join(str(out / name) for name in FILES)}")
