"""docs/defaults.md shows the default value of every key of train.py."""

import textwrap
from dataclasses import asdict

import docs_helpers as docs
from helpers import ROOT

from common.settings import flatten_dict, format_value
from training.config import RunConfig
from training.presets import PRESETS, SIZES

PAGE = ROOT / "docs/defaults.md"
WIDTH = 100


def format_defaults() -> str:
    """The default values, one paragraph per section, and the values of the presets."""
    sections: dict[str, list[str]] = {}
    for key, value in flatten_dict(asdict(RunConfig(preset="auto"))).items():
        section, _, name = key.rpartition(".")
        mark = "*" if key in PRESETS else ""
        sections.setdefault(section, []).append(f"{name}={format_value(value)}{mark}")
    lines = []
    for section, values in sections.items():
        first = f"{section}." if section else ""
        lines += textwrap.wrap(
            " ".join(values), WIDTH, initial_indent=f"{first:13}", subsequent_indent=" " * 13
        )
    lines += ["", f"{'* is the value of a preset:':31}" + "".join(f"{size:>8}" for size in SIZES)]
    for key, values in PRESETS.items():
        lines.append(f"{key:31}" + "".join(f"{value:>8g}" for value in values))
    return "\n".join(lines)


def test_page_shows_all_defaults():
    (block,) = [lines for _, language, lines in docs.blocks(PAGE) if language == ""]
    expected = format_defaults()
    assert "\n".join(block) == expected, f"replace the block of {PAGE.name} by\n{expected}"
