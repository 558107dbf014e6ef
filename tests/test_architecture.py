"""The structure of the project: which packages and libraries a package may import."""

import ast
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from helpers import ROOT

# Import order: a package imports only packages before it. The scripts may import all packages.
PACKAGES = [
    "common",
    "model",
    "data",
    "huggingface",
    "generation",
    "training",
    "comparison",
    "configs",
]
# Libraries that a folder must not import.
FORBIDDEN = {
    "common": {"hydra", "omegaconf", "wandb", "datasets"},
    "data": {"hydra", "omegaconf", "wandb"},
    "model": {"hydra", "omegaconf", "wandb", "datasets"},
    "training": {"hydra", "omegaconf", "datasets"},
    "comparison/runs": {"hydra", "omegaconf", "torch", "wandb", "datasets"},
    "comparison/bench": {"hydra", "omegaconf", "datasets"},
}
MAX_MAIN_LINES = 100  # of main in train.py
MAX_MAIN_INDENT = 5 * 4
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))] + sorted(
    ROOT.glob("*.py")
)


def imported_modules(path: Path) -> set[str]:
    """Modules that a file imports anywhere, and the names that it imports from them, which can be modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imported_packages(path: Path) -> set[str]:
    return {module.split(".")[0] for module in imported_modules(path)}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_packages_before_them(package):
    scripts = {path.stem for path in ROOT.glob("*.py")}
    later = scripts | set(PACKAGES[PACKAGES.index(package) + 1 :])
    for path in (ROOT / package).rglob("*.py"):
        assert not imported_packages(path) & later, path


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_packages_import_only_their_libraries(folder):
    for path in (ROOT / folder).rglob("*.py"):
        assert not imported_packages(path) & FORBIDDEN[folder], path


def test_every_package_is_in_the_import_order():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == set(PACKAGES)


def test_no_two_files_import_each_other():
    """Also not through other files, in functions, or for type checking."""
    files = [path for path in FILES if path.parent != ROOT and path.name != "__init__.py"]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    imports = {name: imported_modules(path) & set(modules) for name, path in modules.items()}
    assert len(list(TopologicalSorter(imports).static_order())) == len(
        files
    )  # raises CycleError for a circle


def test_training_loop_is_short_and_flat():
    """Move setup and bookkeeping out of main, not the loop itself."""
    functions = [
        node
        for node in ast.parse((ROOT / "train.py").read_bytes()).body
        if isinstance(node, ast.FunctionDef)
    ]
    (main,) = [function for function in functions if function.name == "main"]
    assert main.end_lineno - main.lineno + 1 <= MAX_MAIN_LINES
    assert (
        max(node.col_offset for node in ast.walk(main) if isinstance(node, ast.stmt))
        <= MAX_MAIN_INDENT
    )


def test_text_files_have_an_encoding():
    """ruff's PLW1514 knows the types of some paths only."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in (
                "read_text",
                "write_text",
            ):
                assert "encoding" in {keyword.arg for keyword in node.keywords}, (
                    f"{path}:{node.lineno}"
                )


def test_datasets_is_imported_by_one_module():
    assert [path.name for path in FILES if "datasets" in imported_packages(path)] == ["readers.py"]


def test_config_checks_import_no_torch():
    """Typos on the command line are reported before torch is imported, which takes seconds."""
    code = (
        "import sys, configs.cli; sys.exit(bool({'torch', 'datasets', 'wandb'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_every_name_that_a_config_accepts_has_a_function():
    from model.config import MLPS
    from model.gpt import ACTIVATIONS
    from training.config import OPTIMIZER_CONFIGS
    from training.optimizer import OPTIMIZERS

    assert set(MLPS) == set(ACTIVATIONS), (
        "list an activation in model/config.py and in model/gpt.py"
    )
    assert set(OPTIMIZER_CONFIGS) == set(OPTIMIZERS), (
        "list an optimizer in config.py and in optimizer.py"
    )


def test_backends_are_named_in_the_attention_package_only():
    for path in FILES:
        if (
            path.parent.name != "attention" and path != ROOT / "model/config.py"
        ):  # which has the default
            strings = {
                node.value
                for node in ast.walk(ast.parse(path.read_bytes()))
                if isinstance(node, ast.Constant)
            }
            assert not strings & {"naive", "sdpa", "flash", "cudnn", "flex"}, path


def test_model_can_be_imported_with_torch_alone():
    """So that it can be copied into another project: no other package than errors and settings."""
    code = "import json, sys, model.gpt, model.attention; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    modules = json.loads(done.stdout)
    ours = {name for name in modules if name.split(".")[0] in PACKAGES}
    others = {name for name in ours if not name.startswith("model")}
    assert others == {"common", "common.errors", "common.settings"}
    assert not {"tiktoken", "rich", "filelock", "yaml"} & set(modules)


def test_no_script_has_the_name_of_a_package():
    assert not {path.stem for path in ROOT.glob("*.py")} & set(PACKAGES)
