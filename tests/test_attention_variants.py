"""docs/attention-variants.md: its changes of the code work, and its commands compare them.

All changes are applied to one copy of the code, in which check_attention_variants.py runs.
"""

import shlex
from pathlib import Path

import docs_helpers as docs
import pytest
from changes_helpers import change_sizes, copy_changed_code, run_python
from docs_helpers import ATTENTION_VARIANTS, Command

pytestmark = pytest.mark.slow
MAX_LINES = 30  # of a section
CHECKS = "tests/check_attention_variants.py"
COMMANDS = [c for c in docs.read_commands(ATTENTION_VARIANTS) if c.script is not None]
CHECK_COMMANDS = [c for c in docs.read_commands(ATTENTION_VARIANTS) if c.text.startswith("pytest")]


@pytest.fixture(scope="module")
def changed_code(tmp_path_factory) -> Path:
    """A copy of the code with all changes of the page."""
    code = tmp_path_factory.mktemp("code")
    copy_changed_code(ATTENTION_VARIANTS, code)
    return code


def test_changes_are_short():
    assert max(change_sizes(ATTENTION_VARIANTS, "## ").values()) <= MAX_LINES


def test_variants_pass_their_checks(changed_code):
    run_python(changed_code, ["-m", "pytest", CHECKS, "-n", "0"])


@pytest.mark.compiles
def test_variants_pass_their_checks_with_compiled_kernels(changed_code):
    run_python(changed_code, ["-m", "pytest", CHECKS, "-n", "0", "-m", "compiles"])


def test_changed_code_has_no_undefined_and_no_unused_names(changed_code):
    run_python(changed_code, ["-m", "ruff", "check", "--select", "F", "."])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.place)
def test_command_runs(changed_code, command: Command):
    words = [word for word in command.short_words() if not word.startswith("seed=")]
    run_python(changed_code, ["train.py", *words, "seed=1", "data.path=null"])


@pytest.mark.parametrize("command", CHECK_COMMANDS, ids=lambda command: command.place)
def test_check_command_runs(changed_code, command: Command):
    run_python(changed_code, ["-m", *shlex.split(command.text, comments=True)])
