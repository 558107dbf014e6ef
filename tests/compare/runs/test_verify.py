"""compare.py verify=true: repeated first steps of runs."""

import json
from math import inf
from pathlib import Path

import pytest
from helpers import metrics

from compare.runs import verify
from compare.runs.verify import verify_runs


def change_loss(name: str, step: int, factor: float) -> None:
    """Change the recorded training loss of a step."""
    rows = metrics(name)
    rows[step]["train/loss"] *= factor
    Path(f"runs/{name}/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_all(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_first_steps_are_repeated_without_changing_the_run(trained, train, capsys):
    job = "sweeps/cmp/optimizer=adamw,seed=2"
    assert train(f"name={job}", "optimizer=adamw", "seed=2", "wandb.group=cmp") == 0
    change_loss(job, 3, 1 + 1e-6)
    names = ["optimizer=adamw,seed=2", "optimizer=adamw,seed=3"]  # the second has not started
    Path("runs/sweeps/cmp/sweep.json").write_text(json.dumps({"command": "", "jobs": names}))
    before = read_all(Path("runs"))
    capsys.readouterr()
    assert verify_runs([Path("runs/a"), Path("runs/sweeps/cmp")], 5) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a: equal for 5 steps"
    loss = metrics(job)[3]["train/loss"]
    difference = f"{names[0]}: first difference at step 3: {loss * 1e-6:.1e} of {loss:.2f} (rounding); same device_name"
    assert lines[1].startswith(difference)
    assert lines[2:] == [f"{names[1]}: not started, without a step to repeat"]
    assert read_all(Path("runs")) == before


@pytest.mark.parametrize(
    ("factor", "dtype", "verdict", "code"),
    [
        (1.005, "bfloat16", "more than rounding, which is 1e-03 of the loss x the step", 1),
        (1.0035, "bfloat16", "rounding", 0),
        (1.0035, "float32", "more than rounding, which is 1e-05 of the loss x the step", 1),
        (inf, "float32", "more than rounding, which is 1e-05 of the loss x the step", 1),
    ],
)
def test_difference_is_compared_with_the_precision(trained, monkeypatch, capsys, factor, dtype, verdict, code):
    path = Path("runs/a/summary.json")
    summary = json.loads(path.read_text()) | {"dtype": dtype}
    path.write_text(json.dumps(summary))
    losses = {row["step"]: row["train/loss"] for row in metrics("a")[1:]} | {7: 1.0}
    difference = abs(factor - 1) * losses[4]
    losses[2], losses[4] = losses[2] * (1 + 1e-6), losses[4] * factor
    if factor == inf:
        del losses[4]  # as if it were null
    now = summary | {"threads": 99, "versions": {"torch": "9.0"}}
    monkeypatch.setattr(
        verify, "_repeat", lambda *_: (losses, {row["step"]: row["lr"] for row in metrics("a")[1:]}, now)
    )
    assert verify_runs([Path("runs/a")], 20) == code
    printed = capsys.readouterr().out
    assert "a: first difference at step 2: " in printed
    assert f", largest at step 4: {difference:.1e} ({verdict}); threads " in printed
    assert printed.endswith(f"; threads {summary['threads']}, now 99; torch {summary['versions']['torch']}, now 9.0\n")


def test_reason_of_a_failed_repeat_is_shown(trained, capsys):
    Path("text.txt").unlink()
    assert verify_runs([Path("runs/a")], 20) == 1
    assert capsys.readouterr().out.startswith("a: failed: train.py: data.path=text.txt")


def test_changed_schedule_and_time_limits_are_not_repeated(trained, train, capsys):
    assert train("name=b", "schedule.warmup_steps=1") == 0
    assert train("name=b", "schedule.warmup_steps=1", "train.steps=60") == 0  # the first steps decayed faster
    capsys.readouterr()
    assert verify_runs([Path("runs/b")], 6) == 0
    assert capsys.readouterr().out == (
        "b: not repeated: a setting of its learning rate, such as train.steps, was changed after its start\n"
    )
    path = Path("runs/a/config.yaml")
    path.write_text(path.read_text().replace("minutes: null", "minutes: 1.0"))
    assert verify_runs([Path("runs/a")], 6) == 0
    assert "not repeated: with train.minutes, the learning rate depends on" in capsys.readouterr().out
