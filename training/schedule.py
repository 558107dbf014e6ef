"""The learning rate over a run, as a fraction of its peak.

To add a schedule, write a function here and list it in SCHEDULES. schedule.name=NAME then selects
it (docs/hacking.md).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from common.settings import Rule, setting


@dataclass
class ScheduleConfig:
    """Learning-rate schedule: linear warmup, then decay."""

    # function in this file
    name: str = "linear"
    warmup_steps: int = setting(10, 0, 10**12)
    # learning rate at the end, as a fraction of the peak
    final_fraction: float = setting(0.0, 0, 1)
    # wsd: the part of the training in which the learning rate decays
    decay_fraction: float = setting(0.5, 0, 1)

    def rules(self, section: str) -> Iterator[Rule]:
        yield "name", self.name in SCHEDULES, f"is unknown; set one of {', '.join(SCHEDULES)}"


# A schedule returns the learning rate after the warmup: 1 is the peak, and 0 is final_fraction.


def cosine(progress: float, config: ScheduleConfig) -> float:
    """Cosine decay (Loshchilov & Hutter, arXiv:1608.03983)."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def linear(progress: float, config: ScheduleConfig) -> float:
    """Linear decay."""
    return 1 - progress


def wsd(progress: float, config: ScheduleConfig) -> float:
    """Warmup-stable-decay (Hu et al., arXiv:2404.06395).

    Constant, then linear decay over the last decay_fraction.
    """
    if config.decay_fraction == 0:
        return 1.0
    return min(1.0, (1 - progress) / config.decay_fraction)


SCHEDULES = {function.__name__: function for function in (cosine, linear, wsd)}


def lr_scale(config: ScheduleConfig, step: int, progress: float, warmup_progress: float) -> float:
    """The learning rate of the next step, as a fraction of its peak: warmup, then the schedule.

    step: finished steps of the model.
    progress: finished part of its training, 0 to 1 (TrainState.model_progress).
    warmup_progress: progress at the end of the warmup. The schedule starts from it at the peak.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    progress_after_warmup = max(0.0, progress - warmup_progress) / max(1e-9, 1 - warmup_progress)
    decayed = SCHEDULES[config.name](progress_after_warmup, config)
    return config.final_fraction + (1 - config.final_fraction) * decayed
