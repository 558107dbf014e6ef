"""A short soak test: a few tries of the parts that need no special rights."""

import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(("part", "scale"), [("wrong", 0.1), ("kill", 0.01)])
def test_nothing_is_lost(part, scale):
    command = [sys.executable, ROOT / "tests/soak/soak.py", part, "--scale", str(scale)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{part} " in done.stdout
