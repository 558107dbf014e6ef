"""The config of each script: dataclasses assembled from those of the packages, and rules that span packages.

The dataclasses have types and no values: each value is in one YAML file of this folder. Nothing here imports torch.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

from common.errors import UserError
from common.run_dir import check_name, check_path_component
from compare.bench.config import BenchConfig
from data import DataConfig, TokenizerConfig
from data.sources import resolve_sources
from model import AttentionConfig, GPTConfig, SamplingConfig
from training.config import (
    AdamWConfig,
    CheckpointConfig,
    EvalConfig,
    MuonConfig,
    ScheduleConfig,
    TrainConfig,
    TrainWandbConfig,
    WandbConfig,
)
from training.schedule import lr_scale


@dataclass
class Train:
    """Config of train.py."""

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
    optimizer: Any  # a dataclass of OPTIMIZERS
    schedule: ScheduleConfig
    train: TrainConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    wandb: TrainWandbConfig

    def check(self) -> None:
        """Check the rules that span packages. Raises UserError."""
        if self.name is not None:
            check_name(self.name)
        check_path_component("data.name", self.data.name)
        check_path_component("model.name", self.model.name)
        _check_seed(self.seed)
        self.train.split_batch(world_size=1)
        lr_scale(self.schedule, self.schedule.warmup_steps, None, 0.0)
        flops, init_from = self.flops_per_second, self.train.init_from or ""
        init_run = init_from.removeprefix("run:")
        _refuse(
            (
                flops is not None and not self.plan,
                f"flops_per_second={flops} needs plan=true; set it, or remove the key",
            ),
            (
                flops is not None and not 0 < flops < inf,
                f"flops_per_second={flops} must be greater than 0; set, say, 1e14, or null to measure this machine",
            ),
            (
                init_from and self.tokenizer.name in ("bpe", "char"),
                f"train.init_from={init_from} needs that run's tokenizer; set tokenizer=run tokenizer.run={init_run}",
            ),
            (
                "last" in (self.tokenizer.run, init_run),
                "train.init_from=run:last and tokenizer.run=last may mean another run when this run is resumed; "
                "set the name of a run",
            ),
        )
        resolve_sources(self.data)  # a missing file is reported before torch is imported


@dataclass
class Sample(SamplingConfig):
    """Config of sample.py."""

    run: str
    checkpoint: str
    prompt: str | None
    prompt_file: str | None
    prompts: str | None
    out: str | None
    interactive: bool
    num_samples: int
    batch_size: int
    seed: int
    device: str
    dtype: str
    cuda_graphs: bool
    attention: AttentionConfig
    data: DataConfig
    loss: bool
    attention_map: bool

    def check(self, section: str = "") -> None:
        """Check the rules that span packages. Raises UserError."""
        super().check(section)
        _check_seed(self.seed)
        modes = ["prompt", "prompt_file", "prompts", "interactive", "loss"]
        modes = [key for key in modes if getattr(self, key) not in (None, False)]
        mode = modes[0] if modes else None
        _refuse(
            (self.checkpoint not in ("best", "last"), f"checkpoint={self.checkpoint} is unknown; set best or last"),
            (self.num_samples < 1, f"num_samples={self.num_samples} must be at least 1; set, say, 8"),
            (self.batch_size < 1, f"batch_size={self.batch_size} must be at least 1; set, say, 8"),
            (len(modes) > 1, f"{' and '.join(modes)} exclude each other; set one of them"),
            (
                (self.data.path or self.data.mix) and not self.loss,
                f"data.path={self.data.path or 'null'} is not read; set loss=true to measure it, or remove data.path",
            ),
            (
                self.out is not None and mode not in ("loss", "prompts"),
                f"out={self.out} needs prompts=FILE or loss=true; set one of them, or remove out",
            ),
            (
                self.num_samples > 1 and mode in ("loss", "interactive"),
                f"num_samples={self.num_samples} has no effect with {mode}; remove one of them",
            ),
            (
                self.max_new_tokens == 0 and mode != "loss" and not self.attention_map,
                "max_new_tokens=0 generates nothing; set 1 or more",
            ),
            (
                self.attention_map and mode in ("loss", "interactive", "prompts"),
                f"attention_map=true needs one prompt; remove {mode}, or attention_map",
            ),
        )


@dataclass
class Prepare:
    """Config of prepare.py."""

    data: DataConfig
    tokenizer: TokenizerConfig
    inspect: bool
    verify: bool

    def check(self) -> None:
        """Check the rules that span packages. Raises UserError."""
        check_path_component("data.name", self.data.name)


@dataclass
class Bench(BenchConfig):
    """Config of bench.py."""

    name: str | None
    seed: int
    device: str
    compile: bool | None
    tf32: bool
    model: GPTConfig
    optimizer: Any  # a dataclass of OPTIMIZERS
    wandb: WandbConfig

    def check(self) -> None:
        """Check the rules that span packages. Raises UserError."""
        if self.name is not None:
            check_path_component("name", self.name)
        check_path_component("model.name", self.model.name)
        _check_seed(self.seed)
        H, G, _, _ = self.kernel_shape()
        _refuse((H % G != 0, f"n_kv_head={G} does not divide the {H} heads; set a divisor, or null"))

    def kernel_shape(self) -> tuple[int, int, int, int]:
        """Heads H, key/value heads G, head size D and value size Dv of the attention kernels; default: the model's."""
        H = self.n_head or self.model.n_head
        D = self.head_size or self.model.head_dim
        G = self.n_kv_head or (H if self.n_head else self.model.kv_heads)
        return H, G, D, self.value_size or D


def _check_seed(seed: int) -> None:
    _refuse((not 0 <= seed < 2**32, f"seed={seed} must be at least 0 and below 2^32; set, say, 1337"))


def _refuse(*rules: tuple[Any, str]) -> None:
    """Raise UserError with the message of the first rule (is_invalid, message) whose is_invalid is true."""
    for is_invalid, message in rules:
        if is_invalid:
            raise UserError(message)


SCRIPTS = {"train": Train, "sample": Sample, "prepare": Prepare, "bench": Bench}
OPTIMIZERS = {"adamw": AdamWConfig, "muon": MuonConfig}
