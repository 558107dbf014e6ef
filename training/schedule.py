"""The learning rate over a run, as a fraction of its peak.

A new shape is one function here, in SCHEDULES, and one YAML file in configs/schedule/ that names it.
"""

import math

from common.errors import UserError
from training.config import ScheduleConfig


def cosine(progress: float, config: ScheduleConfig) -> float:
    """Half a cosine from 1 to final_fraction (Loshchilov & Hutter, arXiv:1608.03983, without restarts)."""
    return config.final_fraction + (1 - config.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


def wsd(progress: float, config: ScheduleConfig) -> float:
    """Warm-up, stable, decay (Hu et al., arXiv:2404.06395): constant, then linear over the last decay_fraction."""
    if config.decay_fraction is None:
        raise UserError("schedule=wsd needs schedule.decay_fraction; set, say, 0.4")
    left = (1 - progress) / config.decay_fraction if config.decay_fraction > 0 else 1.0
    return config.final_fraction + (1 - config.final_fraction) * min(1.0, left)


SCHEDULES = {f.__name__: f for f in (cosine, wsd)}


def run_progress(step: int, steps: int | None, seconds: float, minutes: float | None) -> float:
    """How much of the run is done after `step` steps and `seconds`, 0 to 1: the larger of its two budgets' parts."""
    by_steps = step / steps if steps is not None else 0.0
    by_time = seconds / (60 * minutes) if minutes is not None else 0.0
    return min(1.0, max(by_steps, by_time))


def lr_scale(config: ScheduleConfig, step: int, steps: int | None, progress: float) -> float:
    """The fraction of the peak learning rate for the step after `step` steps, with `progress` of the run behind.

    Up to warmup_steps it grows linearly, as (step + 1) / (warmup_steps + 1); the schedule's shape takes the rest.
    Raises UserError for an unknown schedule.
    """
    if config.name not in SCHEDULES:
        raise UserError(f"schedule.name={config.name} is unknown; set one of {', '.join(SCHEDULES)}")
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    warm = config.warmup_steps / steps if steps is not None else 0.0
    return SCHEDULES[config.name](max(0.0, progress - warm) / max(1e-9, 1 - warm), config)
