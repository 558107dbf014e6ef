"""Presets: values of settings for an amount of training text, and for the time to train on it.

They apply to keys that nothing else sets (configs/preset.py). There are two kinds:

    1MB            for 1 MB of training text, and about a minute on two CPU cores
    1.1e6-6.3e13   for 1.1e6 bytes of training text and 6.3e13 FLOPs, which train.minutes selects

docs/experiments/text-sizes.md says which values are measured.
"""

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from common.errors import UserError
from common.settings import format_value
from training.config import MuonConfig

# The presets without FLOPs, and the bytes of training text that each is for. 10MB applies to longer
# texts, too, and has the defaults of the dataclasses.
SIZES = {"20kB": 2e4, "100kB": 1e5, "300kB": 3e5, "1MB": 1e6, "3MB": 3e6, "10MB": 1e7}
# The values of each key, in the order of SIZES. muon.KEY is optimizer.KEY with optimizer=muon.
PRESETS = {
    "tokenizer.vocab_size": (288, 640, 768, 1024, 1536, 2048),
    "train.batch_size": (4, 8, 8, 16, 16, 16),
    "train.steps": (100, 140, 350, 800, 700, 1000),
    "eval.every": (20, 20, 50, 100, 100, 100),
    "muon.head_lr": (0.003, 0.003, 0.003, 0.005, 0.005, 0.005),
    "muon.weight_decay": (4.0, 3.0, 2.0, 1.0, 0.3, 0.1),
    "muon.ngram_weight_decay": (24.0, 24.0, 12.0, 5.0, 2.0, 0.7),
}

# Presets with FLOPs: 2.5e12 to 1.6e14 are 15 s, 1, 5 and 20 minutes on two CPU cores, 1e19 is the
# training of GPT-2 124M, and depth grows with the 6th root of FLOPs from there to 1e22.
# A table has a row for each of TEXT_BYTES and a column for each of FLOPS.
TEXT_BYTES = (2e4, 1e5, 1e6, 1e7, 1e10)
FLOPS = (2.5e12, 1e13, 4e13, 1.6e14, 1e19, 1e22)
TABLES = {
    # As in GPT-2, n_head is the same, and n_embd is 64 n_layer, but one layer has two heads.
    "n_layer": (
        (2, 2, 2, 2, 2, 2),
        (3, 3, 4, 4, 4, 4),
        (1, 3, 6, 8, 8, 8),
        (1, 2, 3, 4, 12, 12),
        (1, 2, 3, 4, 12, 38),
    ),
    "vocab_size": (
        (288, 288, 288, 288, 288, 288),
        (640, 640, 640, 640, 640, 640),
        (1024, 2048, 2048, 2048, 2048, 2048),
        (1024, 2048, 2048, 3072, 8192, 8192),
        (1024, 2048, 2048, 3072, 32768, 65536),
    ),
    "block_size": (
        (128, 128, 128, 128, 128, 128),
        (128, 128, 128, 128, 128, 128),
        (128, 128, 128, 128, 256, 256),
        (128, 128, 128, 128, 512, 512),
        (128, 128, 128, 128, 1024, 2048),
    ),
    # tokens of an optimizer step
    "batch_tokens": (
        (512, 512, 512, 512, 512, 512),
        (1024, 1024, 1024, 1024, 1024, 1024),
        (4096, 4096, 2048, 2048, 4096, 4096),
        (4096, 4096, 8192, 8192, 8192, 8192),
        (4096, 4096, 8192, 8192, 524288, 1048576),
    ),
    # how often a run reads the text, at most
    "epochs": (
        (4, 4, 4, 4, 4, 4),
        (4, 4, 4, 4, 4, 4),
        (3, 3, 2.5, 2.5, 2.5, 2.5),
        (4, 4, 4, 4, 4, 4),
        (4, 4, 4, 4, 4, 4),
    ),
    # learning rates, relative to the defaults of muon.lr, muon.embedding_lr and muon.norm_lr, and
    # to muon.head_lr in PRESETS
    "lr_scale": (
        (1, 1, 1, 1, 1, 1),
        (1, 1, 1, 1, 1, 1),
        (1, 1, 1, 1, 1, 1),
        (2, 1.2, 1, 0.7, 0.5, 0.5),
        (2, 1.2, 1, 0.7, 0.5, 0.3),
    ),
    # The n-gram table decays by about the same factor per token as with PRESETS: more in a larger
    # batch, and less with a higher learning rate.
    "ngram_weight_decay": (
        (24, 24, 24, 24, 24, 24),
        (24, 24, 24, 24, 24, 24),
        (10, 10, 5, 5, 10, 10),
        (0.7, 1.2, 2.8, 4, 5.6, 5.6),
        (0.7, 1.2, 2.8, 4, 100, 100),
    ),
}

HEAD_DIM = 64
MAX_NGRAM_FLOPS = 1e16  # a model that is trained for more has no n-grams
UTILIZATION = 0.4  # share of a GPU's peak FLOP/s that training reaches
PASS_SHARE = 0.85  # share of the FLOP/s of forward and backward passes that training reaches
BYTES_PER_TOKEN = 0.28  # times log2(vocab_size): of byte pairs, in prose or code
EVALUATIONS = 10
MICRO_BATCH_TOKENS = 16384  # tokens of a forward pass on one device, at most


def name_preset(text_bytes: float, flops: float) -> str:
    """The preset for a text and FLOPs, both rounded to two digits.

    FLOPs are also rounded to a fifth of a power of ten, because measurements of a machine differ.
    """
    rounded_flops = 10 ** (round(5 * math.log10(flops)) / 5)
    return re.sub(r"e\+0*(?=\d)", "e", f"{text_bytes:.1e}-{rounded_flops:.1e}")


def parse_preset(preset: str | None) -> tuple[float, float] | None:
    """Bytes of training text, and FLOPs. None if the preset has no FLOPs."""
    match = re.fullmatch(r"([1-9]\.?\d*e\d+)-([1-9]\.?\d*e\d+)", preset or "")
    if match is None:
        return None
    return float(match[1]), float(match[2])


@cache
def preset_values(preset: str) -> dict[str, Any]:
    """The values of a preset by key, such as model.n_layer. Raises UserError if it is unknown."""
    if preset in SIZES:
        column = list(SIZES).index(preset)
        return {key: values[column] for key, values in PRESETS.items()}
    numbers = parse_preset(preset)
    if numbers is None:
        raise UserError(
            f"preset={format_value(preset)} is unknown; set auto, {', '.join(SIZES)}, or "
            "BYTES-FLOPS as in 1.1e6-6.3e13"
        )
    return values_for_flops(*numbers)


def values_for_flops(text_bytes: float, flops: float) -> dict[str, Any]:
    """The values of the preset for a text and FLOPs, by key."""

    def by_both(key: str) -> float:
        rows = [interpolate(flops, FLOPS, row) for row in TABLES[key]]
        return interpolate(text_bytes, TEXT_BYTES, rows)

    def by_text(key: str) -> float:
        return interpolate(text_bytes, list(SIZES.values()), PRESETS[key])

    n_layer = round(by_both("n_layer"))
    n_head = max(2, n_layer)
    n_embd = HEAD_DIM * n_head
    vocab_size = 32 * round(by_both("vocab_size") / 32)
    block_size = 2 ** round(math.log2(by_both("block_size")))
    batch_size = 2 ** round(math.log2(by_both("batch_tokens") / block_size))
    # 6 FLOPs per weight and token; attention is left out
    flops_per_token = 6 * n_embd * (12 * n_layer * n_embd + vocab_size)
    epochs = two_digits(by_both("epochs"))
    text_tokens = text_bytes / (BYTES_PER_TOKEN * math.log2(vocab_size))
    tokens = min(flops / flops_per_token, epochs * text_tokens)
    lr_scale = by_both("lr_scale")
    return {
        "model.n_layer": n_layer,
        "model.n_head": n_head,
        "model.n_embd": n_embd,
        "model.block_size": block_size,
        "model.max_ngram": 3 if tokens * flops_per_token <= MAX_NGRAM_FLOPS else 1,
        "tokenizer.vocab_size": vocab_size,
        "train.batch_size": batch_size,
        "train.micro_batch_size": MICRO_BATCH_TOKENS // block_size,
        "train.steps": None,  # the run ends after train.epochs or train.minutes
        "train.epochs": epochs,
        "eval.every": math.ceil(tokens / (batch_size * block_size * EVALUATIONS)),
        "muon.lr": two_digits(lr_scale * MuonConfig.lr),
        "muon.embedding_lr": two_digits(lr_scale * MuonConfig.embedding_lr),
        "muon.norm_lr": two_digits(lr_scale * MuonConfig.norm_lr),
        "muon.head_lr": two_digits(lr_scale * by_text("muon.head_lr")),
        "muon.weight_decay": two_digits(by_text("muon.weight_decay")),
        "muon.ngram_weight_decay": two_digits(by_both("ngram_weight_decay")),
    }


def interpolate(x: float, points: Sequence[float], values: Sequence[float]) -> float:
    """Interpolate linearly in the logarithms of x and of the values; constant outside of points."""
    return math.exp(np.interp(math.log(x), np.log(points), np.log(values)))


def two_digits(x: float) -> float:
    return float(f"{x:.2g}")
