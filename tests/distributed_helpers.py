"""Starting torchrun, and comparing its runs, for several test files."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TEXT, TINY

SINGLE = [
    "train.batch_size=8",
    "schedule.warmup_steps=100",
    "eval.every=6",
    "checkpoint.every=6",
    "device=cpu",
]


def make_folder(tmp_path_factory, name: str) -> Path:
    """A temporary folder with text.txt."""
    folder = tmp_path_factory.mktemp(name)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


def torchrun(
    processes: int,
    *overrides: str,
    script: Path = ROOT / "train.py",
    flags: tuple[str, ...] = ("--standalone",),
    cwd: Path | None = None,
) -> subprocess.Popen:
    """Start train.py in several processes."""
    command = [sys.executable, "-m", "torch.distributed.run", *flags]
    return subprocess.Popen(
        [*command, f"--nproc_per_node={processes}", str(script), *TINY, *SINGLE, *overrides],
        text=True,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def find_free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def torchrun_on_machines(folders: list[Path], *overrides: str) -> list[subprocess.Popen]:
    """One process in each folder. The processes share no files."""
    endpoint = f"--rdzv_endpoint=localhost:{find_free_port()}"
    flags = (f"--nnodes={len(folders)}", "--rdzv_backend=c10d", endpoint)
    return [torchrun(1, *overrides, flags=flags, cwd=folder) for folder in folders]


def write_train_script(folder: Path, changes: str) -> Path:
    """Write a script that changes functions of the project and then runs train.py."""
    lines = [
        "import os, runpy, sys, time",
        "from pathlib import Path",
        f"sys.path.insert(0, {str(ROOT)!r})",
        changes,
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')",
    ]
    path = folder / "patched.py"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def finish(process: subprocess.Popen) -> str:
    """Wait until a process finishes. Returns its output."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out


def assert_same_curve(a: list[dict], b: list[dict]) -> None:
    """Compare the rows of two runs, up to rounding."""
    assert [row["step"] for row in a] == [row["step"] for row in b]
    for one, two in zip(a, b, strict=True):
        for key in ("train/loss", "val/loss", "val/bpb", "grad_norm"):
            assert one.get(key) == pytest.approx(two.get(key), abs=1e-5), (one["step"], key)


def assert_close_checkpoints(a: dict, b: dict) -> None:
    """Compare weights and optimizer state, up to rounding."""
    for key in ("model", "optimizer"):
        torch.testing.assert_close(a[key], b[key], atol=1e-4, rtol=0)
