"""Formats, the progress bar and the lines that replace it, and text that is safe to print."""

import re

import pytest

from common.console import (
    PlainConsole,
    ProgressBar,
    format_duration,
    format_memory,
    format_number,
    format_si,
    make_table,
    pluralize,
)
from common.errors import UNPRINTABLE


def test_progress_line_shows_the_remaining_time_at_the_mean_speed(clock, capsys):
    with ProgressBar(total=100, initial=40) as bar:
        clock[0] += 20
        bar.show(60, "step 60", "loss 1.0")  # 20 of the 60 that were left took 20 s
    assert capsys.readouterr().out == "step 60  loss 1.0  0:00:40 left\n"


def test_progress_line_appears_every_ten_seconds(clock, capsys):
    with ProgressBar() as bar:
        for second in range(25):
            bar.show(second, f"second {second}")
            clock[0] += 1
    assert capsys.readouterr().out.splitlines() == ["second 10", "second 20"]


@pytest.mark.parametrize(
    ("total", "line"),
    [(None, "reading"), (5, "reading  0:00:00 left")],
    ids=["unknown", "less than done"],
)
def test_progress_line_of_an_unknown_or_wrong_total(clock, capsys, total, line):
    with ProgressBar(total) as bar:
        clock[0] += 11
        bar.show(6, "reading")
    assert capsys.readouterr().out == f"{line}\n"


@pytest.mark.parametrize(
    ("formatted", "expected"),
    [
        (format_duration(90.4), "0:01:30"),
        (format_duration(3 * 86400), "3 days"),
        (format_memory(2**29), "512 MiB"),
        (format_memory(5 * 2**28), "1.25 GiB"),
        (format_si(512, "B"), "512 B"),
        (format_si(3.42e6, "B"), "3.42 MB"),
        (format_si(5.678e9, "B"), "5.68 GB"),
        (format_si(0), "0"),
        (format_si(12), "12"),
        (format_si(999.4), "999"),
        (format_si(999.5), "1 k"),
        (format_si(1_234_567), "1.23 M"),
        (format_si(7e24), "7 Y"),
        (format_number(0.0123), "0.0123"),
        (format_number(1), "1.00"),
        (format_number(99.96), "100"),
        (format_number(1234), "1,234"),
        (pluralize(1, "layer"), "1 layer"),
        (pluralize(2, "process"), "2 processes"),
        (pluralize(3, "micro batch"), "3 micro batches"),
        (pluralize(1000, "step"), "1,000 steps"),
    ],
    ids=str,
)
def test_numbers_are_formatted(formatted, expected):
    assert formatted == expected


@pytest.mark.parametrize(
    ("is_terminal", "expected"),
    [
        (True, "  | one two\n  | /a/path/that-is-not-broken\n"),
        (False, "  | one two /a/path/that-is-not-broken\n"),
    ],
    ids=["terminal", "file"],
)
def test_long_line_is_broken_between_words_on_a_terminal_only(
    monkeypatch, capsys, is_terminal, expected
):
    monkeypatch.setattr(PlainConsole, "is_terminal", is_terminal)
    console = PlainConsole()
    console.width = 24
    console.print_text("  | one two /a/path/that-is-not-broken", "  | ")
    assert re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out) == expected


@pytest.mark.parametrize(
    "print_control_character",
    [
        lambda console: console.print("c\u202e"),
        lambda console: console.print_text("c\x1b[31m"),
        lambda console: console.print(make_table("a\x1b[31m")),
    ],
    ids=["print", "print_text", "table"],
)
def test_console_replaces_control_characters(capsys, print_control_character):
    print_control_character(PlainConsole())
    output = capsys.readouterr().out
    assert "\ufffd" in output
    assert not UNPRINTABLE.search(output)


@pytest.mark.parametrize(
    ("is_terminal", "variables", "expected"),
    [
        (False, {"FORCE_COLOR": "1", "TERM": "xterm"}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {"TERM": "xterm"}, True),
    ],
    ids=["log file of a CI system", "dumb terminal", "terminal"],
)
def test_bar_is_shown_on_terminals_only(is_terminal, variables, expected, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    assert PlainConsole().is_terminal == expected
