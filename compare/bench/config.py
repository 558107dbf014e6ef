"""The config of bench.py: types and checks. This module must not import torch."""

import re
from dataclasses import dataclass
from typing import Any

from common.errors import UserError, check_positive, check_seed, check_settings
from common.run_dir import check_path_component
from model import GPTConfig
from training.config import WandbConfig

PHASES = ("forward", "forward+backward", "decode", "step")
CAUSAL = "causal"


@dataclass
class BenchConfig:
    """A bench measures every combination of phases, masks, dtypes, block_sizes and backends.

    configs/bench.yaml describes the keys. model, optimizer, vocab_size, compile: settings of phase step.
    """

    name: str | None
    seed: int
    device: str
    compile: bool | None
    tf32: bool
    text_size: Any  # name of a preset; None: no value is from a preset
    model: GPTConfig
    optimizer: Any  # a dataclass of OPTIMIZERS
    backends: list[str] | None
    phases: list[str]
    masks: list[str]
    dtypes: list[str]
    block_sizes: list[int]
    batch_size: int
    n_head: int | None
    n_kv_head: int | None
    head_size: int | None
    value_size: int | None
    vocab_size: int
    rounds: int
    repeats: int
    seconds: float
    time_limit: float
    wandb: WandbConfig

    def check(self) -> None:
        """Raises UserError for invalid settings."""
        if self.name is not None:
            check_path_component("name", self.name)
        check_path_component("model.name", self.model.name)
        check_seed(self.seed)
        self.wandb.check()
        check_positive("", self, batch_size=10**6, n_head=10**4, n_kv_head=10**4, head_size=10**5, value_size=10**5,
                       vocab_size=10**7, rounds=10**6, repeats=10**9, seconds=10**7, time_limit=10**7)  # fmt: skip
        if "softmax" not in self.model.mixers:
            raise UserError("model.mixer=linear leaves no backend to compare; set backends=[sdpa,linear] instead")
        H, G, _, _ = self.kernel_shape()
        has_valid_sizes = all(0 < T <= 10**8 for T in self.block_sizes)
        rules = [
            ("phases", set(self.phases) <= set(PHASES), f"contains an unknown phase; set some of {', '.join(PHASES)}"),
            ("n_kv_head", H % G == 0, f"does not divide the {H} heads; set a divisor, or null"),
            ("block_sizes", has_valid_sizes, "must be positive numbers of tokens, at most 10^8; set [64,1024]"),
        ]
        for key, value in vars(self).items():
            if isinstance(value, list):
                rules.append((key, len(value) > 0, "leaves nothing to measure; set one or more values"))
                rules.append((key, len(set(value)) == len(value), "contains a value twice; remove one"))
        check_settings("", self, rules)
        for mask in self.masks:
            parse_mask(mask)

    def kernel_shape(self) -> tuple[int, int, int, int]:
        """Heads H, key/value heads G, head size D and value size Dv of the attention kernels; default: the model's."""
        H = self.n_head or self.model.n_head
        D = self.head_size or self.model.head_dim
        G = self.n_kv_head or (H if self.n_head else self.model.kv_heads)
        return H, G, D, self.value_size or D


def parse_mask(mask: str) -> tuple[int | None, int | None]:
    """The window and the document length of a mask of BenchConfig.masks; None: unlimited. Raises UserError."""
    match = re.fullmatch(r"(window|documents):([1-9]\d{0,8})", mask)
    if match is None and mask != CAUSAL:
        raise UserError(f"masks: {mask} is unknown; set {CAUSAL}, window:256 or documents:256, for example")
    limits = {} if match is None else {match[1]: int(match[2])}
    return limits.get("window"), limits.get("documents")
