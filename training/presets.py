"""Presets: values of settings for an amount of text, and for the time to train on it.

They apply to keys that no word and no YAML file sets. There are two kinds:

    1MB            for 1 MB of text, and about a minute on two CPU cores
    1.1e6-6.3e13   for 1.1e6 bytes of text and 6.3e13 FLOPs, which train.minutes selects

The bytes count the complete text, before a part of it is held out for validation.

docs/experiments/text-sizes.md says which values are measured.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np

from common.errors import UserError
from common.run_paths import RUNS, SWEEPS
from common.settings import check, flatten_dict, format_value, set_values
from data.sources import resolve_source
from model.config import GPTConfig
from training.config import MuonConfig, RunConfig
from training.run_folder import read_config, read_trained_config

# The presets without FLOPs, and the bytes of text that each is for. 10MB applies to longer
# texts, too, and has the defaults of the dataclasses.
SIZES = {"20kB": 2e4, "100kB": 1e5, "300kB": 3e5, "1MB": 1e6, "3MB": 3e6, "10MB": 1e7}
# The values of each key, in the order of SIZES. optimizer.KEY is for optimizer=muon.
PRESETS = {
    "tokenizer.vocab_size": (288, 640, 768, 1024, 1536, 2048),
    "train.batch_size": (4, 8, 8, 16, 16, 16),
    "train.steps": (100, 140, 350, 800, 700, 1000),
    "eval.every": (20, 20, 50, 100, 100, 100),
    "optimizer.head_lr": (0.003, 0.003, 0.003, 0.005, 0.005, 0.005),
    "optimizer.weight_decay": (4.0, 3.0, 2.0, 1.0, 0.3, 0.1),
    "optimizer.ngram_weight_decay": (24.0, 24.0, 12.0, 5.0, 2.0, 0.7),
}

# Presets with FLOPs: 2.5e12 to 1.6e14 are 15 s and 1, 2, 3, 5 and 20 minutes on two CPU cores, 1e19
# is the training of GPT-2 124M.
# A table has a row for each of TEXT_BYTES and a column for each of FLOPS. For 1 MB, up to 2.5e13
# FLOPs are one model, because they are too few for teachers, and 4e13 are several smaller ones.
TEXT_BYTES = (2e4, 1e5, 1e6, 1e7, 1e10)
FLOPS = (1e11, 5e11, 2.5e12, 1e13, 1.6e13, 2.5e13, 4e13, 1.6e14, 1e19)
TABLES = {
    "n_layer": (
        (1, 1, 1, 1, 1, 1, 1, 1, 1),
        (1, 1, 3, 3, 3, 3, 3, 4, 4),
        (1, 1, 1, 2, 3, 3, 2, 4, 8),
        (1, 1, 1, 2, 2, 2, 3, 4, 12),
        (1, 1, 1, 2, 2, 2, 3, 4, 12),
    ),
    # n_embd is HEAD_DIM n_head
    "n_head": (
        (2, 2, 2, 2, 2, 2, 2, 2, 2),
        (1, 2, 3, 3, 3, 3, 3, 4, 4),
        (1, 1, 2, 3, 3, 3, 3, 4, 8),
        (1, 1, 2, 2, 2, 2, 3, 4, 12),
        (1, 1, 2, 2, 2, 2, 3, 4, 12),
    ),
    "vocab_size": (
        (288, 288, 288, 288, 288, 288, 288, 288, 288),
        (640, 640, 640, 640, 640, 640, 640, 640, 640),
        (640, 768, 1024, 1024, 1024, 1024, 1024, 1024, 2048),
        (640, 768, 1024, 2048, 2048, 2048, 2048, 3072, 8192),
        (640, 768, 1024, 2048, 2048, 2048, 2048, 3072, 32768),
    ),
    # A longer context takes more time, and texts of 100 kB do not gain from one.
    "block_size": (
        (128, 128, 128, 128, 128, 128, 128, 128, 128),
        (128, 128, 128, 128, 128, 128, 128, 128, 128),
        (128, 128, 256, 256, 1024, 1024, 1024, 1024, 1024),
        (128, 128, 256, 256, 256, 256, 512, 512, 512),
        (128, 128, 256, 256, 256, 256, 512, 512, 1024),
    ),
    # tokens of an optimizer step
    "batch_tokens": (
        (512, 512, 512, 512, 512, 512, 512, 512, 512),
        (512, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024),
        (1024, 2048, 4096, 4096, 4096, 4096, 4096, 4096, 4096),
        (1024, 2048, 4096, 4096, 4096, 4096, 8192, 8192, 8192),
        (1024, 2048, 4096, 4096, 4096, 4096, 8192, 8192, 524288),
    ),
    # how often a model reads the text, at most
    "epochs": (
        (4, 4, 4, 4, 4, 4, 4, 4, 4),
        (4, 4, 4, 4, 4, 4, 4, 4, 4),
        (3, 3, 3, 3, 3, 3, 3, 3, 2.5),
        (4, 4, 4, 4, 4, 4, 4, 4, 4),
        (4, 4, 4, 4, 4, 4, 4, 4, 4),
    ),
    # learning rates, relative to the defaults of lr, embedding_lr and norm_lr, and to
    # head_lr in PRESETS
    "lr_scale": (
        (1, 1, 1, 1, 1, 1, 1, 1, 1),
        (1, 1, 1, 1, 1, 1, 1, 1, 1),
        (1, 1, 1, 1, 1, 1, 1, 1, 1),
        (2, 2, 2, 1.2, 1.1, 1.05, 1, 0.7, 0.5),
        (2, 2, 2, 1.2, 1.1, 1.05, 1, 0.7, 0.5),
    ),
    # The n-gram table decays by about the same factor per token as with PRESETS: more in a larger
    # batch, and less with a higher learning rate.
    "ngram_weight_decay": (
        (24, 24, 24, 24, 24, 24, 24, 24, 24),
        (24, 24, 24, 24, 24, 24, 24, 24, 24),
        (10, 10, 10, 10, 10, 10, 10, 10, 10),
        (0.7, 0.7, 0.7, 1.2, 1.4, 2, 2.8, 4, 5.6),
        (0.7, 0.7, 0.7, 1.2, 1.4, 2, 2.8, 4, 100),
    ),
}

HEAD_DIM = 64
MAX_TEACHERS = 8
MAX_NGRAM_FLOPS = 1e16  # a model that is trained for more has no n-grams
UTILIZATION = 0.4  # share of a GPU's peak FLOP/s that training reaches
PASS_SHARE = 0.85  # share of the FLOP/s of forward and backward passes that training reaches
BYTES_PER_TOKEN = 0.28  # times log2(vocab_size): of byte pairs, in prose or code
EVALUATIONS = 10  # of a single model
EVALUATIONS_OF_TEACHER = 3  # of the first one, and of the student
MICRO_BATCH_TOKENS = 16384  # tokens of a forward pass on one device, at most
# Jobs of a sweep with the same text and equal values of these keys have the same preset.
SPEED_KEYS = ("train.minutes", "device", "dtype")


def choose_preset(config: RunConfig) -> RunConfig:
    """Choose the preset of a run, and set its values.

    config: composed. Keys in config.set_keys keep their values. With preset=auto and train.minutes,
    the speed of this machine may be measured.
    Returns a new config, whose preset is None if no key takes a value from it.
    Raises UserError for an unknown preset, missing files, and values that do not fit together.
    """
    if config.preset is None:
        return config
    preset = find_preset(config) if config.preset == "auto" else config.preset
    values = select_values(config, preset)
    values["preset"] = preset if values else None
    config = set_values(config, values)
    check(config)
    return config


def find_preset(config: RunConfig) -> str:
    """The recorded preset of a run; else one for its text and time, or for its text.

    The preset for text and time needs train.minutes instead of train.steps. The one for the text is
    the nearest size on a logarithmic scale. A text that is not on this machine counts as long,
    unless data.text_bytes is set.
    """
    text_bytes = max(1, resolve_source(config.data).text_bytes or TEXT_BYTES[-1])
    recorded = find_recorded_preset(config, text_bytes)
    if recorded is not None:
        return recorded
    minutes = config.train.minutes
    is_for_text = "train.steps" in config.set_keys or config.train.init_from is not None
    if minutes is None or is_for_text:
        return min(SIZES, key=lambda size: abs(math.log(SIZES[size] / text_bytes)))
    speed = config.flops_per_second or measure_speed(config.device, config.dtype, config.world_size)
    return name_preset(text_bytes, 60 * minutes * speed)


def find_recorded_preset(config: RunConfig, text_bytes: int) -> str | None:
    """The preset that a run keeps when it resumes. None: there is none.

    A job of a sweep has the preset with FLOPs of an earlier job with the same text and time.
    """
    if config.name is None:
        return None
    preset = read_trained_config(RUNS / config.name).get("preset")
    if preset is not None:
        return preset
    settings = flatten_dict(asdict(config))
    for file in sorted((SWEEPS / config.name).glob("*/config.yaml")):
        job = flatten_dict(read_config(file.parent))
        numbers = parse_preset(job.get("preset"))
        is_same = all(job.get(key) == settings[key] for key in SPEED_KEYS)
        if numbers is not None and is_same and numbers[0] == two_digits(text_bytes):
            return job["preset"]
    return None


@cache  # the jobs of a sweep have equal presets
def measure_speed(device_name: str, dtype_name: str, world_size: int | None) -> float:
    """FLOP/s that training will reach on all devices.

    A share of the peak of GPUs; on a CPU, of the speed of passes of the default model.

    world_size: number of devices; None: as started by torchrun.
    Raises UserError if the processes of torchrun would measure different speeds.
    """
    # these import torch, which takes a second
    from common.machine import resolve_device, resolve_dtype
    from training.runtime import Dist, resolve_runtime
    from training.speed import is_in_table, measure_flops_per_second, peak_flops

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


def select_values(config: RunConfig, preset: str) -> dict[str, Any]:
    """The values of a preset for keys of a config that nothing else has set."""
    set_keys = config.set_keys
    block_size = config.model.block_size if "model.block_size" in set_keys else None
    batch_size = config.train.batch_size if "train.batch_size" in set_keys else None
    train = config.train
    has_epochs = train.epochs is not None or "train.epochs" not in set_keys
    # without a time limit, there is no reason for teachers, and the others exclude them
    may_have_teachers = (
        train.minutes is not None
        and has_epochs
        and train.init_from is None
        and train.patience is None
    )
    values = preset_values(preset, block_size, batch_size, may_have_teachers)
    if "model.n_embd" in set_keys and "model.n_head" in values:
        max_heads = max(1, config.model.n_embd // HEAD_DIM)
        # rotary positions need an even number of channels per head
        values["model.n_head"] = max(
            n for n in range(1, max_heads + 1) if config.model.n_embd % (2 * n) == 0 or n == 1
        )
    # steps of the user replace the epochs of a preset, and epochs its steps
    if config.train.epochs is not None:
        values["train.steps"] = None
    if config.train.steps is not None and "train.steps" in set_keys:
        values.pop("train.epochs", None)
    if config.train.init_from is not None:
        # The initial weights have been learned. Weight decay would erase them.
        values |= {"optimizer.weight_decay": 0.0, "optimizer.ngram_weight_decay": 0.0}
    sections = {"model", "tokenizer", "train", "eval"}
    if isinstance(config.optimizer, MuonConfig):
        sections.add("optimizer")
    return {
        key: value
        for key, value in values.items()
        if key.partition(".")[0] in sections and key not in set_keys
    }


def name_preset(text_bytes: float, flops: float) -> str:
    """The preset for a text and FLOPs, both rounded to two digits.

    FLOPs are also rounded to a fifth of a power of ten, because measurements of a machine differ.
    """
    rounded_flops = 10 ** (round(5 * math.log10(flops)) / 5)
    return re.sub(r"e\+0*(?=\d)", "e", f"{text_bytes:.1e}-{rounded_flops:.1e}")


def parse_preset(preset: str | None) -> tuple[float, float] | None:
    """Bytes of text, and FLOPs. None if the preset has no FLOPs."""
    match = re.fullmatch(r"([1-9]\.?\d*e\d+)-([1-9]\.?\d*e\d+)", preset or "")
    if match is None:
        return None
    return float(match[1]), float(match[2])


def preset_values(
    preset: str,
    block_size: int | None = None,
    batch_size: int | None = None,
    may_have_teachers: bool = True,
) -> dict[str, Any]:
    """The values of a preset by key, such as model.n_layer. Raises UserError if it is unknown.

    block_size, batch_size: of the user; None: of the preset. A run keeps the tokens of its preset.
    With another block_size, a step keeps its tokens, too.
    """
    if preset in SIZES:
        return values_for_size(preset, block_size, batch_size)
    numbers = parse_preset(preset)
    if numbers is None:
        raise UserError(
            f"preset={format_value(preset)} is unknown; set auto, {', '.join(SIZES)}, or "
            "BYTES-FLOPS as in 1.1e6-6.3e13"
        )
    return values_for_flops(*numbers, block_size, batch_size, may_have_teachers)


def values_for_size(size: str, block_size: int | None, batch_size: int | None) -> dict[str, Any]:
    """The values of one of SIZES, by key."""
    column = list(SIZES).index(size)
    values = {key: values[column] for key, values in PRESETS.items()}
    step_tokens = values["train.batch_size"] * GPTConfig.block_size
    block_size = block_size or GPTConfig.block_size
    batch_size = batch_size or max(1, round(step_tokens / block_size))
    values["train.batch_size"] = batch_size
    for key in ("train.steps", "eval.every"):
        tokens = values[key] * step_tokens
        values[key] = math.ceil(tokens / (batch_size * block_size))
    return values


def values_for_flops(
    text_bytes: float,
    flops: float,
    block_size: int | None,
    batch_size: int | None,
    may_have_teachers: bool,
) -> dict[str, Any]:
    """The values of the preset for a text and FLOPs, by key."""

    def by_both(key: str) -> float:
        rows = [interpolate(flops, FLOPS, row) for row in TABLES[key]]
        return interpolate(text_bytes, TEXT_BYTES, rows)

    def by_text(key: str) -> float:
        return interpolate(text_bytes, list(SIZES.values()), PRESETS[key])

    n_layer = round(by_both("n_layer"))
    n_head = round(by_both("n_head"))
    n_embd = HEAD_DIM * n_head
    vocab_size = 32 * round(by_both("vocab_size") / 32)
    if block_size is None:
        block_size = 2 ** round(math.log2(by_both("block_size")))
    if batch_size is None:
        batch_size = max(1, 2 ** round(math.log2(by_both("batch_tokens") / block_size)))
    # 6 per weight, and per layer 6 block_size n_embd: attention without its masked half
    flops_per_token = 6 * n_embd * (n_layer * (12 * n_embd + block_size) + vocab_size)
    epochs = two_digits(by_both("epochs"))
    text_tokens = text_bytes / (BYTES_PER_TOKEN * math.log2(vocab_size))
    tokens = min(flops / flops_per_token, epochs * text_tokens)  # of each model
    # with time for two models, the run may find time for three
    has_teachers = may_have_teachers and flops >= 2 * tokens * flops_per_token
    evaluations = EVALUATIONS_OF_TEACHER if has_teachers else EVALUATIONS
    lr_scale = by_both("lr_scale")
    return {
        "model.n_layer": n_layer,
        "model.n_head": n_head,
        "model.n_embd": n_embd,
        "model.block_size": block_size,
        "model.max_ngram": 3 if tokens * flops_per_token <= MAX_NGRAM_FLOPS else 1,
        "tokenizer.vocab_size": vocab_size,
        "train.batch_size": batch_size,
        "train.micro_batch_size": max(1, MICRO_BATCH_TOKENS // block_size),
        "train.steps": None,  # the run ends after train.epochs or train.minutes
        "train.epochs": epochs,
        "train.n_teachers": MAX_TEACHERS if has_teachers else None,
        "eval.every": math.ceil(tokens / (batch_size * block_size * evaluations)),
        "optimizer.lr": two_digits(lr_scale * MuonConfig.lr),
        "optimizer.embedding_lr": two_digits(lr_scale * MuonConfig.embedding_lr),
        "optimizer.norm_lr": two_digits(lr_scale * MuonConfig.norm_lr),
        "optimizer.head_lr": two_digits(lr_scale * by_text("optimizer.head_lr")),
        "optimizer.weight_decay": two_digits(by_text("optimizer.weight_decay")),
        "optimizer.ngram_weight_decay": two_digits(by_both("ngram_weight_decay")),
    }


def interpolate(x: float, points: Sequence[float], values: Sequence[float]) -> float:
    """Interpolate linearly in the logarithms of x and of the values; constant outside of points."""
    return math.exp(np.interp(math.log(x), np.log(points), np.log(values)))


def two_digits(x: float) -> float:
    return float(f"{x:.2g}")
