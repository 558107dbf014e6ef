"""The structure of the project: which packages and libraries a package may import."""

import ast
import json
import subprocess
import sys
from functools import cache
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
    "attention_bench",
    "results",
    "sweep",
    "configs",
]
# Libraries that a folder must not import.
FORBIDDEN = {
    "common": {"hydra", "omegaconf", "datasets"},
    "data": {"hydra", "omegaconf"},
    "model": {"hydra", "omegaconf", "datasets"},
    "huggingface": {"hydra", "omegaconf", "datasets"},
    "generation": {"hydra", "omegaconf", "datasets"},
    "training": {"hydra", "omegaconf", "datasets"},
    "results": {"hydra", "omegaconf", "torch", "datasets"},
    "attention_bench": {"hydra", "omegaconf", "datasets"},
}
MAX_MAIN_LINES = 110  # of main in train.py
MAX_MAIN_INDENT = 5 * 4
SCRIPTS = sorted(ROOT.glob("*.py"))
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
FILES = MODULES + SCRIPTS
BACKENDS = {"naive", "sdpa", "flash", "cudnn", "flex"}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def imported_modules(path: Path) -> set[str]:
    """Modules that a file imports anywhere, and the names that it imports from them.

    The names can be modules, too.
    """
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imported_packages(path: Path) -> set[str]:
    return {module.split(".")[0] for module in imported_modules(path)}


def test_every_package_is_in_the_import_order():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_packages_before_them(package):
    later = {path.stem for path in SCRIPTS} | set(PACKAGES[PACKAGES.index(package) + 1 :])
    for path in (ROOT / package).rglob("*.py"):
        assert not imported_packages(path) & later, path


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_packages_import_only_their_libraries(folder):
    for path in (ROOT / folder).rglob("*.py"):
        assert not imported_packages(path) & FORBIDDEN[folder], path


def test_no_two_files_import_each_other():
    """Also not through other files, in functions, or for type checking."""
    modules = {}
    for path in MODULES:
        if path.name != "__init__.py":
            modules[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    imports = {name: imported_modules(path) & set(modules) for name, path in modules.items()}
    order = TopologicalSorter(imports).static_order()  # raises CycleError for a circle
    assert set(order) == set(modules)


def test_no_script_has_the_name_of_a_package():
    assert not {path.stem for path in SCRIPTS} & set(PACKAGES)


def test_training_loop_is_short_and_flat():
    """Move setup and bookkeeping out of main, not the loop itself."""
    functions = [
        node for node in parse(ROOT / "train.py").body if isinstance(node, ast.FunctionDef)
    ]
    (main,) = [function for function in functions if function.name == "main"]
    assert main.end_lineno - main.lineno + 1 <= MAX_MAIN_LINES
    indents = [node.col_offset for node in ast.walk(main) if isinstance(node, ast.stmt)]
    assert max(indents) <= MAX_MAIN_INDENT


def find_texts_without_encoding(path: Path) -> list[int]:
    """Lines that read or write a text file without an encoding."""
    lines = []
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.Call):
            continue
        if getattr(node.func, "attr", None) in ("read_text", "write_text"):
            arguments = {keyword.arg for keyword in node.keywords}
            if "encoding" not in arguments:
                lines.append(node.lineno)
    return lines


def test_text_files_have_an_encoding():
    """ruff's PLW1514 knows the types of some paths only."""
    for path in FILES:
        assert not find_texts_without_encoding(path), path


@pytest.mark.parametrize(
    ("library", "module"),
    [
        ("datasets", "data/readers.py"),
        ("transformers", "huggingface/modeling_trilgpt.py"),
        ("wandb", "results/wandb.py"),
    ],
)
def test_slow_library_is_imported_by_one_module(library, module):
    assert [path for path in FILES if library in imported_packages(path)] == [ROOT / module]


def test_exported_code_needs_torch_and_transformers_only():
    """export.py copies it as text. No other file imports it, which would load transformers."""
    path = ROOT / "huggingface/modeling_trilgpt.py"
    assert imported_packages(path) == {"torch", "transformers"}
    for other in FILES:
        assert "huggingface.modeling_trilgpt" not in imported_modules(other)


def test_backends_are_named_in_the_attention_package_only():
    for path in FILES:
        if path.parent.name == "attention" or path == ROOT / "model/config.py":  # the default
            continue
        nodes = [node for node in ast.walk(parse(path)) if isinstance(node, ast.Constant)]
        assert not {node.value for node in nodes} & BACKENDS, path


def test_every_activation_that_a_config_accepts_has_a_function():
    """List it in model/config.py and in model/gpt.py."""
    from model.config import MLPS
    from model.gpt import ACTIVATIONS

    assert set(MLPS) == set(ACTIVATIONS)


def test_every_optimizer_that_a_config_accepts_has_a_function():
    """List it in training/config.py and in training/optimizer.py."""
    from training.config import OPTIMIZER_CONFIGS
    from training.optimizer import OPTIMIZERS

    assert set(OPTIMIZER_CONFIGS) == set(OPTIMIZERS)


def modules_after(statement: str) -> set[str]:
    """The modules that a new process has after a statement."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    return set(json.loads(done.stdout))


def test_composition_reads_no_data_and_imports_no_torch():
    """Typos on the command line are reported before torch is imported, which takes seconds."""
    words = ["data.path=missing.txt", "train.minutes=5", "name=a"]
    code = "import training.presets, configs.compose"
    code += f"\nconfigs.compose.compose_config('train', {words})"
    assert not {"torch", "datasets", "wandb"} & modules_after(code)


def test_model_can_be_imported_with_torch_alone():
    """So that it can be copied into another project: no other package than errors and settings."""
    modules = modules_after("import model.gpt, model.attention")
    ours = {name for name in modules if name.split(".")[0] in PACKAGES}
    others = {name for name in ours if not name.startswith("model")}
    assert others == {"common", "common.errors", "common.settings"}
    assert not {"tiktoken", "rich", "filelock", "yaml"} & modules
