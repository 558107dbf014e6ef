"""The environment of a run, for summary.json: device, software versions, commit and command."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

from common.device import device_name
from common.system import command_line

PACKAGES = ("torch", "hydra-core", "datasets", "tiktoken", "wandb", "numpy")
# The commit, and "+" if files have changed since. With --git-dir, git does not search the folders
# above the project.
DESCRIBE_COMMIT = "git --git-dir=.git describe --always --abbrev=40 --dirty=+"


def describe_environment(device: torch.device) -> dict:
    """Describe the machine, the software and the command.

    commit: None without git, or if the project is not a checkout.
    """
    project = Path(__file__).parents[1]
    git = subprocess.run(DESCRIBE_COMMIT, shell=True, cwd=project, capture_output=True)
    versions = {name: version(name) for name in PACKAGES}
    return {
        "device": device.type,
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "versions": {"python": platform.python_version(), **versions},
        "commit": git.stdout.decode(errors="replace").strip() or None,
        "command": command_line(),
    }
