"""docs/attention-variants.md: its changes of the code work, and its commands compose.

All changes are applied to one copy of the code, in which check_attention_variants.py runs.
"""

import json
from pathlib import Path

import docs_helpers as docs
import pytest
from changes_helpers import copy_changed_code, run_python
from docs_helpers import ATTENTION_VARIANTS

pytestmark = pytest.mark.slow
CHECKS = "tests/check_attention_variants.py"


@pytest.fixture(scope="module")
def changed_code(tmp_path_factory) -> Path:
    """A copy of the code with all changes of the page."""
    code = tmp_path_factory.mktemp("code")
    copy_changed_code(ATTENTION_VARIANTS, code)
    return code


@pytest.mark.compiles
def test_variants_pass_their_checks(changed_code):
    run_python(changed_code, ["-m", "pytest", CHECKS, "-n", "0", "-m", ""])


def test_changed_code_has_no_undefined_and_no_unused_names(changed_code):
    run_python(changed_code, ["-m", "ruff", "check", "--select", "F", "."])


def test_commands_compose(changed_code):
    words = [command.words for command in docs.read_commands(ATTENTION_VARIANTS) if command.script]
    code = "import json, sys\nfrom configs.cli import parse_config\n"
    code += "for words in json.loads(sys.argv[1]): parse_config('train', '', words)"
    run_python(changed_code, ["-c", code, json.dumps(words)])
