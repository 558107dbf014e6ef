"""Training state and its checkpoints: files of tensors and plain values (see common/checkpoint_file.py).

format, and the fields of TrainState in SAVED_FIELDS
model, optimizer, scaler: state by parameter name, the same for eager and compiled runs, on one device or many
vocab_size, tokenizer, model_config: everything that sampling needs
identity: settings that must not change when the run resumes
config: the complete run config, for readers; nothing is built from it
"""

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from common.checkpoint_file import load_checkpoint, save_checkpoint
from common.console import print_text
from common.errors import TrainingFailed, UserError
from common.files import atomic_writer
from common.settings import flatten_dict, format_value
from training.config import OVERFITTING_EVALS, CheckpointConfig, RunConfig, TrainConfig
from training.distributed import Dist
from training.optimizer import load_state_by_name, state_by_name
from training.parallel import gather, load_weights
from training.run_folder import RunFolder
from training.signals import StopRequest

SAVED_FIELDS = ("step", "seconds", "best_val_loss", "best_val_bpb", "best_step", "evals_since_best")
SAVED_FIELDS += ("unlogged", "wandb_id")
STEP_CHECKPOINTS = "checkpoints/step-*.pt"


@dataclass
class TrainState:
    """Everything that training changes: model, optimizers, counters, and the best evaluation."""

    config: TrainConfig
    model: nn.Module
    optimizers: list[Optimizer]
    scaler: torch.amp.GradScaler
    step: int = 0  # finished optimizer steps
    seconds: float = 0.0  # training time
    best_val_loss: float = math.inf
    best_val_bpb: float = math.inf
    best_step: int | None = None  # None: not evaluated yet
    evals_since_best: int = 0  # evaluations since best_step
    stopped: bool = False  # a process got a signal, and all processes know
    unlogged: dict = field(
        default_factory=dict
    )  # metrics of this step, while its evaluation is not complete
    wandb_id: str | None = None
    metrics: dict = field(
        default_factory=dict
    )  # newest value of each metric, when the run starts or resumes
    started: float = 0.0  # value of time.perf_counter() at which `seconds` would be 0

    @property
    def progress(self) -> float:
        """The finished part of the run, 0 to 1, by the first of train.steps, minutes and patience that ends it."""
        return min(1.0, max(self.limits.values()))

    @property
    def limits(self) -> dict[str, float]:
        """The settings that can end the run, and how much of each is used. At 1, the run ends."""
        return {
            "train.steps": self.step / (self.config.steps or math.inf),
            "train.minutes": self.seconds / (60 * (self.config.minutes or math.inf)),
            "train.patience": float(self.evals_since_best >= (self.config.patience or math.inf)),
        }

    @property
    def is_done(self) -> bool:
        """Whether the training loop ends: no step is left, or a signal stopped the run."""
        return self.progress >= 1 or self.stopped

    @property
    def is_best(self) -> bool:
        """Whether the last evaluation, at this step, found the lowest validation loss."""
        return self.best_step == self.step

    def finish_step(self, dist: Dist, stop: StopRequest) -> None:
        """Count a step. All processes agree on the time of the slowest one, and on whether a signal stops them."""
        self.step += 1
        stop.enable()
        stopped, self.seconds = dist.all_reduce(
            stop.requested, time.perf_counter() - self.started, op="max"
        )
        self.stopped = bool(stopped)

    def record_evaluation(self, val_loss: float, val_bpb: float) -> None:
        """Update the best validation loss."""
        self.evals_since_best += 1
        if val_loss < self.best_val_loss:
            self.best_val_loss, self.best_val_bpb = val_loss, val_bpb
            self.best_step, self.evals_since_best = self.step, 0

    def summary(self) -> dict:
        """Step, best evaluation and training time, under their names in summary.json."""
        summary = {
            key: getattr(self, key)
            for key in ("step", "best_step", "best_val_loss", "best_val_bpb")
        }
        return summary | {
            "overfitting": self.evals_since_best >= OVERFITTING_EVALS,
            "wall_seconds": self.seconds,
        }

    def state_dict(self) -> dict:
        """The part of a checkpoint that changes. All processes must call this method; rank 0 gets complete tensors."""
        weights = {p: gather(p.detach()) for p in self.model.parameters()}
        state = state_by_name(self.model, self.optimizers)
        return {key: getattr(self, key) for key in SAVED_FIELDS} | {
            "scaler": self.scaler.state_dict(),
            "model": {
                name: weights[p] for name, p in self.model.state_dict(keep_vars=True).items()
            },
            "optimizer": {
                name: {key: gather(value) for key, value in state[name].items()} for name in state
            },
        }

    def resume(self, path: Path, header: dict) -> None:
        """Load a checkpoint. Raises UserError if the model, data or another part of the identity has changed."""
        saved = load_checkpoint(path)
        old, new = saved["identity"], header["identity"]
        keys = [key for key in new if old.get(key) != new[key]]
        if keys:
            if "data" in keys:  # a hash of the text and of these settings
                settings = (
                    flatten_dict({k: c["config"][k] for k in ("data", "tokenizer")})
                    for c in (saved, header)
                )
                old, new = old | next(settings), new | next(settings)
                keys = [key for key in new if old.get(key) != new[key]]
            listed = [
                f"{k}={format_value(old.get(k))} (now {format_value(new[k])})"
                for k in keys
                if k != "data"
            ]
            if "data" in keys and not any(key.startswith(("data.", "tokenizer.")) for key in keys):
                listed.append(
                    f"another text than {format_value(new['data.path'] or new['data.name'])} has now"
                )
            listed = ", ".join(listed)
            raise UserError(
                f"{path.parents[1]} was trained with {listed}; restore the old values, or set another name"
            )
        if saved["step"] > (self.config.steps or math.inf):
            raise UserError(
                f"{path} has finished step {saved['step']}; set train.steps={saved['step']} or more"
            )
        load_weights(self.model, saved["model"])
        load_state_by_name(self.model, self.optimizers, saved["optimizer"] or {})
        if saved["optimizer"] is None:
            print_text(
                f"{path} is a copy of best.pt, which has no optimizer state: the optimizer starts again"
            )
        if saved["scaler"]:  # empty if the run was not in float16 so far
            self.scaler.load_state_dict(saved["scaler"])
        for key in SAVED_FIELDS:
            setattr(
                self, key, saved.get(key, getattr(self, key))
            )  # earlier versions had fewer fields


@dataclass
class CheckpointWriter:
    """Writes the checkpoints of a run. Rank 0 writes; all processes call `save`."""

    config: CheckpointConfig
    run: RunFolder
    state: TrainState
    header: dict  # returned by make_checkpoint_header
    before_save: Callable[
        [], dict
    ]  # writes the metrics to the disk, and returns the results for summary.json
    last_step: int  # step of last.pt, if it exists

    def is_due(self) -> bool:
        """Whether to save after the current step."""
        return self.state.is_best or self.state.is_done or self.state.step % self.config.every == 0

    def save(self) -> None:
        """Write best.pt, without optimizer state, after the best evaluation. Then write last.pt, except at step 0.

        Raises TrainingFailed if a loss or a weight is not finite.
        """
        run, state = self.run, self.state
        if state.step == 0 and not state.is_best:
            return
        results = self.before_save() if run.is_main else {}
        content = self.header | state.state_dict()
        if not run.is_main:
            return
        if not nn.utils.get_total_norm(content["model"].values(), math.inf).isfinite():
            advice = "Lower optimizer.lr, then run the command again: it resumes from the last checkpoint"
            raise TrainingFailed(f"the weights are not finite after step {state.step}. {advice}")
        if state.is_best:
            save_checkpoint(run.best, content | {"optimizer": None})
        if state.step > 0:
            if self.config.keep > 0 and run.last.exists() and self.last_step != state.step:
                previous = run.last.with_name(f"step-{self.last_step:06d}.pt")
                with (
                    open(run.last, "rb") as last,
                    atomic_writer(previous) as file,
                ):  # some disks have no hard links
                    shutil.copyfileobj(last, file)
            save_checkpoint(run.last, content)
            older = find_step_files(run, STEP_CHECKPOINTS)
            for path in sorted(older, key=older.__getitem__)[: -self.config.keep]:
                path.unlink()
            self.last_step = state.step
        run.update(results)


def find_step_files(run: RunFolder, pattern: str) -> dict[Path, int]:
    """Find files of a run that are named after a step, with their steps. Files with other names are ignored.

    pattern: such as checkpoints/step-*.pt.
    """
    numbers = {path: path.stem.removeprefix("step-") for path in run.folder.glob(pattern)}
    return {path: int(number) for path, number in numbers.items() if number.isdecimal()}


def remove_later_steps(run: RunFolder, state: TrainState, header: dict, dist: Dist) -> None:
    """Remove what later steps have left, if an older checkpoint was copied over last.pt. Call this before RunFolder.start.

    best.pt is written again if the state is its best evaluation. Otherwise the best weights are lost, and the best
    evaluation is forgotten. A killed process can leave a best.pt that is newer than last.pt. This best.pt stays: the
    run repeats its evaluation, and summary.json, which is written after both, has the best evaluation of last.pt.
    """
    files = find_step_files(run, STEP_CHECKPOINTS) | find_step_files(run, "attention/step-*.png")
    for path, step in files.items():
        if step > state.step:
            path.unlink(missing_ok=True)  # another rank may have removed it
    if dist.broadcast(run.previous.get("best_step", state.best_step)) == state.best_step:
        return
    if state.is_best:
        content = header | state.state_dict() | {"optimizer": None}
        if run.is_main:
            save_checkpoint(run.best, content)
    else:
        run.best.unlink(missing_ok=True)
        state.best_val_loss = math.inf
        state.best_val_bpb = math.inf
        state.best_step = None
        state.evals_since_best = 0


def make_checkpoint_header(config: RunConfig, meta: dict) -> dict:
    """The part of a checkpoint that is constant in a run. meta: meta.json of the data."""
    model = asdict(config.model)
    identity = {f"model.{key}": value for key, value in model.items() if key not in ("name", "dropout")} | {
        "data.name": meta["name"], "data": meta["fingerprint"],
        "data.document_mask": config.data.document_mask,
        **{f"data.mix.{name}.weight": part.weight for name, part in config.data.mix.items()},
        "tokenizer.name": config.tokenizer.name, "vocabulary": meta["vocab_size"],
        "seed": config.seed, "train.init_from": config.train.init_from,
        "optimizer.name": config.optimizer.name, "train.batch_size": config.train.batch_size,
    }  # fmt: skip
    vocabulary = {"vocab_size": meta["vocab_size"], "tokenizer": meta["tokenizer"]}
    return {"model_config": model, **vocabulary, "identity": identity, "config": asdict(config)}
