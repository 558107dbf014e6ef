"""Start and end of a command's process: idle threads, errors of several ranks, a full disk."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT

from common.errors import UserError
from training.signals import run_main


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="torch's builds for Linux contain GNU's OpenMP"
)
@pytest.mark.parametrize(
    ("variables", "spin_count"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000"),
    ],
    ids=["default", "spin count", "wait policy"],
)
def test_idle_threads_soon_sleep_unless_the_user_sets_a_policy(variables, spin_count):
    environment = dict(os.environ)
    environment.pop("GOMP_SPINCOUNT", None)
    environment.pop("OMP_WAIT_POLICY", None)
    # The library prints its settings when it is loaded
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE"} | variables
    code = "from training.signals import start_process; start_process(); import torch"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this build of torch has another OpenMP")
    assert f"GOMP_SPINCOUNT = '{spin_count}'" in done.stderr


def fail(error):
    raise error


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The times that run_main waits, in seconds, instead of waiting."""
    waits = []
    monkeypatch.setattr("training.signals.time.sleep", waits.append)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    return waits


def test_rank_0_reports_an_error_at_once(waits, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert run_main(fail, UserError("wrong")) == 2
    assert capsys.readouterr().err == "train.py: wrong\n"
    assert not waits


def test_later_ranks_report_an_error_after_rank_0(waits, monkeypatch, capsys):
    """torchrun ends them while they wait, so that an error of all ranks is printed once."""
    monkeypatch.setenv("RANK", "3")
    assert run_main(fail, UserError("wrong")) == 2
    assert capsys.readouterr().err == "train.py, rank 3: wrong\n"
    assert len(waits) == 1


def test_later_ranks_report_no_interruption(waits, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    assert run_main(fail, KeyboardInterrupt()) == 75
    assert capsys.readouterr().err == ""
    assert not waits


def test_later_ranks_raise_a_bug_after_rank_0(waits, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(KeyError):
        run_main(fail, KeyError("wrong"))
    assert len(waits) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_full_disk_at_the_last_flush_is_reported():
    code = "from training.signals import run_process; run_process(lambda: print('result') or 0)"
    command = (
        f"cd '{ROOT}'; env -u PYTHONUNBUFFERED '{sys.executable}' -c \"{code}\" 2>&1 >/dev/full"
    )
    status, output = subprocess.getstatusoutput(command)
    assert status == 1
    assert "free some disk space" in output
