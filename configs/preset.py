"""Selects the preset of a run (training/presets.py): values for keys that nothing else sets.

Recipes, YAML files and the command line override a preset.
"""

import re
from functools import cache
from math import log
from typing import Any

from omegaconf import DictConfig, OmegaConf

from common.errors import UserError
from common.run_paths import RUNS, SWEEPS
from common.settings import check, format_value
from data.sources import Source
from sweep.jobs import read_job_config, read_trained_config
from training.config import RunConfig, TrainConfig
from training.presets import (
    HEAD_DIM,
    PASS_SHARE,
    SIZES,
    TEXT_BYTES,
    UTILIZATION,
    name_preset,
    parse_preset,
    preset_values,
    two_digits,
)

# Jobs of a sweep with the same text and equal values of these keys have the same preset.
FLOPS_KEYS = ("train.minutes", "device", "dtype")


def add_preset_values(schema: DictConfig, prefix: str = "") -> None:
    """Let keys of a schema take their values from the preset that a run will select.

    Without a value in the preset, they keep their default.
    prefix: "muon." for the schema of this optimizer.
    """
    for preset_key in preset_values("1.0e7-1.0e13"):  # a preset with FLOPs has all keys
        key = preset_key.removeprefix(prefix)
        default = OmegaConf.select(schema, key, default="missing")
        if preset_key.startswith(prefix) and default != "missing":
            OmegaConf.update(schema, key, f"${{preset:{preset_key},{format_value(default)}}}")


def preset_value(key: str, default: Any, *, _root_: Any) -> Any:
    """The value of ${preset:key,default}, an interpolation of OmegaConf. _root_: the config."""
    # The initial weights of finetuning have been learned. Weight decay would erase them.
    if key.endswith("weight_decay") and OmegaConf.select(_root_, "train.init_from") is not None:
        return 0.0
    # steps that the user sets replace the epochs of a preset, and epochs its steps
    other = {"train.steps": "epochs", "train.epochs": "steps"}.get(key)
    if other is not None and not OmegaConf.is_interpolation(_root_.train, other):
        return None
    values = preset_values(OmegaConf.select(_root_, "preset") or "10MB")
    if key == "model.n_head" and key in values:  # n_embd can be a value of the user
        return max(1, _root_.model.n_embd // HEAD_DIM)
    return values.get(key, default)


OmegaConf.register_new_resolver("preset", preset_value, replace=True)


def select_preset(config: DictConfig, sources: list[Source]) -> str | None:
    """The preset of a composed config; None if no key takes a value from it.

    preset=auto is the recorded preset; else, with train.minutes instead of train.steps, the preset
    for text and time; else the nearest size on a logarithmic scale. A text that is not on this
    machine counts as long, unless data.text_bytes is set.
    Raises UserError for an unknown preset, and for wrong values that the choice needs.
    """
    # keys that nothing else has set
    used = set(re.findall(r"\$\{preset:([^,]+)", OmegaConf.to_yaml(config)))
    text_bytes = max(1, sum(source.text_bytes or TEXT_BYTES[-1] for source in sources))
    preset = config.preset
    if preset == "auto":
        preset = recorded_preset(config, text_bytes) or "auto"
    if preset == "auto":
        preset = min(SIZES, key=lambda size: abs(log(SIZES[size] / text_bytes)))
        has_minutes = OmegaConf.select(config, "train.minutes") is not None
        if has_minutes and "train.steps" in used and config.train.init_from is None:
            preset = name_preset(text_bytes, training_flops(config))
    return preset if used & set(preset_values(preset)) else None


def recorded_preset(config: DictConfig, text_bytes: int) -> str | None:
    """The preset that a run keeps when it resumes. None: there is none.

    A job of a sweep has the preset with FLOPs of an earlier job with the same text and time.
    """
    name = OmegaConf.select(config, "name")
    if name is None:
        return None
    preset = read_trained_config(RUNS / name).get("preset")
    if preset is not None:
        return preset
    for file in sorted((SWEEPS / name).glob("*/config.yaml")):
        job = read_job_config(file.parent)
        numbers = parse_preset(job.get("preset"))
        is_same = all(job.get(key) == OmegaConf.select(config, key) for key in FLOPS_KEYS)
        if numbers is not None and is_same and numbers[0] == two_digits(text_bytes):
            return job["preset"]
    return None


def training_flops(config: DictConfig) -> float:
    """FLOPs that a run can spend on matrix products in train.minutes, on all devices.

    Raises UserError if values that this needs are wrong. Others are checked with the preset.
    """
    values = {
        key: config[key] for key in ("device", "dtype", "plan", "flops_per_second", "world_size")
    }
    check(RunConfig(**values, train=TrainConfig(minutes=config.train.minutes)))
    speed = config.flops_per_second or measure_speed(config.device, config.dtype, config.world_size)
    return 60 * config.train.minutes * speed


@cache  # the jobs of a sweep have equal presets
def measure_speed(device_name: str, dtype_name: str, world_size: int | None) -> float:
    """FLOP/s that training will reach on all devices.

    A share of the peak of GPUs; on a CPU, of the speed of passes of the default model.

    world_size: number of devices; None: as started by torchrun.
    Raises UserError if the processes of torchrun would measure different speeds.
    """
    # these import torch, which takes a second
    from common.machine import resolve_device, resolve_dtype
    from training.plan import measure_flops_per_second
    from training.runtime import Dist, resolve_runtime
    from training.speed import is_in_table, peak_flops

    dist = Dist.from_environment()
    device = resolve_device(device_name, dist.local_rank)
    if dist.world_size > 1 and not is_in_table(device):
        raise UserError(
            "train.minutes would give each process of torchrun another preset, because they "
            "measure different speeds; set preset=NAME, which the same command prints without "
            f"torchrun, with plan=true world_size={dist.world_size}"
        )
    if device.type == "cpu":
        # The peak says less: large products can be many times as fast as the rest of a pass.
        # Processes of the same machine share its cores, so their number does not matter.
        config = RunConfig(device=device_name, dtype=dtype_name)
        runtime = resolve_runtime(config)
        return PASS_SHARE * measure_flops_per_second(config, runtime, config.tokenizer.vocab_size)
    peak = peak_flops(device, resolve_dtype(dtype_name, device))
    return UTILIZATION * (world_size or dist.world_size) * peak
