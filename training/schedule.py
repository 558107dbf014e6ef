"""The learning rate over a run, as a fraction of its peak.

To add a schedule, write a function here, list it in SCHEDULES, and add a YAML file to configs/schedule/.
"""

import math
from dataclasses import dataclass

from common.errors import UserError, check_settings

MAX_STEPS = 10**12


@dataclass
class ScheduleConfig:
    """Learning-rate schedule: linear warmup over warmup_steps, then decay to final_fraction of the peak.

    name: a function in training/schedule.py. decay_fraction: the part of the run in which wsd decays.
    """

    name: str
    warmup_steps: int
    final_fraction: float
    decay_fraction: float | None

    def __post_init__(self):
        is_fraction = [value is None or 0 <= value <= 1 for value in (self.final_fraction, self.decay_fraction)]
        check_settings("schedule", self, [
            ("warmup_steps", 0 <= self.warmup_steps <= MAX_STEPS, f"must not be negative, and at most {MAX_STEPS:,}"),
            ("final_fraction", is_fraction[0], "must be a number from 0 to 1"),
            ("decay_fraction", is_fraction[1], "must be a number from 0 to 1, or null"),
        ])  # fmt: skip


def cosine(progress: float, config: ScheduleConfig) -> float:
    """Cosine decay from 1 to final_fraction (Loshchilov & Hutter, arXiv:1608.03983, without restarts)."""
    return config.final_fraction + (1 - config.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


def linear(progress: float, config: ScheduleConfig) -> float:
    """Linear decay from 1 to final_fraction."""
    return config.final_fraction + (1 - config.final_fraction) * (1 - progress)


def wsd(progress: float, config: ScheduleConfig) -> float:
    """Warmup-stable-decay (Hu et al., arXiv:2404.06395): constant, then linear over the last decay_fraction."""
    if config.decay_fraction is None:
        raise UserError("schedule=wsd needs schedule.decay_fraction; set a number from 0 to 1, such as 0.4")
    remaining = (1 - progress) / config.decay_fraction if config.decay_fraction > 0 else 1.0
    return config.final_fraction + (1 - config.final_fraction) * min(1.0, remaining)


SCHEDULES = {f.__name__: f for f in (cosine, linear, wsd)}


def lr_scale(config: ScheduleConfig, step: int, steps: int | None, progress: float) -> float:
    """The learning rate of the next step as a fraction of its peak, after `step` steps and `progress` of the run.

    It increases linearly, as (step + 1) / (warmup_steps + 1), and then follows the schedule. Raises UserError for an
    unknown schedule.
    """
    if config.name not in SCHEDULES:
        raise UserError(f"schedule.name={config.name} is unknown; set one of {', '.join(SCHEDULES)}")
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    warmup = config.warmup_steps / steps if steps is not None else 0.0
    return SCHEDULES[config.name](max(0.0, progress - warmup) / max(1e-9, 1 - warmup), config)
