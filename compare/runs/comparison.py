"""A comparison from folders to files, for compare.py and for whatever has just finished several runs."""

from pathlib import Path

from common.errors import UserError
from compare.runs.plot import draw
from compare.runs.read import is_sweep, read_settings
from compare.runs.statistics import Row, make_rows
from compare.runs.table import notes, terminal_table, write_csv, write_markdown


def compare(folders: list[Path], out: Path) -> list[Row]:
    """Compare the runs of run folders and sweep folders -> a row per setting.

    Writes comparison.csv, comparison.md and comparison.png into `out`, which is made where it is missing. Raises
    UserError for a folder that is no run or a damaged file, before anything is written.
    """
    settings = read_settings(folders)
    if not settings:
        raise UserError("there is no run to compare; name folders of runs, as in runs/NAME or runs/sweeps/NAME")
    rows = make_rows(settings)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a folder")
    out.mkdir(parents=True, exist_ok=True)
    write_csv(rows, out / "comparison.csv")
    draw(settings, rows, out / "comparison.png")
    write_markdown(rows, out / "comparison.md", "comparison.png")
    return rows


def show(rows: list[Row], out: Path) -> None:
    """Print the table, what to know beside it, and where it was written."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = 120
    console.print(terminal_table(rows, console))
    for note in notes(rows):
        console.print(note)
    print(f"\nwritten  {out / 'comparison.csv'}  {out / 'comparison.md'}  {out / 'comparison.png'}")


def default_out(folders: list[Path]) -> Path:
    """Where a comparison goes: into the sweep that it is of, otherwise to runs/comparison."""
    return folders[0] if len(folders) == 1 and is_sweep(folders[0]) else Path("runs/comparison")
