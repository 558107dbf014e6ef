"""Checkpoints of a run: files of tensors and plain values (common/checkpoint_file.py).

format: version of this list
the fields of TrainState in SAVED_FIELDS
model, optimizer: state by parameter name, equal for eager and compiled runs, on any number of
    devices; teachers: a list of states of the model; scaler: state of the GradScaler
vocab_size, tokenizer, model_config: everything that sampling needs
identity: settings that must not change when the run resumes
config: the complete run config, for readers and error messages; nothing is built from it
"""

import json
import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from common.checkpoint_file import load_checkpoint, save_checkpoint
from common.console import print_text
from common.errors import TrainingFailed, UserError
from common.files import atomic_writer
from common.settings import describe_changes, flatten_dict, format_value
from data.tokenizer import is_same_vocabulary
from model.config import GPTConfig
from training.config import CheckpointConfig, RunConfig
from training.run_folder import RunFolder
from training.runtime import Dist
from training.train_state import TrainState


def make_checkpoint_header(config: RunConfig, meta: dict) -> dict[str, Any]:
    """The part of a checkpoint that is constant in a run. meta: meta.json of the data.

    The identity has the settings that a resumed run must share: with others, its weights do not
    fit, or its batches are different ones.
    """
    return {
        "model_config": asdict(config.model),
        "vocab_size": meta["vocab_size"],
        "tokenizer": meta["tokenizer"],  # made by to_spec (data/tokenizer.py)
        "identity": {
            **_model_identity(config.model),
            "data.name": meta["name"],
            "data": meta["fingerprint"],  # hash of the text, and of the settings that read it
            "data.document_mask": config.data.document_mask,
            "tokenizer.name": config.tokenizer.name,
            "vocabulary": meta["vocab_size"],
            "seed": config.seed,
            "train.init_from": config.train.init_from,
            "optimizer.name": config.optimizer.name,
            "train.batch_size": config.train.batch_size,
            "train.n_teachers": config.train.n_teachers,
        },
        "config": asdict(config),
    }


def load_last_checkpoint(run: RunFolder, state: TrainState, header: dict, dist: Dist) -> None:
    """Load last.pt into `state`, if the run has one.

    Raises UserError if the model, data or another part of the identity has changed, or if the
    processes find different checkpoints.
    """
    if run.resumes:
        saved = load_checkpoint(run.last)
        if saved["optimizer"] is None:
            raise UserError(f"{run.last} has no optimizer state, as best.pt; restore it")
        check_identity(run.folder, saved, header)
        changes = describe_changes(flatten_dict(saved["config"]), flatten_dict(header["config"]))
        if changes:
            print_text(f"changed  {', '.join(changes.values())}")
        state.load_state_dict(saved)
        used = state.used_limits
        reached = [changes[key] for key in changes if used.get(key, 0) >= 1]
        if reached:
            raise UserError(
                f"{run.folder} has reached {' and '.join(reached)} at step {state.step}; "
                "set a larger value"
            )
    found = f"{run.folder} at step {state.step} with the best evaluation at step {state.best_step}"
    dist.require_equal(found, f"copy the newest {run.folder} to all machines")


def check_identity(folder: Path, saved: dict, header: dict) -> None:
    """Raise UserError if a checkpoint is of a run with another identity. Lists the differences."""
    model = GPTConfig.from_saved(saved["model_config"])  # has keys that are newer than the run
    old = _model_identity(model) | {"train.n_teachers": None} | saved["identity"]
    changes = describe_changes(old, header["identity"])
    if "data" in changes:  # a hash of the text and of the settings that read it: name these
        del changes["data"]
        settings = describe_changes(
            _data_settings(saved["config"]), _data_settings(header["config"])
        )
        data = header["config"]["data"]
        source = format_value(data["path"] or data["name"])
        changes |= settings or {"text": f"another text than {source} has now"}
    elif not is_same_vocabulary(saved["tokenizer"], header["tokenizer"]):
        changes["vocabulary"] = "a vocabulary that an earlier version made of the same text"
    if changes:
        raise UserError(
            f"{folder} was trained with {', '.join(changes.values())}; restore the old values, or "
            "set another name"
        )


def _model_identity(config: GPTConfig) -> dict[str, Any]:
    """The settings of the model that determine its weights and what it computes."""
    return {
        f"model.{key}": value
        for key, value in vars(config).items()
        if key not in ("name", "dropout")
    }


def _data_settings(config: dict) -> dict:
    """The settings of data and tokenizer: {"data.path": value}."""
    return flatten_dict({"data": config["data"], "tokenizer": config["tokenizer"]})


def remove_later_steps(run: RunFolder, state: TrainState) -> None:
    """Remove what a killed process has written after the step of `state`.

    These are rows of metrics.jsonl, checkpoints and attention maps. A best.pt of a later step
    stays, because the run reaches this step again.
    Raises UserError if a row up to this step is missing.
    """
    if not run.is_main:
        return
    _remove_later_rows(run.folder / "metrics.jsonl", state.last_logged_step)
    for pattern in ("checkpoints/step-*.pt", "attention/**/step-*.png"):
        for step, path in find_step_files(run.folder, pattern):
            if step > state.step:
                path.unlink()


def _remove_later_rows(path: Path, step: int) -> None:
    """Remove the rows after `step` from metrics.jsonl.

    The first row is of step 0, or of step 1 without an initial evaluation. A process that was
    killed can leave an incomplete last line.
    """
    content = path.read_bytes() if path.exists() else b""
    last = -1  # step of the last row that stays
    size = 0  # bytes of the rows that stay
    for line in content.splitlines(keepends=True):
        found = _read_step(line)
        is_next = found == last + 1 or (last == -1 and found == 1)
        if not is_next or found > step:
            break
        last = found
        size += len(line)
    if step > 0 and last != step:
        raise UserError(f"{path} has no row of step {last + 1}; restore it, or set another name")
    path.touch()
    os.truncate(path, size)


def _read_step(line: bytes) -> Any:
    """The step of a line of metrics.jsonl. None for an incomplete or damaged line."""
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None


def find_step_files(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    """Find files that are named after a step, and sort them by it. Others are ignored.

    pattern: such as checkpoints/step-*.pt.
    """
    files = [(path.stem.removeprefix("step-"), path) for path in folder.glob(pattern)]
    return sorted((int(step), path) for step, path in files if step.isdecimal())


@dataclass
class CheckpointWriter:
    """Writes the checkpoints of a run. Rank 0 writes; all processes call `save`."""

    config: CheckpointConfig
    run: RunFolder
    state: TrainState
    header: dict  # returned by make_checkpoint_header

    def __post_init__(self) -> None:
        self.last_step = self.state.step  # of last.pt; the state is loaded from it

    @property
    def is_due(self) -> bool:
        """Whether to save after the current step."""
        return self.state.step % self.config.every == 0 or self.state.is_best or self.state.is_done

    def save(self) -> None:
        """Write best.pt after the best evaluation. Then write last.pt, except at step 0.

        config.keep earlier versions of last.pt stay, as step-NNNNNN.pt.
        Raises TrainingFailed if a weight is not finite.
        """
        run = self.run
        state = self.state
        if state.step == 0 and not state.is_best:
            return
        content = self.header | state.state_dict()  # all processes must call it
        if not run.is_main:
            return
        if not nn.utils.get_total_norm(content["model"].values(), math.inf).isfinite():
            raise TrainingFailed(
                f"the weights are not finite after step {state.step}. Lower optimizer.lr, then "
                f"resume with the same command and name={run.name}"
            )
        if state.is_best:
            # about a third of the size
            save_checkpoint(run.best, content | {"optimizer": None, "teachers": []})
        if state.step > 0:
            # If a resumed run has repeated an evaluation, last.pt is of this step already.
            if self.config.keep > 0 and 0 < self.last_step < state.step:
                self._keep_last()
            save_checkpoint(run.last, content)
            self.last_step = state.step

    def _keep_last(self) -> None:
        """Copy last.pt to step-NNNNNN.pt, and remove the oldest copies."""
        copy = self.run.last.with_name(f"step-{self.last_step:06d}.pt")
        with open(self.run.last, "rb") as last, atomic_writer(copy) as file:
            shutil.copyfileobj(last, file)  # some disks have no hard links
        copies = find_step_files(self.run.folder, "checkpoints/step-*.pt")
        for _, path in copies[: -self.config.keep]:
            path.unlink()
