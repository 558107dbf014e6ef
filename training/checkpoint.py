"""Training state and its checkpoints: files of tensors and plain values (see common/checkpoint_file.py).

format, step, seconds, best_val_loss, best_val_bpb, best_step, evals_since_best, evaluation_interrupted,
wandb_id
model          {name: tensor}             the same names for eager and compiled runs, on one device or many
optimizer      {name: {state}}            of all optimizers; None in a best.pt saved with checkpoint.optimizer=false
scaler         state of the gradient scaler; empty if it is disabled
vocab_size, tokenizer, model_config       everything that sampling needs
identity       settings that must not change when the run resumes
config         the complete run config, for readers; nothing is built from it
"""

import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from common.checkpoint_file import load_checkpoint, save_checkpoint
from common.errors import TrainingFailed, UserError
from common.run_dir import RunDir
from common.settings import format_value
from training.config import OVERFITTING_EVALS, CheckpointConfig, RunConfig, TrainConfig
from training.optimizer import load_state_by_name, state_by_name
from training.sharding import gather, load_weights

if TYPE_CHECKING:
    from training.observers import Observers

SAVED_FIELDS = (
    "step", "seconds", "best_val_loss", "best_val_bpb", "best_step", "evals_since_best",
    "evaluation_interrupted", "wandb_id",
)  # fmt: skip


@dataclass
class TrainState:
    """Everything that an optimizer step changes."""

    model: nn.Module
    optimizers: list[Optimizer]
    scaler: torch.amp.GradScaler
    step: int = 0  # finished optimizer steps
    seconds: float = 0.0  # training time
    best_val_loss: float = math.inf
    best_val_bpb: float = math.inf
    best_step: int | None = None  # None: not evaluated yet
    evals_since_best: int = 0  # evaluations since best_step
    evaluation_interrupted: bool = False  # by a signal; the evaluation at `step` is repeated when the run resumes
    wandb_id: str | None = None

    def record_evaluation(self, val_loss: float, val_bpb: float) -> bool:
        """Update the best validation loss. Returns whether this one is the best."""
        is_best = val_loss < self.best_val_loss
        if is_best:
            self.best_val_loss, self.best_val_bpb, self.best_step = val_loss, val_bpb, self.step
        self.evals_since_best = 0 if is_best else self.evals_since_best + 1
        return is_best

    def summary(self) -> dict:
        """Step, best evaluation and training time, under their names in summary.json."""
        return {
            "step": self.step,
            "best_step": self.best_step,
            "best_val_loss": self.best_val_loss,
            "best_val_bpb": self.best_val_bpb,
            "overfitting": self.evals_since_best >= OVERFITTING_EVALS,
            "wall_seconds": self.seconds,
        }

    def values(self) -> dict:
        """The part of a checkpoint that is neither a tensor nor metadata."""
        return {key: getattr(self, key) for key in SAVED_FIELDS} | {"scaler": self.scaler.state_dict()}

    def tensors(self) -> dict:
        """Weights and optimizer state, complete, on rank 0. All processes must call this method."""
        weights = {p: gather(p.detach()) for p in self.model.parameters()}
        state = state_by_name(self.model, self.optimizers)
        return {
            "model": {name: weights[p] for name, p in self.model.state_dict(keep_vars=True).items()},
            "optimizer": {name: {key: gather(value) for key, value in state[name].items()} for name in state},
        }

    def resume(self, path: Path, metadata: dict) -> None:
        """Read a checkpoint of a run that has the same identity. Raises UserError."""
        saved = load_checkpoint(path)
        check_identity(path.parent.parent, saved["identity"], metadata["identity"])
        if saved["optimizer"] is None:
            raise UserError(
                f"{path} has no optimizer state, because it was saved as best.pt with checkpoint.optimizer=false; "
                "set another name, and train.init_from to start from its weights"
            )
        load_weights(self.model, saved["model"])
        load_state_by_name(self.model, self.optimizers, saved["optimizer"])
        if saved["scaler"]:  # empty if the run was not in float16 so far
            self.scaler.load_state_dict(saved["scaler"])
        for key in SAVED_FIELDS:
            setattr(self, key, saved[key])


def compute_progress(config: TrainConfig, step: int, seconds: float, evals_since_best: int) -> float:
    """The finished part of the run, 0 to 1: the larger of step / train.steps and elapsed time / train.minutes.

    It is 1 if the last train.patience evaluations found no lower validation loss.
    """
    if config.patience is not None and evals_since_best >= config.patience:
        return 1.0
    by_steps = step / config.steps if config.steps is not None else 0.0
    by_time = seconds / (60 * config.minutes) if config.minutes is not None else 0.0
    return min(1.0, max(by_steps, by_time))


class CheckpointWriter:
    """Writes the checkpoints of a run, after its metrics are on the disk. Rank 0 writes; all processes call `save`.

    state: already resumed. metadata: see make_checkpoint_metadata.
    """

    def __init__(
        self, run: RunDir, state: TrainState, metadata: dict, observers: "Observers", config: CheckpointConfig
    ):
        self.run, self.state, self.metadata, self.observers, self.config = run, state, metadata, observers, config
        self.last_step = state.step  # the step of last.pt, if it exists

    def save(self, *, best: bool, last: bool) -> None:
        """Write best.pt, last.pt or both, and update summary.json. Raises TrainingFailed if a loss is not finite.

        best.pt is written first: a run that is killed in between repeats the evaluation.
        """
        if self.run.is_main:
            self.observers.flush()
        content = self.metadata | self.state.values() | self.state.tensors()
        if not self.run.is_main:
            return
        if best:
            write_checkpoint(self.run.best, content if self.config.optimizer else content | {"optimizer": None})
        if last:
            if self.config.keep > 0 and self.run.last.exists() and self.last_step != self.state.step:
                self._keep_last()
            write_checkpoint(self.run.last, content)
            for path in self._kept_paths()[: -self.config.keep]:
                path.unlink()
            self.last_step = self.state.step
        self.run.update(self.state.summary() | self.observers.summary())
        self.observers.wandb.set_summary(self.run.summary)

    def _keep_last(self) -> None:
        """Give last.pt, which is replaced next, the second name step-NNNNNN.pt. Nothing is copied."""
        kept = self.run.last.with_name(f"step-{self.last_step:06d}.pt")
        kept.unlink(missing_ok=True)
        try:
            kept.hardlink_to(self.run.last)
        except OSError:  # a file system without hard links
            shutil.copy2(self.run.last, kept)

    def _kept_paths(self) -> list[Path]:
        paths = self.run.last.parent.glob("step-[0-9]*.pt")
        return sorted(paths, key=lambda path: int(path.stem.removeprefix("step-")))


def write_checkpoint(path: Path, content: dict) -> None:
    """Write a checkpoint file. Raises TrainingFailed if a weight is not finite."""
    if not nn.utils.get_total_norm(content["model"].values(), math.inf).isfinite():
        raise TrainingFailed(
            f"the weights are not finite after step {content['step']}, so {path} is not replaced; set a lower "
            "optimizer.lr, and start the same run again"
        )
    save_checkpoint(path, content)


def make_checkpoint_metadata(config: RunConfig, meta: dict) -> dict:
    """The part of a checkpoint that is constant in a run. config: of train.py. meta: the data's meta.json."""
    model = asdict(config.model)
    identity = {f"model.{key}": value for key, value in model.items() if key not in ("name", "dropout")}
    identity |= {"data.name": meta["source"]["name"], "data": meta["fingerprint"]}
    identity |= {"data.document_mask": config.data.document_mask}
    identity |= {f"data.mix.{name}.weight": part.weight for name, part in config.data.mix.items()}
    identity |= {"tokenizer.name": config.tokenizer.name, "vocabulary": meta["vocab_size"]}
    identity |= {"seed": config.seed, "train.init_from": config.train.init_from}
    identity |= {"optimizer.name": config.optimizer.name, "train.batch_size": config.train.batch_size}
    return {
        "model_config": model,
        "vocab_size": meta["vocab_size"],
        "tokenizer": meta["tokenizer"],
        "identity": identity,
        "config": asdict(config),
    }


def check_identity(folder: Path, saved: dict, identity: dict) -> None:
    """Raises UserError if a run would resume with another model, data, tokenizer, optimizer, batch size or seed."""
    different = ", ".join(
        f"{key}={format_value(saved.get(key))} (now {format_value(value)})"
        for key, value in identity.items()
        if saved.get(key) != value
    )
    if different:
        raise UserError(f"{folder} was trained with {different}; restore the old values, or set another name")
