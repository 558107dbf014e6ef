"""report.html: a comparison as one page that loads nothing else, for a desktop or a phone, light or dark."""

import io
import re
from collections import Counter
from html import escape
from pathlib import Path

from common.console import pluralize
from common.errors import format_value
from common.plots import GREY, line_style, make_figure
from compare.runs.plot import draw_panels
from compare.runs.read import Run, Setting
from compare.runs.statistics import ROUNDING_STEPS, SettingStats
from compare.runs.table import COLUMNS, choose_headers, list_notes, multiline

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1b1b; --muted: #666; --line: #ddd }
@media (prefers-color-scheme: dark) { :root { --back: #16181c; --text: #e6e6e6; --muted: #a3a3a3; --line: #3a3d42 } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1rem;
       background: var(--back); color: var(--text); overflow-wrap: anywhere }
h1 { font-size: 1.6rem } ol, ul { padding-left: 1.6rem } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem }
.scroll, pre { overflow-x: auto } pre, table { font-size: .85rem; overflow-wrap: normal }
table { border-collapse: collapse } th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line);
       text-align: left; vertical-align: top; white-space: pre; font-variant-numeric: tabular-nums }
th { white-space: pre-wrap; max-width: 16rem; overflow-wrap: break-word }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--back); max-width: 45vw;
       padding-left: 0; overflow-wrap: anywhere; white-space: normal; min-width: 5.5rem }
.plots { display: grid; gap: 1rem 2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)) }
figure { margin: 0 } figure svg { width: 100%; height: auto } figcaption { font-weight: 600 }
svg text { fill: currentColor; font-family: inherit !important } .swatch { width: 2.2rem; height: .6rem }
.notes, summary { color: var(--muted); font-size: .9rem }
"""
VERDICT_SENTENCES = {
    "equal losses": "All losses equal those of setting 1, bit by bit.",
    "same up to rounding": "The first {steps} steps have the losses of setting 1, up to rounding error, and the "
    "validation losses show no difference ({difference} nats per token).",
    "same for": "The first {steps} steps have the losses of setting 1, up to rounding error. Whether the validation "
    "losses differ ({difference} nats per token) needs three or more seeds.",
    "differs": "The training losses differ from those of setting 1 within the first {steps} steps, by more than "
    "rounding error: the settings do not compute the same function.",
    "lower loss": "The validation loss is lower than that of setting 1: {difference} nats per token.",
    "higher loss": "The validation loss is higher than that of setting 1: {difference} nats per token.",
    "no difference found": "These seeds show no difference from setting 1 ({difference} nats per token). They find a "
    "true difference of {detectable} with a probability of 80 %.",
    "not tested": "One pair of runs cannot show whether its loss differs from that of setting 1 ({difference} nats per "
    "token): train a second seed.",
}


def write_report(settings: list[Setting], rows: list[SettingStats], path: Path) -> None:
    """Write the page. rows: statistics of the settings. Everything that comes from files is escaped."""
    runs = [run for setting in settings for run in setting.runs]
    # A column per setting: on a phone, a few settings fit.
    cells = [[header, *(multiline(COLUMNS[header](row)) for row in rows)] for header in choose_headers(rows)]
    title = f"Comparison of {pluralize(len(runs), 'run')} in {pluralize(len(rows), 'setting')}"
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><meta charset="utf-8"><title>{title}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>',
        f"<h1>{title}</h1>",
        _list([_describe(row, rows[0]) for row in rows], "ol"),
        _table(cells[0], cells[1:]),
        f'<div class="notes">{_list([escape(note) for note in list_notes(rows)])}</div>',
        f"<h2>Plots</h2>{_legend(rows)}{_plots(settings, rows)}",
    ]
    if reasons := [_explain(run) for run in runs if run.status != "finished"]:
        parts.append(f"<h2>Runs that did not finish</h2>{_list(reasons)}")
    parts += ["<h2>Settings</h2>", _config_differences(settings), "<h2>Runs</h2>", _describe_runs(runs)]
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _describe(row: SettingStats, first: SettingStats) -> str:
    """The verdict on a setting in sentences, as HTML."""
    sentences = []
    if row.verdict is not None:
        template = next(text for verdict, text in VERDICT_SENTENCES.items() if row.verdict.startswith(verdict))
        difference, detectable = (COLUMNS[header](row) for header in ("difference", "detectable"))
        values = {"difference": difference, "detectable": detectable, "steps": ROUNDING_STEPS}
        sentences.append(template.format(**values))
    elif not row.finished:
        sentences.append(f"No run finished ({row.status}).")
    elif row is not first:
        sentences.append("No run has the seed and the data of a finished run of setting 1.")
    else:
        sentences.append("The other settings are compared with this one.")
    if row is not first and row.step_ms and first.step_ms and row.device_name == first.device_name:
        if row.has_noisy_steps or first.has_noisy_steps:
            sentences.append("Whether its steps are faster is unknown: the machine was busy.")
        elif row.step_ms_q1 <= first.step_ms_q3 and first.step_ms_q1 <= row.step_ms_q3:
            sentences.append("Its step times show no difference from setting 1: the quartiles overlap.")
        else:
            sentences.append(f"Its steps take {row.step_ms / first.step_ms:.2f} times as long as those of setting 1.")
    return f"<b>{escape(row.setting)}</b>: {escape(' '.join(sentences))}"


def _explain(run: Run) -> str:
    return escape(": ".join(filter(None, [str(run.folder), run.status, run.summary.get("error")])))


def _legend(rows: list[SettingStats]) -> str:
    items = []
    for index, row in enumerate(rows):
        style = line_style(index, len(rows), 5.0)
        dashes = "" if style["linestyle"] == "-" else " ".join(str(3 * dash) for dash in style["linestyle"][1])
        line = f'<line x2="35" y1="5" y2="5" stroke="{style["color"]}" stroke-width="4" stroke-dasharray="{dashes}"/>'
        items.append(f'<svg class="swatch" viewBox="0 0 35 10">{line}</svg> {escape(row.setting)}')
    return _replace_colors(_list(items, "ol"))


def _plots(settings: list[Setting], rows: list[SettingStats]) -> str:
    height = 2.9 + 0.22 * max(0, len(rows) - 6)
    figures = [make_figure(4.8, 2.9), make_figure(4.8, 2.9), make_figure(4.8, height), make_figure(4.8, height)]
    draw_panels([figure.subplots() for figure in figures], settings, rows)
    return f'<div class="plots">{"".join(map(_to_html, figures))}</div>'


def _to_html(figure) -> str:
    """An inline SVG with the text color of the page, and the title as its caption."""
    from matplotlib import rc_context

    axes = figure.axes[0]
    title = axes.get_title(loc="left")
    axes.set_title("", loc="left")
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):  # text stays text; ids are unique on the page
        figure.savefig(file, format="svg", transparent=True)
    svg = file.getvalue()
    svg = re.sub(r"^.*?(?=<svg )|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r' (?:width|height|xmlns\S*)="[^"]*"', "", svg.partition(">")[0]) + ">" + svg.partition(">")[2]
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), svg)  # a tenth of a point
    return f"<figure><figcaption>{escape(title)}</figcaption>{_replace_colors(svg)}</figure>"


def _replace_colors(svg: str) -> str:
    return svg.replace("#000000", "currentColor").replace(GREY, "var(--muted)")


def _config_differences(settings: list[Setting]) -> str:
    """A table of the keys whose values differ, with a column per setting, and the config of the first setting."""
    configs = [setting.config or {} for setting in settings]
    known = [config for config in configs if config]
    if not known:
        return "<p>No run has started.</p>"
    keys = dict.fromkeys(key for config in known for key in config)
    changed = [key for key in keys if any(config.get(key) != known[0].get(key) for config in known)]
    lines = [[key, *(format_value(config[key]) if key in config else "" for config in configs)] for key in changed]
    table = _table(["key", *map(str, range(1, len(settings) + 1))], lines) if lines else "<p>All configs are equal.</p>"
    values = "\n".join(f"{key}={format_value(value)}" for key, value in known[0].items())
    return f"{table}{_details('complete config of the first setting', values)}"


def _describe_runs(runs: list[Run]) -> str:
    keys = ("status", "last_val_loss", "step")
    lines = [[str(run.folder), *(_show(value) for value in (run.seed, *map(run.summary.get, keys)))] for run in runs]
    versions = Counter(
        f"commit {run.summary.get('commit')}, " + ", ".join(" ".join(pair) for pair in run.summary["versions"].items())
        for run in runs
        if run.summary.get("versions")
    )
    commands = "\n".join(run.summary["command"] for run in runs if run.summary.get("command"))
    used = _list([escape(f"{pluralize(count, 'run')}: {text}") for text, count in versions.items()])
    return _table(["run", "seed", "status", "val loss", "steps"], lines) + used + _details("commands", commands)


def _show(value: float | str | None) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _details(summary: str, text: str) -> str:
    return f"<details><summary>{summary}</summary><pre>{escape(text)}</pre></details>"


def _list(items: list[str], tag: str = "ul") -> str:
    return f"<{tag}>{''.join(f'<li>{item}</li>' for item in items)}</{tag}>"


def _table(headers: list[str], rows: list[list[str]]) -> str:
    """A table that scrolls within its box if it is wider than the page."""
    lines = [("th", headers), *(("td", row) for row in rows)]
    html = (f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in line)}</tr>" for tag, line in lines)
    return f'<div class="scroll"><table>{"".join(html)}</table></div>'
