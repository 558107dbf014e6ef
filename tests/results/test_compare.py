"""The command compare.py: its rows, files, table and notes, and refusals."""

import csv
import io
import json

import pytest
from comparison_helpers import KERNEL, LR, compare_rows, write_run, write_sweep
from helpers import run_command
from rich.console import Console

from results.compare import (
    FILES,
    VERDICT_NOTES,
    Row,
    choose_columns,
    compare,
    format_cell,
    list_notes,
    make_terminal_table,
    print_comparison,
)
from results.metrics import Value


def list_files(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


@pytest.fixture
def no_picture(monkeypatch):
    """comparison.png is empty, because drawing it takes longer than all the rest."""
    monkeypatch.setattr(
        "results.compare.plot_comparison", lambda variants, rows, path: path.touch()
    )


@pytest.fixture
def runs(workdir, no_picture):
    """runs/a, runs/b, and the sweep runs/sweeps/s. Returns the folder runs."""
    folder = workdir / "runs"
    write_run(folder / "a")
    write_run(folder / "b", changes=LR)
    write_run(write_sweep(folder / "sweeps/s", ["seed=1"]) / "seed=1")
    return folder


@pytest.mark.parametrize(
    ("words", "out"),
    [
        pytest.param(["a", "b"], "comparison", id="runs"),
        pytest.param(["sweeps/s"], "sweeps/s", id="sweep"),
        pytest.param(["sweeps/s", "b"], "comparison", id="sweep and run"),
        pytest.param(["runs/sweeps/s", "out=runs/figures/new"], "figures/new", id="out is set"),
    ],
)
def test_files_are_in_one_folder_which_is_printed(runs, capsys, words, out):
    summaries = {path: path.read_bytes() for path in runs.rglob("summary.json")}
    assert run_command("compare", *words) == 0
    printed = capsys.readouterr().out
    assert all(f"runs/{out}/{name}" in printed for name in FILES)
    folders = {path.parent for name in FILES for path in runs.rglob(name)}
    assert folders == {runs / out}
    assert {path: path.read_bytes() for path in runs.rglob("summary.json")} == summaries


@pytest.mark.parametrize(
    ("words", "part"),
    [
        pytest.param(["nowhere"], "set folders of runs", id="missing folder"),
        pytest.param([], "set folders of runs", id="no folder"),
        pytest.param(["a", "out=runs/a/config.yaml"], "set another", id="out is a file"),
        pytest.param(["b", "damaged"], "metrics.jsonl", id="damaged run"),
    ],
)
def test_wrong_folders_are_refused_before_a_file_is_written(runs, capsys, words, part):
    (write_run(runs / "damaged") / "metrics.jsonl").write_text('{"st', encoding="utf-8")
    assert run_command("compare", *words) == 2
    message = capsys.readouterr().err
    assert part in message
    assert message.count("\n") == 1
    assert not (runs / "comparison").exists()


def test_text_of_runs_does_not_control_the_terminal(tmp_path, no_picture, capsys):
    attack = "\x1b[2J"
    runs = [write_run(tmp_path / name, changes={"model.name": attack + name}) for name in "ab"]
    runs += [write_run(tmp_path / "c", status="refused", error=attack)]
    print_comparison(compare(runs, tmp_path / "out"), tmp_path / "out")
    printed = capsys.readouterr().out
    assert "model=" in printed
    assert "\x1b" not in printed


def test_folders_that_train_writes_are_compared(train, tmp_path):
    for name in ("naive", "sdpa"):
        assert train(f"name={name}", f"attention={name}") == 0
    rows = compare([tmp_path / "runs/naive", tmp_path / "runs/sdpa"], tmp_path / "out")
    first, second = rows
    assert first["variant"].value == "naive: attention=naive"
    assert second["pairs"].value == 1
    assert second["divergence"].value < 1e-4
    assert abs(second["difference"].value) < 1e-4
    assert all(row["step_ms"].value > 0 and row["val/bpb"].value > 0 for row in rows)


# Rows


def test_csv_has_plain_numbers_and_their_bounds(tmp_path, no_picture):
    runs = [write_run(tmp_path / f"a{n}", n, val=n, peak_memory_bytes=9 * 2**30) for n in (1, 2)]
    runs += [write_run(tmp_path / "b", changes=KERNEL, val=1.5)]
    compare(runs, tmp_path / "out")
    with open(tmp_path / "out/comparison.csv", newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert (first["difference"], second["difference"]) == ("", "0.5")
    assert float(first["peak_memory_bytes_low"]) == 9 * 2**30
    assert float(first["val_loss_high"]) == pytest.approx(1.5 + 12.706 / 2, rel=1e-4)
    assert "variant_low" not in first


def test_list_of_the_compared_runs_is_relative_to_it(tmp_path):
    runs = [write_run(tmp_path / f"runs/{name}") for name in "ab"]
    compare(runs, tmp_path / "runs/out")
    content = json.loads((tmp_path / "runs/out/comparison.json").read_bytes())
    assert content == {"runs": ["../a", "../b"]}


def test_only_finished_runs_count(tmp_path):
    good = write_run(tmp_path / "good", 1, val=2.0, device_name="chip 1")
    bad = write_run(tmp_path / "bad", 2, val=99.0, status="failed", error="not finite")
    (row,) = compare_rows([good, bad])
    assert (row["val/loss"], row["seeds"]) == (Value(2.0), Value(1))
    assert row["device_name"].value == "chip 1, a chip"


def test_refused_variant_has_no_figures(tmp_path):
    refused = write_run(tmp_path / "no", status="refused", error="needs a GPU")
    (row,) = compare_rows([refused])
    assert {row[name] for name in ("val/loss", "step_ms", "peak_memory_bytes")} == {Value()}


# The table and its notes


@pytest.fixture
def rows(tmp_path) -> list[Row]:
    """Two backends with three seeds each."""
    runs = []
    for name, changes in (("naive", None), ("flex", KERNEL)):
        for seed in (1, 2, 3):
            facts = {"changes": changes, "peak_memory_bytes": 9 * 2**30}
            runs.append(write_run(tmp_path / f"{name}{seed}", seed, val=1 + seed / 10, **facts))
    return compare_rows(runs)


@pytest.fixture
def row(tmp_path) -> Row:
    """The row of a single run."""
    return compare_rows([write_run(tmp_path / "a")])[0]


@pytest.mark.parametrize(
    ("name", "value", "cell"),
    [
        ("val/loss", Value(1.23456), "1.2346"),
        ("val/loss", Value(1.23456, 1.22456, 1.24456), "1.2346 ± 0.0100"),
        ("difference", Value(0.01, 0.00998, 0.01002), "+0.0100 ± 2.0e-05"),
        ("difference", Value(-2e-5), "-2.0e-05"),
        ("difference", Value(0.0, 0.0, 0.0), "0 ± 0"),
        ("step_ms", Value(12.34, 10, 123), "12.3 (10.0–123)"),  # noqa: RUF001
        ("peak_memory_bytes", Value(9 * 2**30), "9.00 GiB"),
        ("peak_memory_bytes", Value(2**30, 2**30, 2**31), "1.00 GiB (1.00–2.00 GiB)"),  # noqa: RUF001
        ("speedup", Value(1.066), "1.07"),
        ("speedup", Value(1.066, 0.984, 1.155), "1.07 (0.98–1.16)"),  # noqa: RUF001
        ("speedup", Value(low=1.25), "> 1.25"),
        ("speedup", Value(high=0.8), "< 0.80"),
        ("kernel", Value(), "–"),  # noqa: RUF001
    ],
)
def test_cell_has_the_value_and_its_spread(row, name, value, cell):
    assert format_cell(row | {name: value}, name) == cell


@pytest.mark.parametrize(("vocab_size", "is_shown"), [(65, False), (66, True)])
def test_bits_per_byte_are_shown_if_the_vocabularies_differ(tmp_path, vocab_size, is_shown):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", vocab_size=vocab_size)]
    assert ("val/bpb" in choose_columns(compare_rows(runs))) == is_shown


def print_table(rows: list[Row], width: int) -> str:
    output = io.StringIO()
    Console(width=width, file=output).print(make_terminal_table(rows))
    return output.getvalue()


def test_table_fits_into_80_columns(rows):
    rows[1]["speedup"] = Value(1.07, 0.98, 1.16)
    assert max(map(len, print_table(rows, width=80).splitlines())) <= 80


@pytest.mark.parametrize("text", ["naive1:", "attention=naive", "3 finished", "equal losses"])
def test_table_has_the_variant_its_status_and_its_verdict(rows, text):
    assert text in print_table(rows, width=120)


def has_note(rows: list[Row], part: str) -> bool:
    return any(part in note for note in list_notes(rows))


@pytest.mark.parametrize("part", ["Difference:", "95 % confidence interval of the mean"])
def test_notes_explain_the_columns_of_the_table(rows, row, part):
    assert has_note(rows, part)
    assert not has_note([row], part)


@pytest.mark.parametrize("start", VERDICT_NOTES)
def test_notes_explain_the_verdict_once(row, start):
    verdict = f"{start} step 3"
    notes = list_notes([row | {"verdict": Value(verdict)}] * 2)
    assert notes.count(f"{verdict}: {VERDICT_NOTES[start]}") == 1


def test_notes_have_the_error_of_an_unfinished_run(tmp_path):
    runs = [write_run(tmp_path / "a", status="refused", error="needs a GPU")]
    assert has_note(compare_rows(runs), "a: refused: needs a GPU")


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
