"""Writes report.html: verdicts, table, picture, configs and commands, on one page that loads no other file."""

from base64 import b64encode
from html import escape
from pathlib import Path

from common.console import pluralize
from common.files import atomic_write
from common.settings import format_value
from comparison.runs.read import Run, Setting
from comparison.runs.statistics import ROUNDING_STEPS, SettingStats
from comparison.runs.table import COLUMNS, choose_headers, list_notes, multiline

STYLE = """
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2rem } ol, ul { padding-left: 1.6rem }
div, pre { overflow-x: auto } pre, table { font-size: .85rem } table { border-collapse: collapse }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; white-space: pre }
img { width: 100%; max-width: 1000px } h1 ~ ul, summary { color: #666; font-size: .9rem }
"""
VERDICT_SENTENCES = {
    "equal losses": "All losses equal the losses of setting 1, bit by bit.",
    "same up to rounding": "The first {steps} steps have the losses of setting 1, up to rounding error, and the "
    "validation losses show no difference ({difference} nats per token).",
    "same for": "The first {steps} steps have the losses of setting 1, up to rounding error. Whether the validation "
    "losses differ ({difference} nats per token) needs three or more seeds.",
    "differs": "The training losses differ from setting 1 within the first {steps} steps, by more than rounding error: "
    "the settings do not compute the same function.",
    "lower loss": "The validation loss is lower than in setting 1: {difference} nats per token.",
    "higher loss": "The validation loss is higher than in setting 1: {difference} nats per token.",
    "no difference found": "These seeds show no difference from setting 1 ({difference} nats per token). They find a "
    "true difference of {detectable} with a probability of 80 %.",
    "not tested": "One pair of runs cannot show whether the loss differs from setting 1 ({difference} nats per token): "
    "train a second seed.",
}


def write_report(
    settings: list[Setting], rows: list[SettingStats], picture: Path, path: Path
) -> None:
    """Write the page. All text is escaped. picture: PNG file to embed."""
    runs = [run for setting in settings for run in setting.runs]
    title = f"Comparison of {pluralize(len(runs), 'run')} in {pluralize(len(rows), 'setting')}"
    columns = [
        [header, *(multiline(COLUMNS[header](row)) for row in rows)]
        for header in choose_headers(rows)
    ]
    png = b64encode(picture.read_bytes()).decode()
    parts = [
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style><h1>{title}</h1>',
        f"<ol>{''.join(_describe(row, rows[0]) for row in rows)}</ol>",
        _table(columns),
        _list(list_notes(rows)),
        f'<img alt="validation loss, divergence, step time and memory" src="data:image/png;base64,{png}">',
        f"<h2>Settings</h2>{_describe_configs(settings)}<h2>Runs</h2>{_describe_runs(runs)}",
    ]
    atomic_write(path, "\n".join(parts) + "\n")


def _describe(row: SettingStats, first: SettingStats) -> str:
    """Describe the verdict on a setting in sentences, as an item of a list."""
    if row.verdict is not None:
        template = next(
            text for verdict, text in VERDICT_SENTENCES.items() if row.verdict.startswith(verdict)
        )
        difference, detectable = (COLUMNS[header](row) for header in ("difference", "detectable"))
        text = template.format(difference=difference, detectable=detectable, steps=ROUNDING_STEPS)
    elif not row.finished:
        text = f"No run finished ({row.status})."
    elif row is not first:
        text = "No run has the seed and the data of a finished run of setting 1."
    else:
        text = "The other settings are compared with this one."
    if row is not first and row.step_ms and first.step_ms and row.device_name == first.device_name:
        if row.has_noisy_steps or first.has_noisy_steps:
            text += " Whether its steps are faster is unknown: the machine was busy."
        elif row.step_ms_q1 <= first.step_ms_q3 and first.step_ms_q1 <= row.step_ms_q3:
            text += " Its step times show no difference from setting 1: the quartiles overlap."
        else:
            text += (
                f" Its steps take {row.step_ms / first.step_ms:.2f} times as long as in setting 1."
            )
    return f"<li><b>{escape(row.setting)}</b>: {escape(text)}</li>"


def _describe_configs(settings: list[Setting]) -> str:
    """Make a table of the keys whose values differ, with a column per setting."""
    configs = [setting.config for setting in settings]
    keys = dict.fromkeys(key for config in configs for key in config)
    changed = [
        key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)
    ]
    lines = [
        [key, *(format_value(config[key]) if key in config else "" for config in configs)]
        for key in changed
    ]
    return _table([["key", *range(1, len(settings) + 1)], *lines])


def _describe_runs(runs: list[Run]) -> str:
    """Make a table of all runs, and list the versions of their software and their commands."""
    keys = {"status": "status", "last_val_loss": "val loss", "step": "steps", "commit": "commit"}
    lines = [[run.folder, run.seed, *(run.summary.get(key) for key in keys)] for run in runs]
    versions = [", ".join(map(" ".join, run.summary.get("versions", {}).items())) for run in runs]
    commands = [run.summary["command"] for run in runs if run.summary.get("command")]
    table = _table([["run", "seed", *keys.values()], *lines]) + _list(
        [*dict.fromkeys(filter(None, versions))]
    )
    return f"{table}<details><summary>commands</summary><pre>{escape(chr(10).join(commands))}</pre></details>"


def _list(texts: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def _table(lines: list[list]) -> str:
    """Make a table that scrolls within its box if it is wider than the page. The first line has the headers."""
    html = ""
    for index, line in enumerate(lines):
        tag = "td" if index else "th"
        texts = [
            "" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell)
            for cell in line
        ]
        html += f"<tr>{''.join(f'<{tag}>{escape(text)}</{tag}>' for text in texts)}</tr>"
    return f"<div><table>{html}</table></div>"
