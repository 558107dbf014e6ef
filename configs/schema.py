"""The types of every config, assembled from the rooms' own dataclasses, and the rules that cross rooms.

Types only: every value lives in one YAML file beside this one. Nothing here imports torch.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

from common.errors import UserError
from common.run_dir import check_name, check_path_component
from compare.bench.config import BenchConfig
from data import DataConfig, TokenizerConfig
from data.prepare import check_short_text
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
        check_path_component("data.name", self.data.name)
        check_path_component("model.name", self.model.name)
        _check_seed(self.seed)
        self.train.plan(world_size=1)
        lr_scale(self.schedule, self.schedule.warmup_steps, None, 0.0)
        if self.flops_per_second is not None:
            _check_speed(self.flops_per_second, self.plan)
        if self.train.init_from is not None and self.tokenizer.name in ("bpe", "char"):
            raise UserError(
                f"train.init_from={self.train.init_from} comes with a vocabulary, and tokenizer={self.tokenizer.name} "
                f"makes one from the text; set tokenizer=run tokenizer.run={self.train.init_from.removeprefix('run:')}"
            )
        if "last" in (self.tokenizer.run, (self.train.init_from or "").removeprefix("run:")):
            raise UserError(
                "train.init_from=run:last and tokenizer.run=last would be another run's when this one goes on; set the "
                "run's own name"
            )
        if not self.plan:  # which finds out by itself, and downloads no vocabulary for it
            check_short_text(self.data, self.tokenizer, self.model.block_size)


@dataclass
class Sample(SamplingConfig):
    """sample.py"""

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
        """The rules that cross rooms. Raises UserError."""
        super().check(section)
        if self.checkpoint not in ("best", "last"):
            raise UserError(f"checkpoint={self.checkpoint} is unknown; set best or last")
        for key in ("num_samples", "batch_size"):
            if getattr(self, key) < 1:
                raise UserError(f"{key}={getattr(self, key)} must be at least 1; set, say, 8")
        _check_seed(self.seed)
        does = {"prompt": self.prompt is not None, "prompt_file": self.prompt_file is not None,
                "prompts": self.prompts is not None, "interactive": self.interactive, "loss": self.loss}  # fmt: skip
        chosen = [key for key, is_set in does.items() if is_set]
        if len(chosen) > 1:
            raise UserError(f"{' and '.join(chosen)} are set, each of which asks for something else; set one of them")
        if (self.data.path or self.data.mix) and not self.loss:
            raise UserError(
                f"data.path={self.data.path or 'null'} is a text to be measured; set loss=true as well, or leave it out"
            )
        if self.out is not None and not (self.loss or self.prompts):
            raise UserError(
                f"out={self.out} is for what prompts=FILE or loss=true come to; set one of them, or leave it out"
            )
        if self.num_samples > 1 and (self.loss or self.interactive):
            raise UserError(f"num_samples={self.num_samples} is for prompts; leave it out, or leave out {chosen[0]}")
        if self.max_new_tokens == 0 and not (self.loss or self.attention_map):
            raise UserError("max_new_tokens=0 makes no text; set 1 or more")
        if self.attention_map and (self.loss or self.interactive or self.prompts):
            raise UserError(f"attention_map=true is of one prompt; leave out {chosen[0]}, or attention_map")


@dataclass
class Prepare:
    """prepare.py"""

    data: DataConfig
    tokenizer: TokenizerConfig
    inspect: bool
    verify: bool

    def check(self) -> None:
        """The rules that cross rooms. Raises UserError."""
        check_path_component("data.name", self.data.name)


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
            check_path_component("name", self.name)
        check_path_component("model.name", self.model.name)
        _check_seed(self.seed)
        H, G, _, _ = self.kernel_shape()
        if H % G:
            raise UserError(f"n_kv_head={G} does not divide the {H} heads of n_head; set a number that does, or null")

    def kernel_shape(self) -> tuple[int, int, int, int]:
        """(H, G, D, Dv) of attention alone: the model's, where nothing else is set."""
        H = self.n_head or self.model.n_head
        D = self.head_size or self.model.head_dim
        G = self.n_kv_head or (H if self.n_head else self.model.kv_heads)
        return H, G, D, self.value_size or D


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
