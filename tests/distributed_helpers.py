"""Starting torchrun, and comparing its runs, for several test files."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, TINY

SINGLE = [
    "train.batch_size=8",
    "schedule.warmup_steps=100",
    "eval.every=6",
    "checkpoint.every=6",
    "device=cpu",
]


def torchrun(
    processes: int,
    *overrides: str,
    script=ROOT / "train.py",
    flags=("--standalone",),
    cwd=None,
    **environment: str,
) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *flags,
        f"--nproc_per_node={processes}",
    ]
    return subprocess.Popen(
        [*command, str(script), *TINY, *SINGLE, *overrides], env=os.environ | environment, text=True, cwd=cwd,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def torchrun_on_machines(folders: list[Path], *overrides: str) -> list[subprocess.Popen]:
    """One process in each folder. The processes share no files."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = (f"--nnodes={len(folders)}", "--rdzv_backend=c10d", f"--rdzv_endpoint={address}")
    return [torchrun(1, *overrides, flags=flags, cwd=folder) for folder in folders]


def write_train_script(changes: str) -> Path:
    """Write patched.py, which changes functions of the project and then runs train.py."""
    path = Path("patched.py").absolute()
    path.write_text(
        f"import os, runpy, sys, time\nfrom pathlib import Path\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"{changes}\nrunpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\n",
        encoding="utf-8",
    )
    return path


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out


def assert_same_curve(a, b):
    assert [row["step"] for row in a] == [row["step"] for row in b]
    for one, two in zip(a, b, strict=True):
        for key in ("train/loss", "val/loss", "val/bpb", "grad_norm"):
            assert one.get(key) == pytest.approx(two.get(key), abs=1e-5), (one["step"], key)
