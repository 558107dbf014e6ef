"""Comparisons of run folders that the tests write: statistics, labels, tables, the plot, and invalid folders."""

import csv
import io
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import yaml
from helpers import run_command
from rich.console import Console

from common.errors import UserError
from comparison.runs.comparison import compare, print_comparison
from comparison.runs.read import read_settings
from comparison.runs.report import write_report
from comparison.runs.statistics import compute_stats
from comparison.runs.table import TERMINAL_COLUMNS, list_notes, make_terminal_table

CONFIG = {
    "device": "auto", "resume": True, "model.name": "small", "model.n_layer": 2, "model.dropout": 0.0,
    "attention.backend": "naive", "attention.flash_package": None, "optimizer.name": "adamw", "optimizer.lr": 0.001,
    "optimizer.beta": 0.9, "train.steps": 10, "wandb.mode": "offline",
}  # fmt: skip


def write_run(
    folder,
    seed=1,
    losses=(3.0, 2.0, 1.0),
    val=1.0,
    status="finished",
    error=None,
    changes=(),
    **facts,
):
    """Write a run folder as train.py does. losses: training losses of steps 1, 2, ... facts: for summary.json."""
    folder.mkdir(parents=True)
    config = CONFIG | dict(changes) | {"seed": seed, "name": folder.name}
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    summary = {"name": folder.name, "status": status, "error": error}
    if status != "refused":
        rows = [{"step": 0, "tokens": 0, "seconds": 0.0, "val/loss": 4.0}]
        rows += [
            {
                "step": n,
                "train/loss": loss,
                "step_ms": 100.0 if n <= 5 else 10.0 + n,
                "tokens_per_second": 1000.0 + n,
            }
            for n, loss in enumerate(losses, 1)
        ]
        rows[-1] |= {"val/loss": val, "peak_memory_bytes": 2**20}
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
        summary |= {
            "step": len(losses), "best_val_loss": val, "last_val_loss": val, "last_val_bpb": val / 2,
            "peak_memory_bytes": 2**20, "device": "cpu", "device_name": "a chip", "dtype": "float32", "vocab_size": 65,
            "attention": {"requested": "a", "resolved": config["attention.backend"], "flash_package": None},
        } | facts  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def write_sweep(folder, jobs):
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(
        json.dumps({"command": "python train.py -m ...", "jobs": jobs}), encoding="utf-8"
    )
    return folder


def labels(folders):
    return [setting.label for setting in read_settings(folders)]


def compare_rows(folders):
    """Statistics per setting, without files."""
    return compute_stats(read_settings(folders))


def test_files_of_a_single_sweep_are_in_its_folder(workdir):
    write_run(write_sweep(workdir / "runs/sweeps/s", ["seed=1"]) / "seed=1")
    write_run(workdir / "runs/b", changes=LR)
    assert run_command("compare", "sweeps/s", "b") == 0
    assert (workdir / "runs/comparison/report.html").exists() and not [
        *workdir.glob("runs/sweeps/s/*.html")
    ]
    assert (
        run_command("compare", "sweeps/s") == 0 and (workdir / "runs/sweeps/s/report.html").exists()
    )


def test_no_difference_between_runs_on_different_data(tmp_path):
    for data, expected in (("x-1", (1, 0.0, 0.0)), ("y-2", (0, None, None))):
        folder = tmp_path / data
        runs = [write_run(folder / "a", data="x-1"), write_run(folder / "b", changes=LR, data=data)]
        same = read_settings([runs[0], write_run(folder / "c", seed=2, data=data)])
        assert len(same) == (1 if data == "x-1" else 2), "a changed text is another setting"
        _, row = compare_rows(runs)
        assert (row.pairs, row.difference, row.divergence) == expected


def test_statistics_match_hand_calculations(tmp_path):
    base, other = {1: 1.0, 2: 1.2, 3: 1.4}, {1: 1.1, 2: 1.2, 4: 9.0}
    losses = np.array([5.0] * 250)
    folders = [
        write_run(tmp_path / f"a{seed}", seed, (losses + seed).tolist(), val)
        for seed, val in base.items()
    ]
    losses[[199, 249]] = 5.5, 3.0
    for seed, val in other.items():
        facts = {"changes": KERNEL, "peak_memory_bytes": seed * 2**20}
        folders.append(
            write_run(tmp_path / f"b{seed}", seed, (losses + seed).tolist(), val, **facts)
        )
    first, second = compare_rows(folders)
    assert (first.setting, first.status, first.seeds) == (
        "a1 and 2 more: attention=naive",
        "3 finished",
        3,
    )
    assert first.val_loss == pytest.approx(1.2)
    assert first.val_loss_ci95 == pytest.approx(4.3027 * 0.2 / math.sqrt(3), rel=1e-4)
    assert (first.difference, first.pairs, first.divergence) == (None, 0, None)
    # Seeds 1 and 2 are pairs, 4 has none: differences 0.1 and 0, standard deviation 0.1 / sqrt(2).
    assert (second.difference, second.pairs) == (pytest.approx(0.05), 2)
    assert second.difference_ci95 == pytest.approx(12.706 * 0.05, rel=1e-4)
    assert second.divergence == 2.0
    assert (second.peak_memory_bytes, second.kernel) == (2 * 2**20, "flex")
    steady = [10.0 + step for step in range(6, 251)]
    expected = np.percentile(steady * 3, [25, 50, 75]).tolist()
    assert [second.step_ms_q1, second.step_ms, second.step_ms_q3] == expected
    assert second.tokens_per_second == 1000 + 128


def test_only_finished_runs_count(tmp_path):
    good = write_run(tmp_path / "good", 1, val=2.0)
    bad = write_run(
        tmp_path / "bad", 2, val=99.0, status="failed", error="TrainingFailed: not finite"
    )
    with open(bad / "metrics.jsonl", "a", encoding="utf-8") as f:
        f.write('{"step": 4, "trai')  # killed in the middle of a line
    refused = write_run(
        tmp_path / "no",
        status="refused",
        error="needs a GPU",
        changes={"attention.backend": "flex"},
    )
    first, second = compare([good, bad, refused], tmp_path / "out")
    assert (first.status, first.reason) == ("1 finished, 1 failed", "TrainingFailed: not finite")
    assert (first.val_loss, first.seeds, first.val_loss_ci95) == (2.0, 1, None)
    assert (second.status, second.reason, second.val_loss, second.step_ms) == (
        "refused",
        "needs a GPU",
        None,
        None,
    )
    assert any("needs a GPU" in note for note in list_notes([first, second]))
    assert "No run finished (refused)" in (tmp_path / "out/report.html").read_text(encoding="utf-8")


LOSSES = [4.0 - step / 10 for step in range(12)]
KERNEL, LR = {"attention.backend": "flex"}, {"optimizer.lr": 0.1}
NOISE = (0.010, -0.011, 0.0005)


@pytest.mark.parametrize(
    ("changes", "distances", "differences", "facts", "verdict"),
    [
        (KERNEL, [0, 0, 0], [0, 0, 0], {}, "equal losses"),
        (
            KERNEL,
            [3e-7, 2e-6, 0],
            [1.0e-7, 1.1e-7, 1.2e-7],
            {},
            "same up to rounding",
        ),  # its interval excludes 0
        (KERNEL, [3e-7, 6e-5, 0.3], NOISE, {}, "same up to rounding"),  # chaotic growth
        (
            KERNEL,
            [3e-7, 2e-6, 0],
            [0.010, 0.011, 0.0105],
            {},
            "higher loss",
        ),  # an error late in the training
        (KERNEL, [1e-3, 2e-3, 0], NOISE, {}, "differs from step 1"),  # wrong forward pass
        (KERNEL, [3e-7, 2e-3, 0], NOISE, {}, "differs from step 2"),  # wrong backward pass
        (KERNEL, [1e-3, 2e-3, 0], NOISE, {"dtype": "bfloat16"}, "same up to rounding"),
        (
            KERNEL | {"model.dropout": 0.1},
            [1e-3, 0, 0],
            NOISE,
            {},
            "no difference found; detectable: 0.034",
        ),
        (LR, [0, 1e-7, 0.3], NOISE, {}, "no difference found; detectable: 0.034"),
        (
            LR,
            [0, 2e-3, 0],
            [0.009, 0.003, 0.005],
            {},
            "no difference found; detectable: 0.01",
        ),  # interval 0.0076
        (LR, [0, 2e-3, 0], [-0.010, -0.011, -0.0105], {}, "lower loss"),
        (LR, [0, 2e-3, 0], [-0.010], {}, "not tested: one pair"),
        (
            LR | {"train.minutes": 1.0},
            [0, 2e-3, 0],
            NOISE,
            {},
            "no difference found; detectable: 0.034",
        ),
        (KERNEL, [3e-7, 0, 0.3], [1.0, 0.9], {}, "same for 10 steps; later: too few seeds"),
        (KERNEL, [3e-7, 0, 0], [1e-6], {}, "same up to rounding"),
    ],
)
def test_verdicts(tmp_path, changes, distances, differences, facts, verdict):
    dropout = {key: changes.get(key) for key in ("model.dropout", "train.minutes")}
    first_step, second_step, last_step = distances
    losses = [4.0 + first_step, 3.9 + second_step, *LOSSES[2:-1], LOSSES[-1] + last_step]
    runs = [
        write_run(tmp_path / f"a{n}", n, LOSSES, 3 + n / 10, changes=dropout, **facts)
        for n in (1, 2, 3)
    ]
    runs += [
        write_run(
            tmp_path / f"b{n}",
            n,
            losses,
            3 + n / 10 + difference,
            changes=dropout | changes,
            **facts,
        )
        for n, difference in enumerate(differences, 1)
    ]
    first, row = compare_rows(runs)
    assert (first.verdict, row.verdict) == (None, verdict)
    assert row.first_divergence == pytest.approx(distances[0])


def test_labels_have_names_and_differences(tmp_path):
    runs = [
        write_run(tmp_path / "a"),
        write_run(
            tmp_path / "b", 2, changes={"wandb.mode": "online", "resume": False}
        ),  # the same setting
        write_run(tmp_path / "c", changes={"optimizer.lr": 0.003}),
        write_run(
            tmp_path / "d",
            changes={"optimizer.name": "muon", "optimizer.lr": 0.02, "optimizer.beta": 0.95},
        ),
        write_run(tmp_path / "e", changes={"train.steps": 20}),
    ]
    assert labels(runs) == [
        "a and 1 more: optimizer=adamw, optimizer.lr=0.001, train.steps=10",
        "c: optimizer=adamw, optimizer.lr=0.003, train.steps=10",
        "d: optimizer=muon, train.steps=10",
        "e: optimizer=adamw, optimizer.lr=0.001, train.steps=20",
    ]
    assert labels(runs[:1]) == ["a"] and labels(runs[:2]) == ["a and 1 more"]
    assert labels([runs[0], runs[2]]) == ["a: optimizer.lr=0.001", "c: optimizer.lr=0.003"]
    assert len(read_settings([runs[0], runs[0]])[0].runs) == 1
    runs = [write_run(tmp_path / f"run{n}", seed=n, world_size=n) for n in (1, 2)]
    assert labels(runs) == ["run1: world_size=1", "run2: world_size=2"]


def test_labels_of_a_sweep_are_its_swept_keys(tmp_path):
    jobs = [f"attention={name},seed={seed}" for name in ("flex", "naive") for seed in (1, 2)]
    sweep = write_sweep(
        tmp_path / "cmp", [*jobs, "attention=flash,seed=1"]
    )  # the last one has not started
    for job in jobs:
        name, seed = (word.split("=")[1] for word in job.split(","))
        write_run(sweep / job, int(seed), changes={"attention.backend": name})
    assert labels([sweep]) == ["attention=flex", "attention=naive"]
    only_seeds = write_sweep(tmp_path / "seeds", ["seed=1"])
    write_run(only_seeds / "seed=1")
    assert labels([only_seeds]) == ["seeds"]
    alone = write_run(tmp_path / "alone", changes={"train.steps": 20})
    alone_label = "alone: attention=naive, train.steps=20"
    assert labels([sweep, alone]) == ["cmp/attention=flex", "cmp/attention=naive", alone_label]


def test_csv_has_plain_numbers_and_the_table_fits_the_terminal(tmp_path):
    runs = [
        write_run(
            tmp_path / f"{n}{seed}",
            seed,
            val=1 + seed / 10,
            changes=changes,
            peak_memory_bytes=9 * 2**30,
        )
        for n, changes in (("naive", {}), ("flex", KERNEL))
        for seed in (1, 2, 3)
    ]
    rows = compare(runs, tmp_path / "out")
    written = list(csv.DictReader((tmp_path / "out/comparison.csv").open(newline="")))
    assert float(written[1]["val_loss"]) == rows[1].val_loss and written[0]["difference"] == ""
    one, several = (
        "\n".join(list_notes(settings, TERMINAL_COLUMNS)) for settings in (rows[:1], rows)
    )
    assert "Difference" not in one and "Difference" in several and "Divergence" not in several
    assert (
        int(written[0]["peak_memory_bytes"]) == 9 * 2**30 and float(written[1]["divergence"]) == 0
    )
    for width in (80, 120):
        output = io.StringIO()
        Console(width=width, file=output).print(make_terminal_table(rows))
        text = output.getvalue()
        assert all(len(line) <= width for line in text.splitlines())
        for word in (
            "naive1 and 2 more:",
            "attention=naive",
            "3 finished",
            "1.2000",
            "± 0.2484",
            "9.00 GiB",
        ):
            assert word in text


@pytest.mark.parametrize("count", [1, 12])
def test_plot_of_one_and_of_many_settings(tmp_path, count):
    long = "a-very-long-name-of-a-model-that-fits-nowhere-$^$-\udce9" * 3  # math; not UTF-8
    runs = [
        write_run(tmp_path / str(i), changes={"model.name": f"{long}{i}"}) for i in range(count)
    ]
    refused = write_run(tmp_path / "no", status="refused", error="no", changes={"model.name": "no"})
    for folders in (runs, [*runs, refused], [refused]):
        compare(folders, tmp_path / "out")
        png = (tmp_path / "out/comparison.png").read_bytes()
        width, height = int.from_bytes(png[16:20]), int.from_bytes(png[20:24])
        assert width == 1500 and 900 <= height <= 1800


@pytest.mark.parametrize(
    ("quartiles", "sentence", "is_noisy"),
    [
        ((99, 100, 101), "Its steps take 0.50 times as long as in setting 1.", False),
        ((70, 100, 130), "Whether its steps are faster is unknown: the machine was busy.", True),
        (
            (180, 190, 205),
            "Its step times show no difference from setting 1: the quartiles overlap.",
            False,
        ),
    ],
)
def test_report_compares_speeds_only_if_the_quartiles_allow_it(
    quartiles, sentence, is_noisy, tmp_path
):
    settings = read_settings([write_run(tmp_path / "a"), write_run(tmp_path / "b", changes=KERNEL)])
    first, second = compute_stats(settings)
    keys = ("step_ms_q1", "step_ms", "step_ms_q3")
    first = replace(first, **dict(zip(keys, (199, 200, 201), strict=True)))
    second = replace(second, **dict(zip(keys, quartiles, strict=True)))
    picture, path = tmp_path / "a.png", tmp_path / "report.html"
    picture.touch()
    for rows in ([first, second], [second, first]):
        write_report(settings, rows, picture, path)
        assert sentence.replace("0.50", "2.00" if rows[0] is second else "0.50") in path.read_text(
            encoding="utf-8"
        )
        assert any("times are not reliable" in note for note in list_notes(rows)) == is_noisy


def test_report_loads_nothing_and_values_control_neither_page_nor_terminal(tmp_path, capsys):
    attack = "<script>alert(1)</script>\x1b[2J"
    runs = [write_run(tmp_path / "a", command=attack, commit=attack, versions={"torch": attack})]
    runs += [
        write_run(tmp_path / name, changes={"model.name": attack + name}, dtype=attack)
        for name in "bc"
    ]
    runs += [write_run(tmp_path / "d", status="refused", error=attack)]
    print_comparison(compare(runs, tmp_path), tmp_path)
    assert "\x1b" not in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page and page.count("&lt;script&gt;") > 10
    assert not re.search(r"https?://|\b(src|href)=\"(?!data:image/png;base64,)|url\(|@import", page)
    assert page.count("data:image/png;base64,") == 1 and len(page) < 1_000_000


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("summary.json", '{"status": ', "summary.json cannot be read"),
        ("summary.json", "[]", "summary.json cannot be read"),
        ("summary.json", "null", "summary.json cannot be read"),
        ("summary.json", "{}", "a has status=null, of a wrong type"),
        (
            "summary.json",
            '{"status": "finished", "last_val_loss": "low"}',
            "a has last_val_loss=low, of a wrong type",
        ),
        ("config.yaml", "a: [1", "config.yaml cannot be read"),
        ("metrics.jsonl", '{"step": 1}\n{"st', "metrics.jsonl cannot be read"),
        ("sweep.json", "{}", "sweep.json cannot be read"),
        ("sweep.json", '{"jobs": []}', "no run to compare"),
    ],
)
def test_damaged_files_are_refused_and_nothing_is_written(tmp_path, file, text, message):
    folder = write_run(tmp_path / "a")
    (folder / file).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message) as refusal:
        compare([folder], tmp_path / "out")
    assert "\n" not in str(refusal.value) and not (tmp_path / "out").exists()


def test_folders_that_are_not_runs_are_refused(tmp_path):
    for folder, message in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path, "has no summary.json"),
    ):
        with pytest.raises(UserError, match=message):
            compare([folder], tmp_path / "out")
    run = write_run(tmp_path / "a")
    with pytest.raises(
        UserError, match=r"config.yaml cannot be created \(File exists\); set another"
    ):
        compare([run], run / "config.yaml")


def test_comparison_of_real_runs(train, tmp_path):
    """compare() reads the files that train.py writes. The losses of two backends with the same seed agree."""
    for name in ("naive", "sdpa"):
        assert train(f"name={name}", f"attention={name}", "train.steps=8") == 0
    rows = compare([tmp_path / "runs/naive", tmp_path / "runs/sdpa"], tmp_path / "runs/comparison")
    assert [row.setting for row in rows] == ["naive: attention=naive", "sdpa: attention=sdpa"]
    assert rows[1].pairs == 1 and rows[1].divergence < 1e-4 and abs(rows[1].difference) < 1e-4
    assert all(row.step_ms > 0 and row.peak_memory_bytes > 0 and row.val_bpb > 0 for row in rows)


def test_repeated_run_is_compared_with_the_first(tmp_path):
    runs = [write_run(tmp_path / name, seed) for name, seed in (("a", 1), ("a2", 2), ("again", 1))]
    first, second = compare_rows(runs)
    assert (first.setting, first.seeds) == ("a and 1 more", 2)
    assert (second.setting, second.verdict) == ("again", "equal losses")
