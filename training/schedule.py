"""The learning rate over a run, as a fraction of its peak.

To add a schedule, write a function here, list it in SCHEDULES, and add a YAML file to configs/schedule/.
"""

import math

from common.errors import UserError
from training.config import ScheduleConfig, TrainConfig


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


def compute_progress(config: TrainConfig, step: int, seconds: float, evals_since_best: int) -> float:
    """The finished part of the run, 0 to 1: the larger of step / train.steps and elapsed time / train.minutes.

    It is 1 if the last train.patience evaluations found no lower validation loss.
    """
    if config.patience is not None and evals_since_best >= config.patience:
        return 1.0
    by_steps = step / config.steps if config.steps is not None else 0.0
    by_time = seconds / (60 * config.minutes) if config.minutes is not None else 0.0
    return min(1.0, max(by_steps, by_time))


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
