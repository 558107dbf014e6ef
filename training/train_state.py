"""The state of a run: everything that training changes, and what ends the run."""

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from training.config import OVERFITTING_EVALS, TrainConfig
from training.optimizer import load_state_by_name, state_by_name
from training.parallel import gather, load_weights
from training.runtime import Dist

SAVED_FIELDS = (
    "step",
    "seconds",
    "warmup_seconds",
    "best_val_loss",
    "best_val_bpb",
    "best_step",
    "evals_since_best",
    "unlogged",
)


@dataclass
class TrainState:
    """Model, optimizers, counters and the best evaluation. A checkpoint has SAVED_FIELDS."""

    config: TrainConfig
    model: nn.Module
    optimizers: list[Optimizer]
    scaler: torch.amp.GradScaler
    steps_per_epoch: float = math.inf
    warmup_steps: int = 0  # of the learning rate
    step: int = 0  # finished optimizer steps
    seconds: float = 0.0  # training time
    warmup_seconds: float = 0.0  # training time of the warmup
    best_val_loss: float = math.inf
    best_val_bpb: float = math.inf
    best_step: int | None = None  # None: not evaluated yet
    evals_since_best: int = 0  # evaluations since best_step
    stopped: bool = False  # a process got a signal, and all processes know
    # metrics of a step whose evaluation a signal has stopped: they are logged with the evaluation,
    # which the resumed run repeats
    unlogged: dict = field(default_factory=dict)
    started: float = 0.0  # value of time.perf_counter() at which `seconds` would be 0

    @property
    def used_limits(self) -> dict[str, float]:
        """The used fraction of each limit, by its setting. At 1, the run ends."""
        config = self.config
        return {
            "train.steps": self.step / (config.steps or math.inf),
            "train.epochs": self.step / ((config.epochs or math.inf) * self.steps_per_epoch),
            "train.minutes": self.seconds / (60 * (config.minutes or math.inf)),
            "train.patience": float(self.evals_since_best >= (config.patience or math.inf)),
        }

    @property
    def progress(self) -> float:
        """The finished part of the run, 0 to 1, by the limit that ends it first."""
        return min(1.0, max(self.used_limits.values()))

    @property
    def warmup_progress(self) -> float:
        """The progress at the end of the warmup, once it has ended."""
        return replace(self, step=self.warmup_steps, seconds=self.warmup_seconds).progress

    @property
    def is_done(self) -> bool:
        """Whether the training loop ends: no step is left, or a signal stopped the run."""
        return self.progress >= 1 or self.stopped

    @property
    def is_best(self) -> bool:
        """Whether the last evaluation, at this step, found the lowest validation loss."""
        return self.best_step == self.step

    @property
    def evaluation_was_stopped(self) -> bool:
        """Whether a signal has stopped the evaluation of this step, which must be repeated."""
        return bool(self.unlogged)

    @property
    def last_logged_step(self) -> int:
        """The last step whose row of metrics is complete. The row of step 0 is written again."""
        if self.step == 0 or self.evaluation_was_stopped:
            return self.step - 1
        return self.step

    def start_clock(self) -> None:
        """Count `seconds` from now on, in addition to the time of earlier processes."""
        self.started = time.perf_counter() - self.seconds

    def count_step(self, dist: Dist, signal_received: bool) -> None:
        """Count a step. All processes agree on its time, and on whether a signal stops them."""
        self.step += 1
        seconds = time.perf_counter() - self.started
        stopped, self.seconds = dist.all_reduce(signal_received, seconds, op="max")
        self.stopped = bool(stopped)
        if self.step == self.warmup_steps:
            self.warmup_seconds = self.seconds

    def record_evaluation(self, val_loss: float, val_bpb: float) -> None:
        """Update the best evaluation."""
        self.evals_since_best += 1
        if val_loss < self.best_val_loss:
            self.best_val_loss = val_loss
            self.best_val_bpb = val_bpb
            self.best_step = self.step
            self.evals_since_best = 0

    def summary(self) -> dict[str, Any]:
        """Step, best evaluation and training time, under their names in summary.json."""
        return {
            "step": self.step,
            "best_step": self.best_step,
            "best_val_loss": self.best_val_loss,
            "best_val_bpb": self.best_val_bpb,
            "overfitting": self.evals_since_best >= OVERFITTING_EVALS,
            "wall_seconds": self.seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        """The part of a checkpoint that changes, with optimizer state by parameter name.

        All processes must call this method. Rank 0 gets complete tensors.
        """
        weights = {p: gather(p.detach()) for p in self.model.parameters()}
        model = {name: weights[p] for name, p in self.model.state_dict(keep_vars=True).items()}
        optimizer = {}
        for name, tensors in state_by_name(self.model, self.optimizers).items():
            optimizer[name] = {key: gather(tensor) for key, tensor in tensors.items()}
        fields = {key: getattr(self, key) for key in SAVED_FIELDS}
        scaler = self.scaler.state_dict()
        return fields | {"scaler": scaler, "model": model, "optimizer": optimizer}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what state_dict returned."""
        load_weights(self.model, saved["model"])
        load_state_by_name(self.model, self.optimizers, saved["optimizer"])
        if saved["scaler"]:  # empty unless the run was in float16
            self.scaler.load_state_dict(saved["scaler"])
        saved = {"warmup_seconds": 0.0} | saved  # which earlier versions have not written
        for key in SAVED_FIELDS:
            setattr(self, key, saved[key])
