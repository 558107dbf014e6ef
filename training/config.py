"""How a model is trained. Types and rules only; the values live in configs/. Nothing here imports torch."""

from dataclasses import dataclass
from math import inf
from typing import Any

from common.errors import UserError
from model.generation.config import SamplingConfig

AUTO = "auto"


def _positive(section: str, config: object, *keys: str) -> None:
    for key in keys:
        value = getattr(config, key)
        if value is not None and not 0 < value < inf:
            raise UserError(f"{section}.{key}={value} must be a number greater than 0")


def _not_negative(section: str, config: object, *keys: str) -> None:
    for key in keys:
        value = getattr(config, key)
        if value is not None and not 0 <= value < inf:
            raise UserError(f"{section}.{key}={value} must not be negative")


def _around(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)


@dataclass
class TrainConfig:
    """steps: optimizer steps. minutes: a budget of time instead of, or beside, steps.

    batch_size: sequences per optimizer step, over all devices. micro_batch_size: sequences per forward pass on one
    device; None: the device's whole share; "auto": as many of it as fit into memory. grad_clip: largest norm of the
    gradient; None: not clipped. profile: record where the time of a few steps goes. init_from: "run:NAME": the run
    whose weights are trained further, with a fresh optimizer; None: weights are drawn.
    """

    steps: int | None
    minutes: float | None
    batch_size: int
    micro_batch_size: Any  # int, None, or "auto"
    grad_clip: float | None
    profile: bool
    init_from: str | None

    def __post_init__(self):
        if self.init_from is not None and not (self.init_from.startswith("run:") and self.init_from[4:]):
            raise UserError(f"train.init_from={self.init_from} names no weights; set train.init_from=run:NAME, or null")
        _positive("train", self, "steps", "minutes", "batch_size", "grad_clip")
        size = self.micro_batch_size
        if size not in (None, AUTO) and not (type(size) is int and size > 0):
            raise UserError(
                f"train.micro_batch_size={size} takes a number of sequences from 1, {AUTO} (as many as fit into "
                f"memory), or null (a device's whole share); set, say, {AUTO}"
            )
        if self.steps is None and self.minutes is None:
            raise UserError("nothing says when training ends; set train.steps or train.minutes")

    def plan(self, world_size: int) -> tuple[int, int]:
        """(sequences per forward pass on one device, forward passes per optimizer step). Raises UserError.

        For auto the least, one sequence: what fits is not known before there is a model.
        """
        share, over = divmod(self.batch_size, world_size)
        if over:
            raise UserError(
                f"train.batch_size={self.batch_size} does not divide among {world_size} devices; "
                f"set {_around(self.batch_size, world_size)}"
            )
        micro = {None: share, AUTO: 1}.get(self.micro_batch_size, self.micro_batch_size)
        if share % micro:
            fits = [str(size) for size in range(1, share + 1) if share % size == 0]
            raise UserError(
                f"train.micro_batch_size={micro} does not divide a device's {share} sequences per step "
                f"(train.batch_size={self.batch_size} over {world_size}); set one of {', '.join(fits[-8:])}"
            )
        return micro, share // micro


@dataclass
class ScheduleConfig:
    """The learning rate as a fraction of the optimizer's: up over warmup_steps, then down to final_fraction.

    name: a function in training/schedule.py. decay_fraction: the part of the run in which wsd decays.
    """

    name: str
    warmup_steps: int
    final_fraction: float
    decay_fraction: float | None

    def __post_init__(self):
        _not_negative("schedule", self, "warmup_steps")
        for key in ("final_fraction", "decay_fraction"):
            value = getattr(self, key)
            if value is not None and not 0 <= value <= 1:
                raise UserError(f"schedule.{key}={value} is a fraction; set it from 0 to 1")


def _check_betas(betas: list[float]) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"optimizer.betas={betas} must be two numbers from 0 to below 1; set, say, [0.9,0.95]")


@dataclass
class AdamWConfig:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101). weight_decay: on matrices and embeddings alone."""

    name: str
    lr: float
    betas: list[float]
    eps: float
    weight_decay: float

    def __post_init__(self):
        _positive("optimizer", self, "lr", "eps")
        _not_negative("optimizer", self, "weight_decay")
        _check_betas(self.betas)


@dataclass
class MuonConfig:
    """Muon (Jordan et al., 2024) for the matrices inside the blocks, AdamW for all else.

    lr, momentum, ns_steps (of Newton-Schulz) and weight_decay are Muon's; the others AdamW's.
    """

    name: str
    lr: float
    momentum: float
    ns_steps: int
    weight_decay: float
    embedding_lr: float
    head_lr: float
    norm_lr: float
    betas: list[float]
    eps: float

    def __post_init__(self):
        _positive("optimizer", self, "lr", "ns_steps", "embedding_lr", "head_lr", "norm_lr", "eps")
        _not_negative("optimizer", self, "weight_decay")
        if not 0 <= self.momentum < 1:
            raise UserError(f"optimizer.momentum={self.momentum} must lie from 0 to below 1; set, say, 0.95")
        _check_betas(self.betas)


@dataclass
class EvalConfig:
    """every: steps between evaluations. batches: how many times train.batch_size validation windows, None: all.

    sample: the text generated at each evaluation but that before the first step; max_new_tokens 0: none.
    """

    every: int
    batches: int | None
    sample: SamplingConfig

    def __post_init__(self):
        _positive("eval", self, "every", "batches")
        self.sample.check("eval.sample.")


@dataclass
class CheckpointConfig:
    """every: steps between saves of last.pt, which resuming starts from; it is saved at the last step as well."""

    every: int

    def __post_init__(self):
        _positive("checkpoint", self, "every")


@dataclass
class WandbConfig:
    """mode: offline, online or disabled. tags: words to find the run by."""

    mode: str
    project: str
    entity: str | None
    group: str | None
    tags: list[str]

    def __post_init__(self):
        if self.mode not in ("offline", "online", "disabled"):
            raise UserError(f"wandb.mode={self.mode} is unknown; set offline, online or disabled")


@dataclass
class TrainWandbConfig(WandbConfig):
    """attention_maps: draw the causal weights at each evaluation.

    The pictures and entropies lie in the run's folder too, whatever the mode.
    """

    attention_maps: bool
