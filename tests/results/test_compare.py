"""The command compare.py: its files, its output, and refusals."""

import csv

import pytest
from comparison_helpers import KERNEL, LR, write_run, write_sweep
from helpers import run_command

from results.compare import FILES, compare, print_comparison
from results.statistics import SettingStats


def list_files(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


@pytest.fixture
def runs(workdir):
    """runs/a, runs/b, and the sweep runs/sweeps/s. Returns the folder runs."""
    folder = workdir / "runs"
    write_run(folder / "a")
    write_run(folder / "b", changes=LR)
    write_run(write_sweep(folder / "sweeps/s", ["seed=1"]) / "seed=1")
    return folder


def test_files_of_runs_are_in_the_folder_of_the_last_comparison(runs):
    assert run_command("compare", "a", "b") == 0
    assert list_files(runs / "comparison") == sorted(FILES)


def test_files_of_a_single_sweep_are_in_its_folder(runs):
    assert run_command("compare", "sweeps/s") == 0
    assert set(FILES) <= set(list_files(runs / "sweeps/s"))
    assert not (runs / "comparison").exists()


def test_files_of_a_sweep_and_a_run_are_not_in_the_sweep(runs):
    assert run_command("compare", "sweeps/s", "b") == 0
    assert list_files(runs / "sweeps/s") == ["sweep.json"]
    assert list_files(runs / "comparison") == sorted(FILES)


def test_folder_of_the_files_can_be_set(runs, workdir):
    assert run_command("compare", "runs/sweeps/s", "out=figures/new") == 0
    assert list_files(workdir / "figures/new") == sorted(FILES)


def test_output_has_the_table_and_names_the_files(runs, capsys):
    run_command("compare", "a", "b")
    printed = capsys.readouterr().out
    assert "optimizer.lr=0.1" in printed
    assert all(f"runs/comparison/{name}" in printed for name in FILES)


def test_difference_adds_the_seeds_that_find_it(runs, capsys):
    for name, changes in (("a2", None), ("b2", LR)):
        write_run(runs / name, 2, val=1.1, changes=changes)
    run_command("compare", "a", "b", "a2", "b2", "difference=0.1")
    assert "seeds needed" in capsys.readouterr().out


def test_csv_has_plain_numbers(tmp_path):
    runs = [write_run(tmp_path / "a", peak_memory_bytes=9 * 2**30)]
    runs += [write_run(tmp_path / "b", changes=KERNEL, val=1.5)]
    compare(runs, tmp_path / "out")
    with open(tmp_path / "out/comparison.csv", newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert (first["difference"], second["difference"]) == ("", "0.5")
    assert first["peak_memory_bytes"] == str(9 * 2**30)


def test_text_of_runs_does_not_control_the_terminal(tmp_path, capsys):
    attack = "\x1b[2J"
    runs = [write_run(tmp_path / name, changes={"model.name": attack + name}) for name in "ab"]
    runs += [write_run(tmp_path / "c", status="refused", error=attack)]
    print_comparison(compare(runs, tmp_path / "out"), tmp_path / "out")
    printed = capsys.readouterr().out
    assert "model=" in printed
    assert "\x1b" not in printed


@pytest.mark.parametrize(
    ("words", "part"),
    [
        pytest.param(["nowhere"], "set folders of runs", id="missing folder"),
        pytest.param([], "set folders of runs", id="no folder"),
        pytest.param(["a", "out=runs/a/config.yaml"], "set another", id="out is a file"),
        pytest.param(["a", "difference=0"], "difference", id="no difference"),
    ],
)
def test_invalid_command_is_refused_with_one_line(runs, capsys, words, part):
    assert run_command("compare", *words) == 2
    message = capsys.readouterr().err
    assert part in message
    assert message.count("\n") == 1
    assert not (runs / "comparison").exists()


def test_damaged_run_is_refused_before_a_file_is_written(runs, capsys):
    (runs / "a/metrics.jsonl").write_text('{"st', encoding="utf-8")
    assert run_command("compare", "a", "b") == 2
    assert "metrics.jsonl" in capsys.readouterr().err
    assert not (runs / "comparison").exists()


@pytest.fixture
def real_rows(train, tmp_path) -> list[SettingStats]:
    """Statistics of two backends that train.py has trained with the same seed."""
    for name in ("naive", "sdpa"):
        assert train(f"name={name}", f"attention={name}", "train.steps=8") == 0
    return compare([tmp_path / "runs/naive", tmp_path / "runs/sdpa"], tmp_path / "out")


def test_folders_that_train_writes_are_compared(real_rows):
    first, second = real_rows
    assert (first.setting, second.setting) == ("naive: attention=naive", "sdpa: attention=sdpa")
    assert second.pairs == 1
    assert second.divergence < 1e-4
    assert abs(second.difference) < 1e-4
    assert all(row.step_ms > 0 and row.val_bpb > 0 for row in real_rows)
