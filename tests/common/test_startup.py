"""Start and exit of a process: idle threads, garbage, imports, exit handlers."""

import gc
import os
import subprocess
import sys

import pytest
from helpers import ROOT

from common import process as startup


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
    code = "from common.process import start_process; start_process(); import torch"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this build of torch has another OpenMP")
    assert f"GOMP_SPINCOUNT = '{spin_count}'" in done.stderr


@pytest.fixture
def garbage_collection():
    """Restores the garbage collector."""
    yield
    gc.unfreeze()
    gc.enable()


def test_garbage_is_not_collected_during_imports(garbage_collection):
    startup.pause_garbage_collection()
    assert not gc.isenabled()


def test_garbage_is_collected_after_imports_but_not_searched_in_modules(garbage_collection):
    startup.pause_garbage_collection()
    startup.resume_garbage_collection()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


# torch._dynamo, whose import takes most of a second

PRINT_USER_OF_DYNAMO = """
import sys
import torch
from helpers import ADAMW, MUON, tiny_model
from training.optimizer import *

def report(name):
    if "torch._dynamo" in sys.modules:
        print(name)
        sys.exit()

model = tiny_model()
tokens = torch.zeros(2, 8, dtype=torch.int64)
scaler = torch.amp.GradScaler("cpu", enabled=False)
for config in (ADAMW, MUON):
    optimizers = build_optimizers(model, config)
    report("build_optimizers")
    model(tokens, tokens).backward()
    report("backward")
    optimizer_step(model, optimizers, scaler, 1.0)
    report("optimizer_step")
    state = state_by_name(model, optimizers)
    for optimizer in optimizers:
        optimizer.state_dict()
    report("state_dict")
    load_state_by_name(model, optimizers, state)
    report("load_state_by_name")
"""


def test_optimizers_do_not_import_dynamo():
    """In a new process, because other tests import it."""
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]"
    code += PRINT_USER_OF_DYNAMO
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


# The exit of a process

EXIT = """
import atexit, sys, time
from common.process import exit_process
atexit.register(print, "exit handler")
print("flushed", end=" ")
exit_process(3)
"""


@pytest.fixture(scope="module")
def ended() -> subprocess.CompletedProcess:
    """A process that ended with exit_process."""
    return subprocess.run([sys.executable, "-c", EXIT], cwd=ROOT, capture_output=True, text=True)


def test_process_ends_with_the_exit_code(ended):
    assert ended.returncode == 3


def test_process_runs_exit_handlers_and_flushes_its_output(ended):
    assert ended.stdout == "flushed exit handler\n"
