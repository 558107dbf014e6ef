"""Config of train.py: RunConfig and its sections. Each line has a key, its type, default, limits and meaning.

This module does not import torch, so that wrong settings are reported immediately. docs/configuration.md describes
how the command line and YAML files set these values.
"""

import os
from dataclasses import dataclass, field
from typing import Any

from common.errors import UserError
from common.settings import Rule, check_path_component, setting
from data import DataConfig, TokenizerConfig, python_stdlib
from data.sources import resolve_sources
from generation.config import SamplingConfig
from generation.run_paths import check_name
from model import AttentionConfig, GPTConfig
from training.schedule import ScheduleConfig

AUTO = "auto"
GPT2_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # of OpenAI, on the Hugging Face hub
MAX_STEPS = 10**12
OVERFITTING_EVALS = (
    3  # a run overfits if this many evaluations in a row found no lower validation loss
)
TOO_LARGE_DECAY = "reverses the sign of the weights at each step; set less than 1 /"


@dataclass
class TrainConfig:
    """Length of the run, and size of a step."""

    steps: int | None = setting(1000, 1, MAX_STEPS)  # optimizer steps
    minutes: float | None = setting(None, above=0)  # time limit; the run ends at steps or minutes
    batch_size: int = setting(16, 1, 10**6)  # sequences per optimizer step, over all devices
    micro_batch_size: Any = setting(
        None, 1, 10**6
    )  # sequences per forward pass; None: all; auto: what fits
    grad_clip: float | None = setting(1.0, above=0)  # largest gradient norm; None: no clipping
    patience: int | None = setting(
        None, 1, MAX_STEPS
    )  # stop after this many evaluations without a lower loss
    profile: bool = False  # record steps 6 to 8, and print where their time goes
    activation_checkpointing: str = setting(
        "none", choices=("none", "block", "attention")
    )  # recomputed in backward
    # initial weights: of another run, of a folder or repository in the format of transformers, or of OpenAI
    init_from: str | None = setting(None, choices=("run:NAME", "hf:NAME", *GPT2_MODELS))

    def rules(self, section: str) -> list[Rule]:
        is_size = self.micro_batch_size in (None, AUTO) or type(self.micro_batch_size) is int
        return [
            (
                "micro_batch_size",
                is_size,
                f"must be a number of sequences, {AUTO} (what fits), or null (all)",
            ),
            (
                "steps",
                (self.steps, self.minutes) != (None, None),
                "needs train.minutes; set one of them",
            ),
        ]

    def split_batch(self, world_size: int) -> tuple[int, int]:
        """Split an optimizer step into micro batches.

        world_size: number of devices.
        Returns the sequences per forward pass on one device, and the forward passes per optimizer step. With
        micro_batch_size=auto, the size is 1.
        Raises UserError if the batch cannot be split evenly.
        """
        share, remainder = divmod(self.batch_size, world_size)
        if remainder:
            valid = " or ".join(str(size * world_size) for size in (share, share + 1) if size > 0)
            raise UserError(
                f"train.batch_size={self.batch_size} does not divide by {world_size} devices; set {valid}"
            )
        micro = {None: share, AUTO: 1}.get(self.micro_batch_size, self.micro_batch_size)
        if share % micro:
            valid = ", ".join([str(size) for size in range(1, share + 1) if share % size == 0][-8:])
            problem = f"train.micro_batch_size={micro} does not divide the {share} sequences per step of a device"
            raise UserError(f"{problem}; set one of {valid}")
        return micro, share // micro


@dataclass
class OptimizerConfig:
    """Base class of all optimizers' configs. To add an optimizer, see docs/hacking.md."""

    name: str = "none"
    lr: float = setting(1e-3, above=0)  # peak learning rate

    def rules(self, section: str) -> list[Rule]:
        names = " or ".join(f"optimizer={name}" for name in OPTIMIZER_CONFIGS)
        return [
            (
                "name",
                OPTIMIZER_CONFIGS.get(self.name) is type(self),
                f"selects no optimizer; set {names}",
            )
        ]


@dataclass
class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) for all parameters."""

    name: str = "adamw"
    betas: list[float] = setting([0.9, 0.99], 0, below=1)
    eps: float = setting(1e-8, above=0)
    weight_decay: float = setting(
        0.1, 0
    )  # of matrices and embeddings only; with Muon, of its matrices

    def rules(self, section: str) -> list[Rule]:
        betas = ("betas", len(self.betas) == 2, "must be two numbers; set [0.9,0.95], for example")
        decay = ("weight_decay", self.lr * self.weight_decay < 1, f"{TOO_LARGE_DECAY} {section}.lr")
        return [*super().rules(section), betas, decay]


@dataclass
class MuonConfig(AdamWConfig):
    """Muon (Jordan et al., 2024) for the matrices of the blocks, AdamW for all other parameters."""

    name: str = "muon"
    lr: float = setting(0.01, above=0)  # Muon: peak learning rate
    momentum: float = setting(0.9, 0, below=1)  # Muon
    ns_steps: int = setting(5, 1, 100)  # Muon: Newton-Schulz iterations
    embedding_lr: float = setting(0.01, above=0)  # AdamW: peak learning rate of the embeddings
    # AdamW: each step multiplies the n-gram table by 1 - lr x ngram_weight_decay, so that rare n-grams stay small
    ngram_weight_decay: float = setting(0.7, 0)
    head_lr: float = setting(0.005, above=0)  # AdamW: peak learning rate of the output layer
    norm_lr: float = setting(0.01, above=0)  # AdamW: peak learning rate of the norms and biases
    betas: list[float] = setting([0.8, 0.95], 0, below=1)  # AdamW

    def rules(self, section: str) -> list[Rule]:
        is_small = self.embedding_lr * self.ngram_weight_decay < 1
        return [
            *super().rules(section),
            ("ngram_weight_decay", is_small, f"{TOO_LARGE_DECAY} {section}.embedding_lr"),
        ]


OPTIMIZER_CONFIGS: dict[str, type[OptimizerConfig]] = {
    "adamw": AdamWConfig,
    "muon": MuonConfig,
}


@dataclass
class EvalConfig:
    """Evaluation during training."""

    every: int = setting(100, 1, MAX_STEPS)  # steps between evaluations
    initial: bool = True  # also evaluate before the first step
    windows: int | None = setting(
        320, 1, 10**12
    )  # windows of the validation split, spread evenly; None: all
    sample: SamplingConfig = field(
        default_factory=lambda: SamplingConfig(max_new_tokens=100)
    )  # max_new_tokens=0: none
    attention_maps: bool = False  # plot attention maps at each evaluation
    attention_stats: bool = False  # log statistics of each attention head


@dataclass
class CheckpointConfig:
    """Saving of checkpoints."""

    every: int = setting(
        200, 1, MAX_STEPS
    )  # steps between saves of last.pt, which is also saved after the last step
    keep: int = setting(0, 0, 10**6)  # older last.pt to keep, as step-NNNNNN.pt


@dataclass
class WandbConfig:
    """Arguments of wandb.init."""

    mode: str = setting("offline", choices=("offline", "online", "disabled"))
    project: str = "trilgpt"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)

    def rules(self, section: str) -> list[Rule]:
        has_key = True
        if self.mode == "online" and os.environ.get("RANK", "0") == "0":  # only rank 0 uses wandb
            os.environ["WANDB_SILENT"] = "true"  # wandb raises an error instead of asking
            try:
                import wandb

                wandb.login(verify=False)  # reads files; does not use the network
            except Exception as error:  # wandb can raise anything, which does not stop the run
                has_key = type(error).__name__ != "UsageError"
        return [
            (
                "mode",
                has_key,
                "needs an API key; run `wandb login`, or set WANDB_API_KEY or wandb.mode=offline",
            )
        ]


@dataclass
class RunConfig:
    """Config of train.py. RunConfig() is the default run."""

    name: str | None = None  # run folder in runs/; None: <time>-<data>-<model>-<attention>
    seed: int = setting(1337, 0, 2**32 - 1)  # of the initial weights and the batches
    device: str = setting("auto", choices=("auto", "cpu", "cuda", "mps"))
    dtype: str = setting(
        "auto", choices=("auto", "float32", "bfloat16", "float16")
    )  # auto: bfloat16 if it is fast
    compile: bool | None = None  # None: on CUDA, if Triton is installed
    deterministic: bool = False  # only deterministic algorithms, which can be slower
    tf32: bool = (
        False  # CUDA computes float32 matrix products in TF32, which is faster and less precise
    )
    parallel: str = setting(
        "ddp", choices=("ddp", "fsdp")
    )  # each process has all weights (ddp) or a part (fsdp)
    plan: bool = False  # print parameters, FLOPs, memory and time of the run, without training
    flops_per_second: float | None = setting(
        None, above=0
    )  # with plan: assumed speed; None: measured
    world_size: int | None = setting(
        None, 1, 10**6
    )  # with plan: number of processes; None: as started by torchrun
    resume: bool = True  # resume runs/<name> if it exists; False: refuse to change an existing run
    preset: str | None = (
        None  # the preset that has set values for the amount of text (configs/preset.py)
    )
    model: GPTConfig = field(default_factory=GPTConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    data: DataConfig = field(default_factory=python_stdlib)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=MuonConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def rules(self, section: str) -> list[Rule]:
        if self.name is not None:
            check_name(self.name)
        check_path_component("model.name", self.model.name)
        if (
            os.environ.get("WORLD_SIZE", "1") == "1"
        ):  # else train.py checks it with the number of processes
            self.train.split_batch(self.world_size or 1)
        init_from = self.train.init_from or ""
        if init_from and self.tokenizer.name in ("bpe", "char"):
            choice = (
                "gpt2"
                if init_from in GPT2_MODELS
                else f"run tokenizer.run={init_from.removeprefix('run:')}"
            )
            raise UserError(
                f"train.init_from={init_from} needs the tokenizer of these weights; set tokenizer={choice}"
            )
        if "last" in (
            self.tokenizer.run,
            init_from.removeprefix("run:"),
        ):  # each job of a sweep would find another run
            raise UserError(
                "train.init_from=run:last and tokenizer.run=last can change; set the name of a run"
            )
        resolve_sources(self.data)  # a missing file is reported before torch is imported
        keys = () if self.plan else ("flops_per_second", "world_size")
        return [(key, getattr(self, key) is None, "needs plan=true") for key in keys]
