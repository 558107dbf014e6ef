"""The types of every config, assembled from the rooms' own dataclasses, and the rules that cross rooms.

Types only: every value lives in one YAML file beside this one. Nothing here imports torch.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

from hydra.core.config_store import ConfigStore

from data import DataConfig, TokenizerConfig
from data.prepare import check_short_text
from errors import UserError
from model import AttentionConfig, GPTConfig, SamplingConfig
from training import (
    AdamWConfig,
    BenchConfig,
    CheckpointConfig,
    EvalConfig,
    MuonConfig,
    ScheduleConfig,
    TrainConfig,
    TrainWandbConfig,
    WandbConfig,
)
from training.run import check_name, check_word
from training.schedule import lr_fraction


@dataclass
class Train:
    """train.py"""

    name: str | None
    seed: int
    device: str
    dtype: str
    compile: bool | None
    deterministic: bool
    tf32: bool
    plan: bool
    flops_per_second: float | None
    resume: bool
    model: GPTConfig
    attention: AttentionConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    optimizer: Any  # one of OPTIMIZERS below, named in the group's own YAML files
    schedule: ScheduleConfig
    train: TrainConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    wandb: TrainWandbConfig

    def check(self) -> None:
        """The rules that cross rooms. Raises UserError."""
        if self.name is not None:
            check_name(self.name)
        check_word("data.name", self.data.name)
        check_word("model.name", self.model.name)
        _check_seed(self.seed)
        _check_optimizer(self.optimizer)
        self.train.plan(world_size=1)
        lr_fraction(self.schedule, self.schedule.warmup_steps, None, 0.0)
        if self.flops_per_second is not None:
            _check_speed(self.flops_per_second, self.plan)
        if not self.plan:  # which finds out by itself, and downloads no vocabulary for it
            check_short_text(self.data, self.tokenizer, self.model.block_size)


@dataclass
class Sample(SamplingConfig):
    """sample.py"""

    run: str
    checkpoint: str
    prompt: str | None
    prompt_file: str | None
    num_samples: int
    seed: int
    device: str
    dtype: str
    attention: AttentionConfig
    attention_map: bool

    def check(self) -> None:
        """Raises UserError."""
        if self.checkpoint not in ("best", "last"):
            raise UserError(f"checkpoint={self.checkpoint} is unknown; set best or last")
        if self.num_samples < 1:
            raise UserError(f"num_samples={self.num_samples} must be at least 1")
        _check_seed(self.seed)
        if self.prompt is not None and self.prompt_file is not None:
            raise UserError("prompt and prompt_file are both set; set one of them")


@dataclass
class Prepare:
    """prepare.py"""

    data: DataConfig
    tokenizer: TokenizerConfig

    def check(self) -> None:
        """The rooms' own rules are all there is."""


@dataclass
class Bench(BenchConfig):
    """bench.py"""

    name: str | None
    seed: int
    device: str
    compile: bool | None
    tf32: bool
    model: GPTConfig
    optimizer: Any  # as Train's
    wandb: WandbConfig

    def check(self) -> None:
        """The rules that cross rooms. Raises UserError."""
        if self.name is not None:
            check_word("name", self.name)
        check_word("model.name", self.model.name)
        _check_seed(self.seed)
        _check_optimizer(self.optimizer)
        H, G, _, _ = self.kernel_shape()
        if H % G:
            raise UserError(f"n_kv_head={G} does not divide the {H} heads of n_head; set a number that does, or null")

    def kernel_shape(self) -> tuple[int, int, int, int]:
        """(H, G, D, Dv) of attention alone: the model's, where nothing else is set."""
        H = self.n_head or self.model.n_head
        D = self.head_size or self.model.head_size
        G = self.n_kv_head or (H if self.n_head else self.model.kv_heads)
        return H, G, D, self.value_size or D


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, OPTIMIZERS.get(getattr(optimizer, "name", None), ())):
        raise UserError(f"optimizer needs a choice whose name it keeps; set optimizer={' or '.join(OPTIMIZERS)}")


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise UserError(f"seed={seed} must not be negative, and below 2^32; set, say, 1337")


def _check_speed(flops_per_second: float, plan: bool) -> None:
    if not plan:
        raise UserError(f"flops_per_second={flops_per_second:g} is for a plan alone; set plan=true, or leave it out")
    if not 0 < flops_per_second < inf:
        raise UserError(
            f"flops_per_second={flops_per_second:g} must be a number greater than 0; set, say, 1e14, or null, which "
            "measures it here"
        )


SCRIPTS = {"train": Train, "sample": Sample, "prepare": Prepare, "bench": Bench}
OPTIMIZERS = {"adamw": AdamWConfig, "muon": MuonConfig}


def register() -> None:
    """Tell Hydra the types, so that a YAML file or an override that does not fit them fails while composing."""
    store = ConfigStore.instance()
    for name, node in SCRIPTS.items():
        store.store(group="schema", name=name, node=node)
    for name, node in OPTIMIZERS.items():
        store.store(group="schema/optimizer", name=name, node=node)
