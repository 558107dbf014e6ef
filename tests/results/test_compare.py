"""The command compare.py: its rows, files, table and notes, and refusals."""

import csv
import io
import json
from pathlib import Path

import pytest
from comparison_helpers import KERNEL, LR, NEGLIGIBLE, compare_rows, write_run, write_sweep
from helpers import run_command
from rich.console import Console

from results.compare import (
    FILES,
    Row,
    choose_columns,
    compare,
    describe_row,
    describe_rows,
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
        "results.compare.plot_comparison", lambda variants, rows, negligible, path: path.touch()
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
    print_comparison(compare(runs, tmp_path / "out", NEGLIGIBLE), tmp_path / "out")
    printed = capsys.readouterr().out
    assert "model=" in printed
    assert "\x1b" not in printed


def test_folders_that_train_writes_are_compared(train, tmp_path):
    for name in ("naive", "sdpa"):
        assert train(f"name={name}", f"attention={name}") == 0
    rows = compare([tmp_path / "runs/naive", tmp_path / "runs/sdpa"], tmp_path / "out", NEGLIGIBLE)
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
    compare(runs, tmp_path / "out", NEGLIGIBLE)
    with open(tmp_path / "out/comparison.csv", newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert first["difference"] == ""
    assert float(second["difference"]) == pytest.approx(0.5)
    assert float(first["peak_memory_bytes_low"]) == 9 * 2**30
    assert float(first["val_loss_high"]) == pytest.approx(1.5 + 12.706 / 2, rel=1e-4)
    assert "variant_low" not in first


def test_list_of_the_compared_runs_is_relative_to_it(tmp_path):
    runs = [write_run(tmp_path / f"runs/{name}") for name in "ab"]
    compare(runs, tmp_path / "runs/out", NEGLIGIBLE)
    content = json.loads((tmp_path / "runs/out/comparison.json").read_bytes())
    assert content["runs"] == ["../a", "../b"]


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


# The sentences


def test_sentence_has_the_verdict_its_interval_the_seeds_and_the_speed(row):
    facts = {"verdict": Value("worse"), "difference": Value(0.012, 0.008, 0.016)}
    facts |= {"variant": Value("model.n_layer=1"), "pairs": Value(4), "step_ms": Value(5, 4, 6)}
    baseline = row | {"step_ms": Value(10, 9, 11)}
    assert describe_row(row | facts, baseline) == (
        "model.n_layer=1: worse by 1.20 % (loss +0.80 to +1.60 %), 4 seeds; "
        "steps 2.00 times as fast"
    )


@pytest.mark.parametrize(
    ("verdict", "difference", "text"),
    [
        ("equal losses", Value(0.0), "equal losses, 2 seeds"),
        ("undecided", Value(0.01), "undecided (loss +1.00 % so far), 2 seeds"),
        (
            "no difference above 0.5 %",
            Value(0.001, -0.001, 0.003),
            "no difference above 0.5 % (loss -0.10 to +0.30 %), 2 seeds",
        ),
    ],
)
def test_sentence_of_a_verdict(row, verdict, difference, text):
    facts = {"verdict": Value(verdict), "difference": difference, "pairs": Value(2)}
    assert describe_row(row | facts, row) == (
        f"a: {text}; steps 1.00 times as fast, which may be noise"
    )


@pytest.mark.parametrize("device", [Value("B"), Value()], ids=["another device", "unknown"])
def test_step_times_of_different_devices_are_not_compared(row, device):
    facts = {"verdict": Value("worse"), "difference": Value(0.01), "device_name": device}
    assert "as fast" in describe_row(row | facts | {"device_name": row["device_name"]}, row)
    assert "as fast" not in describe_row(row | facts, row)


def test_sentences_are_sorted_by_loss_and_equal_losses_by_step_time(tmp_path):
    rows = compare_rows([write_run(tmp_path / name) for name in "abcde"])
    verdicts = ["", "worse", "better", "equal up to rounding", None]
    for row, verdict, difference in zip(rows, verdicts, [None, 0.1, -0.1, 1e-9, None], strict=True):
        row |= {"verdict": Value(verdict), "difference": Value(difference)}
    rows[0]["step_ms"] = Value(20.0)
    rows[3]["step_ms"] = Value(10.0)
    rows[4] |= {"seeds": Value(0), "status": Value("refused")}
    sentences = describe_rows(rows)
    assert [sentence[0] for sentence in sentences] == ["c", "d", "a", "b", "e"]
    assert sentences[2].startswith("a: baseline, loss 1.0000, 1 seed")
    assert sentences[4] == "e: refused"


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"status": "refused"}, "b: attention=flex: refused"),
        ({"status": "failed"}, "b: attention=flex: failed in 1 of 1 runs"),
        ({"data": "another text"}, "b: attention=flex: not compared, because the baseline"),
    ],
)
def test_sentence_says_why_a_setting_is_not_judged(tmp_path, facts, sentence):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", changes=KERNEL, **facts)]
    assert describe_rows(compare_rows(runs))[-1].startswith(sentence)


def test_comparison_without_a_threshold_has_that_of_the_first_run(workdir, no_picture):
    for name, changes in (("a", None), ("b", LR)):
        for seed in range(5):
            facts = {"val": 1.0 + seed * len(changes or {}) / 1000}
            changes = (changes or {}) | {"sweep.difference": 0.02}
            write_run(Path(f"{name}{seed}"), seed, changes=changes, **facts)
    runs = sorted(Path().glob("[ab]?"))
    rows = compare(runs, Path("out"), None)
    assert rows[1]["verdict"].value == "no difference above 2 %"


# All sweeps


def test_history_has_the_sentences_of_all_sweeps_and_the_error_rate(workdir, capsys):
    for name in ("first", "second"):
        sweep = write_sweep(Path("runs/sweeps", name), ["n=1,seed=1", "n=2,seed=1"])
        for n in (1, 2):
            folder = sweep / f"n={n},seed=1"
            write_run(folder, changes={"model.n_layer": n}, val=4.0 - n)
        assert run_command("compare", f"sweeps/{name}") == 0
    capsys.readouterr()
    assert run_command("compare") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "first"
    assert lines[1].startswith("  n=2: undecided (loss -33.33 % so far), 1 seed")
    assert lines[3] == "second"
    assert "1 sweep in 20" in lines[-1]


def test_history_lists_sweeps_that_are_not_finished(workdir, capsys):
    write_run(write_sweep(Path("runs/sweeps/s"), ["seed=1"]) / "seed=1")
    assert run_command("compare") == 0
    assert "not finished; the same command continues it" in capsys.readouterr().out


def test_history_without_sweeps_is_refused(workdir, capsys):
    assert run_command("compare") == 2
    assert "set folders of runs" in capsys.readouterr().err


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
    return compare_rows([write_run(tmp_path / "a", losses=[1.0] * 8)])[0]


@pytest.mark.parametrize(
    ("name", "value", "cell"),
    [
        ("val/loss", Value(1.23456), "1.2346"),
        ("val/loss", Value(1.23456, 1.22456, 1.24456), "1.2346 ± 0.0100"),
        ("difference", Value(0.01, -0.005, 0.025), "+1.00 % (-0.50 to +2.50 %)"),
        ("difference", Value(-2e-3), "-0.20 %"),
        ("step_ms", Value(12.34, 10, 123), "12.3 (10.0–123)"),  # noqa: RUF001
        ("peak_memory_bytes", Value(9 * 2**30), "9.00 GiB"),
        ("peak_memory_bytes", Value(2**30, 2**30, 2**31), "1.00 GiB (1.00–2.00 GiB)"),  # noqa: RUF001
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
    rows[1]["difference"] = Value(-0.0107, -0.0298, 0.0084)
    assert max(map(len, print_table(rows, width=80).splitlines())) <= 80


@pytest.mark.parametrize("text", ["naive1:", "attention=naive", "3 finished"])
def test_table_has_the_variant_and_its_status(rows, text):
    assert text in print_table(rows, width=120)


def has_note(rows: list[Row], part: str) -> bool:
    return any(part in note for note in list_notes(rows))


@pytest.mark.parametrize("part", ["Differences are", "95 % confidence interval of the mean"])
def test_notes_explain_the_columns_of_the_table(rows, row, part):
    assert has_note(rows, part)
    assert not has_note([row], part)


def test_notes_have_the_error_of_an_unfinished_run(tmp_path):
    runs = [write_run(tmp_path / "a", status="refused", error="needs a GPU")]
    assert has_note(compare_rows(runs), "a: refused: needs a GPU")


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"device_name": "another chip"}, "devices differ"),
        ({"vocab_size": 66}, "compare bits per byte"),
        ({"data": "another tokenizer"}, "compare bits per byte"),
        ({"text_hash": "2"}, "texts differ"),
        ({"text_hash": "2", "vocab_size": 66}, "texts differ"),
    ],
    ids=["device", "size of the vocabulary", "vocabulary", "text", "text and vocabulary"],
)
def test_notes_name_what_cannot_be_compared(tmp_path, facts, part):
    equal = {"text_hash": "1", "data": "1"}
    first = write_run(tmp_path / "a", **equal)
    second = write_run(tmp_path / "b", changes=LR, **(equal | facts))
    assert has_note(compare_rows([first, second]), part)
    assert not has_note(compare_rows([first]), part)


@pytest.mark.parametrize(("n_teachers", "is_noted"), [(None, True), (2, False)])
def test_note_says_that_step_times_vary_unless_teachers_explain_it(tmp_path, n_teachers, is_noted):
    losses = [1.0] * 100  # steps of 10 to 110 ms
    rows = compare_rows([write_run(tmp_path / "a", losses=losses, n_teachers=n_teachers)])
    assert has_note(rows, "Step times vary widely") == is_noted


def test_runs_of_another_length_do_not_widen_the_intervals(tmp_path):
    """A variant that has no pair with the baseline is not judged."""
    runs = []
    for seed in range(1, 6):
        runs.append(write_run(tmp_path / f"a{seed}", seed, val=1 + seed / 100))
        runs.append(write_run(tmp_path / f"b{seed}", seed, val=1 + seed / 200, changes=LR))
    old = write_run(tmp_path / "old", 6, changes=LR | {"train.steps": 3})
    _, row = compare_rows(runs)
    _, same, _ = compare_rows([*runs, old])
    assert row["difference"].low is not None
    assert same["difference"] == row["difference"]
