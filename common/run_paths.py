"""Names and folders of runs, and the search for a run or a checkpoint.

docs/run-folder.md lists the files of a run.
"""

import difflib
import os
import re
import time
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

from common.errors import UserError
from common.settings import check_path_component

RUNS = Path("runs")  # in the folder where the command is run
SWEEPS = RUNS / "sweeps"  # runs/sweeps/<sweep>/<job>: the runs of a sweep
RESERVED = ("sweeps", "bench", "comparison", "last")  # cannot be names of runs
# Name of a sweep's job: attention=flash,seed=1
JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,200}")


def check_name(name: str) -> None:
    """Raise UserError for a run name that cannot be a folder in runs/ or runs/sweeps/<sweep>/."""
    job = re.fullmatch(rf"sweeps/([^/]*)/{JOB.pattern}", name)
    check_path_component("name", job[1] if job else name)
    if name in RESERVED:
        raise UserError(f"name={name} is reserved; set another name")


def make_new_folder(parent: Path, label: str) -> str:
    """Make the folder <parent>/<time>-<label>. Returns its name.

    If it exists, -2, -3, ... is appended.
    """
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
    for name in chain([stem], (f"{stem}-{number}" for number in count(2))):
        with suppress(FileExistsError):
            (parent / name).mkdir(parents=True)
            break
    return name


def find_run(name: str) -> Path:
    """Find a run with a checkpoint. Raises UserError if there is none.

    name: its name in runs/, its path, or the path of a checkpoint. "last" is the newest run.
    """
    files = [*RUNS.glob("*/checkpoints/*.pt"), *SWEEPS.glob("*/*/checkpoints/*.pt")]
    files.sort(key=lambda path: (path.stat().st_mtime, path), reverse=True)
    newest = list(dict.fromkeys(path.parents[1] for path in files))
    path = Path(os.path.expanduser(name))
    if path.parent.name == "checkpoints":
        path = path.parents[1]
    candidates = newest[:1] if name == "last" else [RUNS / path, path]
    for folder in candidates:
        if any(folder.glob("checkpoints/*.pt")):
            return folder
    names = [str(folder.relative_to(RUNS)) for folder in newest]
    nearest = difflib.get_close_matches(name.removeprefix("runs/"), names, n=1) or names
    advice = f"set run={nearest[0]}, for example" if nearest else "train one: python train.py"
    raise UserError(f"run={name} has no checkpoint in {Path.cwd() / RUNS}; {advice}")


def find_checkpoint(run: str, checkpoint: str) -> Path:
    """Path of a run's checkpoint. Raises UserError if it does not exist.

    run: as for find_run.
    checkpoint: "best", "last" or "step-N" (step-NNNNNN.pt). Not used if `run` is a file.
    """
    folder = find_run(run)
    if checkpoint.startswith("step-"):
        checkpoint = f"step-{int(checkpoint.removeprefix('step-')):06d}"
    if Path(run).parent.name == "checkpoints":
        checkpoint = Path(run).stem
    paths = {path.stem: path for path in sorted((folder / "checkpoints").glob("*.pt"))}
    if checkpoint not in paths:
        raise UserError(
            f"{folder} has no checkpoint {checkpoint}.pt; "
            f"set run={folder} checkpoint={' or '.join(paths)}"
        )
    return paths[checkpoint]
