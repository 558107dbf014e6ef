"""The table of a comparison: cells, columns, and the notes that explain it."""

import io

import pytest
from comparison_helpers import KERNEL, LR, compare_rows, write_run
from rich.console import Console

from results.statistics import SettingStats
from results.table import (
    TERMINAL_COLUMNS,
    choose_headers,
    format_cell,
    list_notes,
    make_terminal_table,
    multiline,
)


@pytest.fixture
def rows(tmp_path) -> list[SettingStats]:
    """Two backends with three seeds each."""
    runs = []
    for name, changes in (("naive", None), ("flex", KERNEL)):
        for seed in (1, 2, 3):
            facts = {"changes": changes, "peak_memory_bytes": 9 * 2**30}
            runs.append(write_run(tmp_path / f"{name}{seed}", seed, val=1 + seed / 10, **facts))
    return compare_rows(runs)


def make_row(tmp_path, **values) -> SettingStats:
    (row,) = compare_rows([write_run(tmp_path / "a")])
    for key, value in values.items():
        setattr(row, key, value)
    return row


@pytest.mark.parametrize(
    ("values", "header", "cell"),
    [
        ({"val_loss": 1.23456, "val_loss_ci95": None}, "val loss", "1.2346"),
        ({"val_loss": 1.23456, "val_loss_ci95": 0.01}, "val loss", "1.2346 ± 0.0100"),
        ({"difference": 0.01, "difference_ci95": 2e-5}, "difference", "+0.0100 ± 2.0e-05"),
        ({"difference": -2e-5}, "difference", "-2.0e-05"),
        ({"difference": 0.0, "difference_ci95": 0.0}, "difference", "0 ± 0"),
        ({"divergence": 0.015}, "divergence", "1.5e-02"),
        ({"divergence": 0.0}, "divergence", "0"),
        ({"step_ms": 12.34, "step_ms_q1": 10, "step_ms_q3": 123}, "step, ms", "12.3 (10.0–123)"),  # noqa: RUF001
        ({"tokens_per_second": 12345.6}, "tokens/s", "12,346"),
        ({"seeds_needed": 1234}, "seeds needed", "1,234"),
        ({"peak_memory_bytes": 9 * 2**30}, "memory", "9.00 GiB"),
        (
            {
                "peak_memory_bytes": 2**30,
                "peak_memory_bytes_q1": 2**30,
                "peak_memory_bytes_q3": 2**31,
            },
            "memory",
            "1.00 GiB (1.00–2.00 GiB)",  # noqa: RUF001
        ),
        ({"attention_entropy": 2.54321}, "attention entropy, nats", "2.543"),
        ({"speedup": 1.066}, "speedup", "1.07"),
        (
            {"speedup": 1.066, "speedup_low": 0.984, "speedup_high": 1.155},
            "speedup",
            "1.07 (0.98–1.16)",  # noqa: RUF001
        ),
        ({"speedup_low": 1.25}, "speedup", "> 1.25"),
        ({"speedup_high": 0.8}, "speedup", "< 0.80"),
        ({"kv_cache_bytes_per_token": 1024.0}, "KV cache, bytes per token", "1,024"),
        ({"verdict": None}, "verdict", "–"),  # noqa: RUF001
    ],
)
def test_cell_has_the_value_and_its_spread(tmp_path, values, header, cell):
    assert format_cell(make_row(tmp_path, **values), header) == cell


@pytest.mark.parametrize(
    ("cell", "lines"),
    [
        ("1.2 ± 0.1", ["1.2", "± 0.1"]),
        ("12 (10-13)", ["12", "(10-13)"]),
        ("a: model=gpt2, optimizer.lr=1", ["a:", "model=gpt2", "optimizer.lr=1"]),
    ],
)
def test_cells_are_broken_into_lines(cell, lines):
    assert multiline(cell).split("\n") == lines


def test_columns_without_values_are_hidden(tmp_path):
    headers = choose_headers([make_row(tmp_path)])
    assert "val loss" in headers
    assert "difference" not in headers
    assert "attention entropy, nats" not in headers


@pytest.mark.parametrize(("other", "is_shown"), [(65, False), (66, True)])
def test_bits_per_byte_are_shown_if_the_vocabularies_differ(tmp_path, other, is_shown):
    runs = write_run(tmp_path / "a"), write_run(tmp_path / "b", changes=LR, vocab_size=other)
    assert ("bits/byte" in choose_headers(compare_rows(list(runs)))) == is_shown


@pytest.mark.parametrize(("other", "is_shown"), [(1024, False), (512, True)])
def test_cache_is_shown_if_the_settings_differ(tmp_path, other, is_shown):
    runs = [write_run(tmp_path / "a", kv_cache_bytes_per_token=1024)]
    runs += [write_run(tmp_path / "b", changes=LR, kv_cache_bytes_per_token=other)]
    assert ("KV cache, bytes per token" in choose_headers(compare_rows(runs))) == is_shown


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_the_terminal(rows, width):
    output = io.StringIO()
    rows[1].speedup, rows[1].speedup_low, rows[1].speedup_high = 1.07, 0.98, 1.16
    Console(width=width, file=output).print(make_terminal_table(rows))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("word", ["naive1:", "attention=naive", "3 finished", "equal losses"])
def test_table_has_the_setting_its_status_and_its_verdict(rows, word):
    output = io.StringIO()
    Console(width=80, file=output).print(make_terminal_table(rows))
    assert word in output.getvalue()


def has_note(rows: list[SettingStats], part: str, columns=TERMINAL_COLUMNS) -> bool:
    return any(part in note for note in list_notes(rows, columns))


def test_notes_explain_the_columns_of_the_table(rows):
    assert has_note(rows, "Difference:")
    assert not has_note(rows[:1], "Difference:")
    assert not has_note(rows, "Divergence:")


def test_notes_explain_the_interval(rows, tmp_path):
    assert has_note(rows, "95 % confidence interval")
    assert not has_note([make_row(tmp_path)], "95 % confidence interval")


@pytest.mark.parametrize(
    "verdict",
    [
        "equal losses",
        "same up to rounding",
        "same for 10 steps; later: too few seeds",
        "differs from step 3",
        "lower loss",
        "higher loss",
        "no difference found; detectable: 0.1",
        "not tested: one pair",
    ],
)
def test_notes_explain_the_verdict_once(tmp_path, verdict):
    rows = [make_row(tmp_path, verdict=verdict)] * 2
    assert sum(note.startswith(f"{verdict}: ") for note in list_notes(rows)) == 1


def test_notes_have_the_reason_of_an_unfinished_run(tmp_path):
    row = make_row(tmp_path, setting="a", status="refused", reason="needs a GPU")
    assert has_note([row], "a: refused: needs a GPU")


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"device_name": "another chip"}, "devices differ"),
        ({"vocab_size": 66}, "compare bits per byte"),
        ({"data": "another text"}, "texts differ"),
    ],
    ids=["device", "vocabulary", "text"],
)
def test_notes_name_what_cannot_be_compared(tmp_path, facts, part):
    first = write_run(tmp_path / "a", data="text")
    second = write_run(tmp_path / "b", changes=LR, **({"data": "text"} | facts))
    assert has_note(compare_rows([first, second]), part)
    assert not has_note(compare_rows([first]), part)


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (["attention=sdpa", "attention=flash"], 1),
        (["attention=sdpa, lr=1", "attention=flash, lr=1"], 1),
        (["attention=sdpa, lr=1", "attention=flash, lr=2"], 0),
        (["lr=1", "lr=2"], 0),
    ],
)
def test_settings_that_ran_the_same_kernel_are_named(tmp_path, settings, count):
    rows = [make_row(tmp_path / name, setting=name, kernel="flash") for name in settings]
    sentence = f"{' and '.join(settings)} ran the same kernel, flash"
    notes = [note for note in list_notes(rows) if "same kernel" in note]
    assert len(notes) == count
    assert all(note.startswith(sentence) for note in notes)
