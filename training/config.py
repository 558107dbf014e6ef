"""Config of training: types and checks. The values are in configs/. This module must not import torch."""

import os
import re
from dataclasses import dataclass
from math import inf
from typing import Any

from common.errors import UserError, check_positive, check_seed, check_settings
from common.run_dir import check_name, check_path_component
from data import DataConfig, TokenizerConfig
from data.sources import resolve_sources
from model import AttentionConfig, GPTConfig, SamplingConfig
from training.schedule import MAX_STEPS, ScheduleConfig, lr_scale

AUTO = "auto"
GPT2_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # of OpenAI, on the Hugging Face hub
OVERFITTING_EVALS = 3  # a run overfits if this many evaluations in a row found no lower validation loss


@dataclass
class TrainConfig:
    """Length of the run, and size of a step.

    steps: optimizer steps.
    minutes: a time limit, instead of steps or in addition.
    batch_size: sequences per optimizer step, over all devices.
    micro_batch_size: sequences per forward pass on one device. None: the device's share of the batch. "auto": as many
        as fit into the memory of a GPU.
    grad_clip: largest gradient norm. None: no clipping.
    patience: stop after this many evaluations in a row without a lower validation loss. None: never.
    profile: record where the time of a few steps goes.
    activation_checkpointing: what the backward pass computes again instead of keeping it in memory. "none",
        "block": all of each block, "attention": only its attention.
    init_from: the initial weights. "run:NAME": those of a run. "hf:NAME": a folder in the format of transformers, or a
        model of the Hugging Face hub. "gpt2", "gpt2-medium", ...: OpenAI's GPT-2. None: random weights.
    """

    steps: int | None
    minutes: float | None
    batch_size: int
    micro_batch_size: Any  # int, None, or "auto"
    grad_clip: float | None
    patience: int | None
    profile: bool
    activation_checkpointing: str
    init_from: str | None

    def __post_init__(self):
        check_positive("train", self, "minutes", "grad_clip", steps=MAX_STEPS, batch_size=10**6, patience=MAX_STEPS)
        run, size = self.init_from, self.micro_batch_size
        check_settings("train", self, [
            ("init_from", run is None or run in GPT2_MODELS or re.fullmatch("(run|hf):.+", run),
             f"is unknown; set run:NAME, hf:FOLDER, {', '.join(GPT2_MODELS)}, or null"),
            ("micro_batch_size", size in (None, AUTO) or (type(size) is int and size > 0),
             f"must be a number of sequences, {AUTO} (as many as fit), or null (all of a device's share)"),
            ("activation_checkpointing", self.activation_checkpointing in ("none", "block", "attention"),
             "is unknown; set none, block or attention"),
        ])  # fmt: skip
        if self.steps is None and self.minutes is None:
            raise UserError("set train.steps or train.minutes: the run has no end")

    def split_batch(self, world_size: int) -> tuple[int, int]:
        """(sequences per forward pass on one device, forward passes per optimizer step). Raises UserError.

        With micro_batch_size=auto, the size is 1, because the size that fits is known only when the model exists.
        """
        share, remainder = divmod(self.batch_size, world_size)
        if remainder:
            raise UserError(
                f"train.batch_size={self.batch_size} cannot be divided among {world_size} devices; "
                f"set {f'{share * world_size} or ' if share else ''}{(share + 1) * world_size}"
            )
        micro = {None: share, AUTO: 1}.get(self.micro_batch_size, self.micro_batch_size)
        if share % micro:
            divisors = [str(size) for size in range(1, share + 1) if share % size == 0]
            raise UserError(
                f"train.micro_batch_size={micro} does not divide the {share} sequences per step of a device "
                f"(train.batch_size={self.batch_size}, number of devices: {world_size}); "
                f"set one of {', '.join(divisors[-8:])}"
            )
        return micro, share // micro


def _check_betas_and_weight_decay(config: "AdamWConfig | MuonConfig") -> None:
    valid_betas = len(config.betas) == 2 and all(0 <= beta < 1 for beta in config.betas)
    check_settings("optimizer", config, [
        ("betas", valid_betas, "must be two numbers, at least 0 and below 1; set [0.9,0.95], for example"),
        ("weight_decay", 0 <= config.weight_decay < inf, "must not be negative"),
    ])  # fmt: skip


@dataclass
class AdamWConfig:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101). weight_decay applies to matrices and embeddings only."""

    name: str
    lr: float
    betas: list[float]
    eps: float
    weight_decay: float

    def __post_init__(self):
        check_positive("optimizer", self, "lr", "eps")
        _check_betas_and_weight_decay(self)


@dataclass
class MuonConfig:
    """Muon (Jordan et al., 2024) for the matrices of the blocks, AdamW for all other parameters.

    lr, momentum, ns_steps (Newton-Schulz iterations) and weight_decay belong to Muon, the others to AdamW.
    ngram_weight_decay: each step multiplies the n-gram table by 1 - learning rate x ngram_weight_decay, so that the
        embeddings of rare n-grams stay small. The learning rate is that of the embeddings.
    """

    name: str
    lr: float
    momentum: float
    ns_steps: int
    weight_decay: float
    embedding_lr: float
    ngram_weight_decay: float
    head_lr: float
    norm_lr: float
    betas: list[float]
    eps: float

    def __post_init__(self):
        check_positive("optimizer", self, "lr", "embedding_lr", "head_lr", "norm_lr", "eps", ns_steps=100)
        for key, lr_key in (("weight_decay", "lr"), ("ngram_weight_decay", "embedding_lr")):
            lr = getattr(self, lr_key)
            advice = (
                f"must be at least 0 and below 1 / optimizer.{lr_key} = {1 / lr:g}; set a smaller one of the two keys"
            )
            check_settings("optimizer", self, [(key, 0 <= getattr(self, key) * lr < 1, advice)])
        valid_momentum = 0 <= self.momentum < 1
        check_settings("optimizer", self, [("momentum", valid_momentum, "must be at least 0 and below 1")])
        _check_betas_and_weight_decay(self)


@dataclass
class EvalConfig:
    """Evaluation during training.

    every: steps between evaluations. initial: also evaluate before the first step. batches: an evaluation uses
    batches * train.batch_size windows, spread evenly over the validation split; None: all windows. sample: settings of
    the sample that each evaluation after step 0 generates; max_new_tokens=0: no sample. attention_stats: log statistics
    of each head's attention (see model/attention/attention_maps.py).
    """

    every: int
    initial: bool
    batches: int | None
    sample: SamplingConfig
    attention_stats: bool

    def __post_init__(self):
        check_positive("eval", self, every=MAX_STEPS, batches=10**9)
        self.sample.check("eval.sample")


@dataclass
class CheckpointConfig:
    """Saving of checkpoints.

    every: steps between saves of last.pt, which is also saved after the last step. keep: number of older last.pt that
    are kept, as step-NNNNNN.pt. optimizer: whether best.pt contains the optimizer state. last.pt, from which a run
    resumes, always contains it.
    """

    every: int
    keep: int
    optimizer: bool

    def __post_init__(self):
        check_positive("checkpoint", self, every=MAX_STEPS)
        check_settings(
            "checkpoint", self, [("keep", 0 <= self.keep <= 10**6, "must be from 0 to 10^6; set 2, for example")]
        )


@dataclass
class WandbConfig:
    """Arguments of wandb.init. mode: offline, online or disabled."""

    mode: str
    project: str
    entity: str | None
    group: str | None
    tags: list[str]

    def __post_init__(self):
        is_known = self.mode in ("offline", "online", "disabled")
        check_settings("wandb", self, [("mode", is_known, "is unknown; set offline, online or disabled")])

    def check(self) -> None:
        """Raises UserError if wandb would ask for an API key. Only rank 0 uses wandb."""
        if self.mode != "online" or os.environ.get("RANK", "0") != "0":
            return
        os.environ["WANDB_SILENT"] = "true"  # wandb raises an error instead of asking
        import wandb

        try:
            wandb.login(verify=False)
        except wandb.Error as error:
            raise UserError(
                f"wandb.mode=online needs an API key; run `wandb login`, or set WANDB_API_KEY or wandb.mode=offline "
                f"({error})"
            ) from None


@dataclass
class TrainWandbConfig(WandbConfig):
    """WandbConfig of train.py. attention_maps: plot attention maps at each evaluation, even if wandb is disabled."""

    attention_maps: bool


@dataclass
class RunConfig:
    """Config of train.py."""

    name: str | None
    seed: int
    device: str
    dtype: str
    compile: bool | None
    deterministic: bool
    tf32: bool
    parallel: str
    plan: bool
    flops_per_second: float | None
    world_size: int | None
    resume: bool
    text_size: Any  # name of a preset; None: no value is from a preset
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
        self.data.check()
        check_path_component("model.name", self.model.name)
        check_seed(self.seed)
        check_positive("", self, world_size=10**6)
        lr_scale(self.schedule, self.schedule.warmup_steps, None, 0.0)
        flops, init_from = self.flops_per_second, self.train.init_from or ""
        init_run = init_from.removeprefix("run:")
        init_tokenizer = "gpt2" if init_from in GPT2_MODELS else f"run tokenizer.run={init_run}"
        rules = [
            ("parallel", self.parallel in ("ddp", "fsdp"), "is unknown; set ddp or fsdp"),
            *(
                (key, getattr(self, key) is None or self.plan, "needs plan=true; set it, or remove the key")
                for key in ("flops_per_second", "world_size")
            ),
            ("flops_per_second", flops is None or 0 < flops < inf, "must be greater than 0; set 1e14, for example"),
        ]
        check_settings("", self, rules)
        if os.environ.get("WORLD_SIZE", "1") == "1":  # else train.py checks it with the number of processes
            self.train.split_batch(self.world_size or 1)
        same_vocabulary = not init_from or self.tokenizer.name not in ("bpe", "char")
        tokenizer_of_run = f"needs the tokenizer of these weights; set tokenizer={init_tokenizer}"
        check_settings("train", self.train, [("init_from", same_vocabulary, tokenizer_of_run)])
        if "last" in (self.tokenizer.run, init_run):
            raise UserError(
                "train.init_from=run:last and tokenizer.run=last may mean another run when this run is resumed; "
                "set the name of a run"
            )
        resolve_sources(self.data)  # a missing file is reported before torch is imported
        self.wandb.check()
