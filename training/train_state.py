"""The state of a run: everything that training changes, and what ends the run."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from model.gpt import GPT
from training.config import FORWARD_SHARE, OVERFITTING_EVALS, STUDENT_LENGTH, TrainConfig
from training.optimizer import load_state_by_name, state_by_name
from training.parallel import gather, load_weights
from training.runtime import Dist, seed_device
from training.schedule import ScheduleConfig, lr_scale
from training.teachers import make_teacher, turn_off_weight_decay

SAVED_FIELDS = (
    "step",
    "seconds",
    "warmup_seconds",
    "best_val_loss",
    "best_val_bpb",
    "best_step",
    "evals_since_best",
    "unlogged",
    "planned_teachers",
    "model_start_step",
    "model_start_seconds",
)


@dataclass
class TrainState:
    """Model, optimizers, counters and the best evaluation. A checkpoint has SAVED_FIELDS.

    With train.n_teachers, the run trains several models one after the other, in the same
    parameters (training/teachers.py).
    """

    config: TrainConfig
    schedule: ScheduleConfig
    model: GPT
    optimizers: list[Optimizer]
    scaler: torch.amp.GradScaler
    steps_per_epoch: float = math.inf
    step: int = 0  # finished optimizer steps
    seconds: float = 0.0  # training time
    warmup_seconds: float = 0.0  # training time at the end of the model's warmup
    best_val_loss: float = math.inf
    best_val_bpb: float = math.inf
    best_step: int | None = None  # None: not evaluated yet
    evals_since_best: int = 0  # evaluations since best_step
    stopped: bool = False  # a process got a signal, and all processes know
    # metrics of a step whose evaluation a signal has stopped: they are logged with the evaluation,
    # which the resumed run repeats
    unlogged: dict = field(default_factory=dict)
    teachers: list[GPT] = field(default_factory=list)  # trained so far
    planned_teachers: int = 0  # train.n_teachers, or fewer if there is no time for all
    model_start_step: int = 0  # step at which the current model started
    model_start_seconds: float = 0.0  # training time at which the current model started
    started: float = 0.0  # value of time.perf_counter() at which `seconds` would be 0

    def __post_init__(self) -> None:
        self.planned_teachers = self.config.n_teachers or 0

    @property
    def length_factor(self) -> int:
        """Steps of the current model, as a multiple of train.steps."""
        return STUDENT_LENGTH if self.is_student else 1

    @property
    def used_limits(self) -> dict[str, float]:
        """The fraction of each limit that the current model has used, by its setting.

        Steps and epochs count from the start of the model, and time lasts until the end of the run.
        At 1, the model is trained.
        """
        return self._used_limits(self.step, self.seconds)

    def _used_limits(self, step: int, seconds: float) -> dict[str, float]:
        config = self.config
        steps = (step - self.model_start_step) / self.length_factor
        end = 60 * (config.minutes or math.inf)
        time_limit = max(1e-9, end - self.model_start_seconds)
        return {
            "train.steps": steps / (config.steps or math.inf),
            "train.epochs": steps / ((config.epochs or math.inf) * self.steps_per_epoch),
            "train.minutes": (seconds - self.model_start_seconds) / time_limit,
            "train.patience": float(self.evals_since_best >= (config.patience or math.inf)),
        }

    @property
    def model_progress(self) -> float:
        """The trained part of the current model, 0 to 1, by the limit that ends it first."""
        return min(1.0, max(self.used_limits.values()))

    @property
    def warmup_progress(self) -> float:
        """The model's progress at the end of its warmup, once that has ended."""
        step = self.model_start_step + self.schedule.warmup_steps
        return min(1.0, max(self._used_limits(step, self.warmup_seconds).values()))

    @property
    def progress(self) -> float:
        """The finished part of the run, 0 to 1."""
        n_teachers = self.planned_teachers
        if n_teachers == 0:
            return self.model_progress
        student_cost = STUDENT_LENGTH * (1 + FORWARD_SHARE * n_teachers)  # a teacher costs 1
        model_cost = student_cost if self.is_student else 1.0
        trained = len(self.teachers) + self.model_progress * model_cost
        return max(trained / (n_teachers + student_cost), min(1.0, self._used_time))

    @property
    def _used_time(self) -> float:
        return self.seconds / (60 * (self.config.minutes or math.inf))

    @property
    def is_finished(self) -> bool:
        """Whether no step is left: the last model is trained, or the time is over."""
        is_last = len(self.teachers) == self.planned_teachers
        return (is_last and self.model_progress >= 1) or self._used_time >= 1

    @property
    def is_student(self) -> bool:
        """Whether the current model learns from teachers."""
        return 0 < self.planned_teachers == len(self.teachers)

    @property
    def lr_scale(self) -> float:
        """The learning rate of the next step, as a fraction of its peak."""
        steps = self.step - self.model_start_step
        return lr_scale(self.schedule, steps, self.model_progress, self.warmup_progress)

    @property
    def role(self) -> str:
        """Which model is trained: ", teacher 2 of 4" or ", student"; "" if there is only one."""
        if self.planned_teachers == 0:
            return ""
        if self.is_student:
            return ", student"
        return f", teacher {len(self.teachers) + 1} of {self.planned_teachers}"

    @property
    def is_done(self) -> bool:
        """Whether the training loop ends: no step is left, or a signal stopped the run."""
        return self.is_finished or self.stopped

    def evaluation_is_due(self, every: int) -> bool:
        """Whether to evaluate after this step: at a model's end, and regularly.

        The teachers after the first one are evaluated at their end only, and the student less
        often, because it has more steps.
        """
        is_later_teacher = 0 < len(self.teachers) < self.planned_teachers
        is_regular = self.step % (every * self.length_factor) == 0 and not is_later_teacher
        return is_regular or self.model_progress >= 1

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
        if self.step - self.model_start_step == self.schedule.warmup_steps:
            self.warmup_seconds = self.seconds
        self._fit_teachers_into_time()

    def _fit_teachers_into_time(self) -> None:
        """At the end of a teacher, plan as many as the time allows, by the speed of this one.

        Its warmup is left out, because it can include compilation.
        """
        if self.config.minutes is None or self.model_progress < 1 or self.is_student:
            return
        steps = self.step - self.model_start_step
        warmup_steps = self.schedule.warmup_steps
        start = self.warmup_seconds
        if steps <= warmup_steps:  # the model has ended in its warmup: count all of it
            warmup_steps = 0
            start = self.model_start_seconds
        seconds_per_step = max(1e-9, self.seconds - start) / (steps - warmup_steps)
        seconds_left = 60 * self.config.minutes - self.seconds
        trained = len(self.teachers) + 1
        fitting = self.config.fit_teachers(trained + seconds_left / (steps * seconds_per_step))
        if trained > 1:
            fitting = max(fitting, trained)  # trained teachers stay
        self.planned_teachers = fitting

    def start_next_model(self, seed: int) -> None:
        """Add the current model to the teachers, and start the next one.

        Another teacher starts from new weights, the student from the weights of the last teacher.
        """
        model = self.model
        self.teachers.append(make_teacher(model, model.state_dict()))
        if self.is_student:
            turn_off_weight_decay(self.optimizers)
        else:
            seed_device(torch.device("cpu"), seed, len(self.teachers))
            load_weights(model, GPT(model.config, model.vocab_size).state_dict())
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self.model_start_step = self.step
        self.model_start_seconds = self.seconds
        self.warmup_seconds = self.seconds  # until the end of the warmup, if there is one

    def record_evaluation(self, val_loss: float, val_bpb: float) -> None:
        """Update the best evaluation."""
        if self.planned_teachers == 0:  # else, the loss is high whenever a model starts
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
            "n_teachers": self.planned_teachers,
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
        teachers = [teacher.state_dict() for teacher in self.teachers]
        scaler = self.scaler.state_dict()
        return fields | {
            "scaler": scaler,
            "model": model,
            "optimizer": optimizer,
            "teachers": teachers,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what state_dict returned."""
        load_weights(self.model, saved["model"])
        load_state_by_name(self.model, self.optimizers, saved["optimizer"])
        if saved["scaler"]:  # empty unless the run was in float16
            self.scaler.load_state_dict(saved["scaler"])
        for key in SAVED_FIELDS:
            if key in saved:  # checkpoints of earlier versions have fewer
                setattr(self, key, saved[key])
        of_teachers = saved.get("teachers", [])
        self.teachers = [make_teacher(self.model, weights) for weights in of_teachers]
        if self.is_student:
            turn_off_weight_decay(self.optimizers)
        if not self.teachers:  # there was no time for any, but train.minutes may have been raised
            self.planned_teachers = self.config.n_teachers or 0
        self._fit_teachers_into_time()
