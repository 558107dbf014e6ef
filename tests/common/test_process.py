"""The command line of this process."""

import sys

from common.process import command_line, resume_command


def test_command_starts_with_the_program_that_starts_the_processes(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(sys, "argv", ["/folder/train.py", "name=a", "seed=1"])
    assert command_line() == "python train.py name=a seed=1"
    assert resume_command("b") == "python /folder/train.py seed=1 name=b"
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert command_line() == "torchrun --nnodes=2 --nproc_per_node=4 train.py name=a seed=1"
