"""A short soak test: one try of each command."""

import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.slow
def test_nothing_is_lost():
    command = [sys.executable, ROOT / "tests/soak/soak.py", "--tries", "4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failures: 0" in done.stdout
