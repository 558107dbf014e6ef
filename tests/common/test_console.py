"""Formatting, the progress bar and the lines that replace it, and text that is safe to print."""

import re

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
from common.errors import UNPRINTABLE, printable


def test_progress_lines_show_the_remaining_time_of_the_work_since_the_start(clock, capsys):
    with ProgressBar(total=100, initial=40) as bar:
        clock[0] += 5
        bar.show(45, "step 45")
        clock[0] += 15
        bar.show(60, "step 60", "loss 1.0")  # 20 of the 60 that were left took 20 s
        clock[0] += 1
        bar.show(100, "step 100")
        clock[0] += 10
        bar.show(110, "step 110")  # more than estimated
    with ProgressBar() as bar:
        clock[0] += 11
        bar.show(5, "reading")  # no total, so no remaining time
    expected = ["step 60  loss 1.0  0:00:40 left", "step 110  0:00:00 left", "reading"]
    assert capsys.readouterr().out.splitlines() == expected


def test_durations_sizes_and_counts_are_formatted():
    assert [format_duration(s) for s in (90.4, 3 * 86400)] == ["0:01:30", "3 days"]
    assert [format_si(s, "B") for s in (512, 3.42e6, 5.678e9)] == ["512 B", "3.42 MB", "5.68 GB"]
    assert [format_memory(s) for s in (2**29, 5 * 2**28)] == ["512 MiB", "1.25 GiB"]
    assert [format_si(n) for n in (12, 1_234_567, 7e24)] == ["12", "1.23 M", "7 Y"]
    assert [format_number(n) for n in (0.0123, 1, 99.96, 1234)] == [
        "0.0123",
        "1.00",
        "100",
        "1,234",
    ]
    counts = [pluralize(1, "layer"), pluralize(2, "process"), pluralize(1000, "step")]
    assert counts == ["1 layer", "2 processes", "1,000 steps"]


def test_long_lines_are_broken_between_words_on_a_terminal_only(monkeypatch, capsys):
    for is_terminal, line_break in ((True, "\n  | "), (False, " ")):
        monkeypatch.setattr(PlainConsole, "is_terminal", is_terminal)
        console = PlainConsole()
        console.width = 24
        console.print_text("  | one two three four five", "  | ")
        output = re.sub(r"\x1b\[\d*m| +$", "", capsys.readouterr().out, flags=re.MULTILINE)
        assert output == f"  | one two three{line_break}four five\n"


def test_number_and_its_noun_stay_on_one_line(monkeypatch, capsys):
    monkeypatch.setattr(PlainConsole, "is_terminal", True)
    console = PlainConsole()
    console.width = 24
    console.print_text("trained in seconds, 350 steps of 12 x 64 = 768 tokens", "")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["trained in seconds,", "350 steps of 12 x 64 =", "768 tokens"]


def test_only_characters_that_control_a_terminal_are_replaced():
    written = "日本\u3000語, 12\u00a0km, नमस्\u200cते, 👩\u200d🚀, e\u0301\n\tx"  # spaces, joiners and accents stay
    assert printable(written) == written
    for control in ("\x1b", "\x9b", "\r", "\x07", "\x7f", "\u202e", "\u2066"):
        assert printable(f"a{control}b") == "a\ufffdb"


def test_console_prints_no_control_characters_of_names(capsys):
    table = make_table("a\x1b[31m")
    table.add_row("b\x9b31m")
    console = PlainConsole()
    console.print("c\u202e", table, sep="\n")
    output = capsys.readouterr().out
    assert output.count("\ufffd") == 3 and not UNPRINTABLE.search(output)
