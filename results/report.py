"""Writes report.html: table, picture, configs and commands. The page loads no other file."""

from base64 import b64encode
from html import escape
from pathlib import Path
from typing import Any

from common.console import pluralize
from common.files import atomic_write
from common.settings import format_value
from results.read import Run, Setting
from results.statistics import SettingStats
from results.table import choose_headers, format_cell, list_notes, multiline

STYLE = """
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1rem;
       overflow-wrap: anywhere }
h1 { font-size: 1.6rem }
h2 { font-size: 1.2rem; margin-top: 2rem }
ul { padding-left: 1.6rem }
div { overflow-x: auto }
table { font-size: .85rem; border-collapse: collapse; min-width: 100% }
th, td { padding: .3rem .7rem; border-bottom: 1px dotted; text-align: left; vertical-align: top;
         white-space: pre }
img { width: 100%; min-width: 45rem; max-width: 1500px }
ul { font-size: .9rem; opacity: .7 }
"""
# Keys of summary.json, and headers.
RUN_COLUMNS = {
    "status": "status",
    "last_val_loss": "val loss",
    "step": "steps",
    "commit": "commit",
    "versions": "versions",
    "command": "command",
}


def write_report(
    settings: list[Setting], rows: list[SettingStats], picture: Path, path: Path
) -> None:
    """Write the page. All text is escaped. picture: PNG file to embed."""
    runs = [run for setting in settings for run in setting.runs]
    title = f"Comparison of {pluralize(len(runs), 'run')} in {pluralize(len(rows), 'setting')}"
    png = b64encode(picture.read_bytes()).decode()
    alt = "validation loss, divergence, step time and memory"
    parts = [
        '<!DOCTYPE html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>",
        _statistics_table(rows),
        _list(list_notes(rows)),
        f'<div><img alt="{alt}" src="data:image/png;base64,{png}"></div>',
        "<h2>Settings</h2>",
        _config_table(settings),
        "<h2>Runs</h2>",
        _run_table(runs),
    ]
    atomic_write(path, "\n".join(parts) + "\n")


def _statistics_table(rows: list[SettingStats]) -> str:
    """The table of the terminal with more columns, and turned: a column per setting."""
    lines = []
    for header in choose_headers(rows):
        cells = [multiline(format_cell(row, header)) for row in rows]
        lines.append([header, *cells])
    return _table(lines)


def _config_table(settings: list[Setting]) -> str:
    """Make a table of the keys whose values differ, with a column per setting."""
    configs = [setting.config for setting in settings]
    lines = [["key", *range(1, len(settings) + 1)]]
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [config.get(key) for config in configs]
        if any(value != values[0] for value in values):
            lines.append([key, *values])
    return _table(lines)


def _run_table(runs: list[Run]) -> str:
    lines = [["run", "seed", *RUN_COLUMNS.values()]]
    for run in runs:
        values = [run.summary.get(key) for key in RUN_COLUMNS]
        lines.append([run.folder, run.seed, *values])
    return _table(lines)


def _list(texts: list[str]) -> str:
    items = [f"<li>{escape(text)}</li>" for text in texts]
    return f"<ul>{''.join(items)}</ul>"


def _table(lines: list[list[Any]]) -> str:
    """Make a table that scrolls within its box. The first line has the headers."""
    html = ""
    for index, line in enumerate(lines):
        tag = "td" if index else "th"
        texts = ["" if cell is None else format_value(cell) for cell in line]
        cells = [f"<{tag}>{escape(text)}</{tag}>" for text in texts]
        html += f"<tr>{''.join(cells)}</tr>"
    return f"<div><table>{html}</table></div>"
