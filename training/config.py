"""Config of train.py: RunConfig and its sections.

Each field has its key, type, default, limits and meaning. "(preset)" marks the defaults that a
preset for the amount of text replaces (training/presets.py). docs/configuration.md describes how
the command line and YAML files set values.

This module does not import torch, so that wrong settings are reported immediately.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from common.errors import UserError
from common.run_paths import check_name
from common.settings import Rule, check, check_path_component, setting
from data import DataConfig, TokenizerConfig, python_stdlib
from generation.config import SamplingConfig
from model import AttentionConfig, GPTConfig
from training.schedule import ScheduleConfig

# of OpenAI, on the Hugging Face hub
GPT2_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
MAX_STEPS = 10**12
# a run overfits if this many evaluations in a row found no lower validation loss
OVERFITTING_EVALS = 3
# first steps of a process, excluded from medians: caches fill, and kernels are selected
UNTIMED_STEPS = 5
# of a forward pass in the FLOPs of both passes, and in their time, unless they are compiled
FORWARD_SHARE = 1 / 3
STUDENT_LENGTH = 4  # steps of a student, as a multiple of the steps of a teacher
TOO_LARGE_DECAY = "reverses the sign of the weights at each step; set less than 1 /"


@dataclass
class TrainConfig:
    """Length of the run, and size of a step."""

    # optimizer steps of a model; a student has more (preset)
    steps: int | None = setting(1000, 1, MAX_STEPS)
    # passes of a model over the training text; steps, epochs or minutes end a run, whichever comes
    # first
    epochs: float | None = setting(None, above=0)
    # time limit. Without steps, a preset for text and time also sets model, vocabulary and batch
    minutes: float | None = setting(None, above=0, high=1e9)
    # sequences per optimizer step, over all devices (preset)
    batch_size: int = setting(16, 1, 10**6)
    # sequences per forward pass on one device, at most. None passes all. Halve it if memory is full
    micro_batch_size: int | None = setting(None, 1, 10**6)
    # largest gradient norm; None: no clipping
    grad_clip: float | None = setting(1.0, above=0)
    # stop after this many evaluations without a lower loss
    patience: int | None = setting(None, 1, MAX_STEPS)
    # models that are trained first, if train.minutes allows. The last model, the student, learns
    # their mean probabilities (training/teachers.py; preset for text and time)
    n_teachers: int | None = setting(None, 2, 100)
    # recompute activations in the backward pass: of blocks, or of attention only
    activation_checkpointing: str = setting("none", choices=("none", "block", "attention"))
    # initial weights: of a run, of a model in the format of transformers, or of OpenAI
    init_from: str | None = setting(None, choices=("run:NAME", "hf:NAME", *GPT2_MODELS))

    def rules(self, section: str) -> Iterator[Rule]:
        has_end = any(limit is not None for limit in (self.steps, self.epochs, self.minutes))
        yield "steps", has_end, "needs train.epochs or train.minutes; set one of them"
        if self.n_teachers is not None:
            for key in ("init_from", "patience"):
                advice = "cannot be combined with train.n_teachers; set one of them to null"
                yield key, getattr(self, key) is None, advice
            has_length = self.steps is not None or self.epochs is not None
            yield "n_teachers", has_length, "needs train.steps or train.epochs of a teacher"

    def fit_teachers(self, models: float) -> int:
        """The number of teachers that can be trained in the time of so many models.

        Then a student is trained, whose steps also need a forward pass of each teacher. There is
        time for these, and for half of its other passes: other teachers are faster than the first
        one, which is evaluated more often. A student that is cut much shorter, or of a single
        teacher, is not better than its teachers.
        """
        fitting = min(self.n_teachers or 0, (models - 0.5) / (1 + FORWARD_SHARE))
        return math.floor(fitting) if fitting >= 2 else 0

    def split_batch(self, world_size: int) -> tuple[int, int]:
        """Split an optimizer step into micro batches.

        world_size: number of devices.
        Returns the sequences per forward pass on one device, and the forward passes per optimizer
        step. Raises UserError if the devices cannot have equal shares of the batch.
        """
        share, remainder = divmod(self.batch_size, world_size)
        if remainder:
            sizes = [size * world_size for size in (share, share + 1) if size > 0]
            raise UserError(
                f"train.batch_size={self.batch_size} does not divide by {world_size} devices; "
                f"set {' or '.join(map(str, sizes))}"
            )
        limit = min(self.micro_batch_size or share, share)
        size = max(n for n in range(1, limit + 1) if share % n == 0)
        return size, share // size


@dataclass
class OptimizerConfig:
    """Base class of all optimizers' configs. To add an optimizer, see docs/hacking.md."""

    name: str = "none"
    # peak learning rate
    lr: float = setting(1e-3, above=0)

    def rules(self, section: str) -> Iterator[Rule]:
        names = " or ".join(f"optimizer={name}" for name in OPTIMIZER_CONFIGS)
        is_known = OPTIMIZER_CONFIGS.get(self.name) is type(self)
        yield "name", is_known, f"selects no optimizer; set {names}"


@dataclass
class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) for all parameters."""

    name: str = "adamw"
    betas: list[float] = setting([0.9, 0.99], 0, below=1)
    eps: float = setting(1e-8, above=0)
    # of matrices and embeddings only; with Muon, of its matrices (preset with Muon)
    weight_decay: float = setting(0.1, 0)

    def rules(self, section: str) -> Iterator[Rule]:
        yield from super().rules(section)
        yield "betas", len(self.betas) == 2, "must be two numbers; set [0.9,0.95], for example"
        is_small = self.lr * self.weight_decay < 1
        yield "weight_decay", is_small, f"{TOO_LARGE_DECAY} {section}.lr"


@dataclass
class MuonConfig(AdamWConfig):
    """Muon (Jordan et al., 2024) for the matrices of the blocks, AdamW for other parameters."""

    name: str = "muon"
    # Muon: peak learning rate, momentum, and Newton-Schulz iterations
    lr: float = setting(0.01, above=0)
    momentum: float = setting(0.9, 0, below=1)
    ns_steps: int = setting(5, 1, 100)
    # AdamW: peak learning rate of the embeddings
    embedding_lr: float = setting(0.01, above=0)
    # AdamW: each step multiplies the n-gram table by 1 - lr x ngram_weight_decay, so that the
    # embeddings of rare n-grams stay small (preset)
    ngram_weight_decay: float = setting(0.7, 0)
    # AdamW: peak learning rate of the output layer (preset)
    head_lr: float = setting(0.005, above=0)
    # AdamW: peak learning rate of the norms and biases
    norm_lr: float = setting(0.01, above=0)
    # AdamW
    betas: list[float] = setting([0.8, 0.95], 0, below=1)

    def rules(self, section: str) -> Iterator[Rule]:
        yield from super().rules(section)
        is_small = self.embedding_lr * self.ngram_weight_decay < 1
        yield "ngram_weight_decay", is_small, f"{TOO_LARGE_DECAY} {section}.embedding_lr"


OPTIMIZER_CONFIGS: dict[str, type[OptimizerConfig]] = {
    "adamw": AdamWConfig,
    "muon": MuonConfig,
}


@dataclass
class EvalConfig:
    """Evaluation during training."""

    # steps between evaluations (preset)
    every: int = setting(100, 1, MAX_STEPS)
    # also evaluate before the first step
    initial: bool = True
    # windows of the validation split, spread evenly. None is all windows
    windows: int | None = setting(320, 1, 10**12)
    # a sample without a prompt; max_new_tokens=0 turns it off
    sample: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_new_tokens=100))
    # plot attention maps at each evaluation
    attention_maps: bool = False
    # log the variance of the attention scores and the entropy of the weights
    attention_stats: bool = False


@dataclass
class CheckpointConfig:
    """Saving of checkpoints."""

    # steps between saves of last.pt, which is also saved after the last step
    every: int = setting(200, 1, MAX_STEPS)
    # number of older last.pt to keep, as step-NNNNNN.pt
    keep: int = setting(0, 0, 10**6)


@dataclass
class SweepConfig:
    """Verdicts of a sweep (train.py -m) on its settings."""

    # relative difference of validation losses that counts as none
    difference: float = setting(0.005, 0, below=1)
    # with seed=auto: seeds of a setting without a verdict, at most
    max_seeds: int = setting(10, 2, 1000)


@dataclass
class WandbConfig:
    """Arguments of wandb.init."""

    # None: WANDB_MODE, or offline
    mode: str | None = setting(None, choices=("offline", "online", "disabled"))
    project: str | None = None  # None: WANDB_PROJECT, or trilgpt
    entity: str | None = None  # None: WANDB_ENTITY, or the account's default
    group: str | None = None  # None: WANDB_RUN_GROUP, or the sweep
    tags: list[str] | None = None  # None: WANDB_TAGS
    log_model: bool = False  # log best.pt as an artifact when the run has finished

    def rules(self, section: str) -> Iterator[Rule]:
        yield (
            "project",
            re.fullmatch(r"[^/\\#?%:]{1,128}", self.project or "trilgpt") is not None,
            r"must have 1 to 128 characters without / \ # ? % :",
        )
        has_valid_tags = all(1 <= len(tag) <= 64 for tag in self.tags or [])
        yield "tags", has_valid_tags, "must have 1 to 64 characters each; set shorter tags"

    def resolve(self, environment: Mapping[str, str]) -> "WandbConfig":
        """A copy with values of the environment in place of None. Raises UserError."""
        mode = self.mode or environment.get("WANDB_MODE") or "offline"
        config = replace(
            self,
            mode=mode.lower().replace("dryrun", "offline"),
            project=self.project or environment.get("WANDB_PROJECT") or "trilgpt",
            group=self.group or environment.get("WANDB_RUN_GROUP"),
            tags=self.tags or re.findall("[^,]+", environment.get("WANDB_TAGS", "")),
        )
        check(config, "wandb")
        return config


@dataclass
class RunConfig:
    """Config of train.py. RunConfig() is the default run.

    set_keys: the keys that words and YAML files have set, for choose_preset. It has no annotation,
    so it is no field, and no part of config.yaml.
    """

    set_keys = frozenset()

    # run folder in runs/; None: <time>-<data>-<model>-<attention>
    name: str | None = None
    # of the initial weights and the batches
    seed: int = setting(1337, 0, 2**32 - 1)
    device: str = setting("auto", choices=("auto", "cpu", "cuda", "mps"))
    # of matrix products; auto: bfloat16 if it is fast on the device (common/machine.py)
    dtype: str = setting("auto", choices=("auto", "float32", "bfloat16", "float16"))
    # torch.compile; None: on CUDA, if Triton is installed
    compile: bool | None = None
    # only deterministic algorithms, which can be slower
    deterministic: bool = False
    # CUDA computes float32 matrix products in TF32, which is faster and less precise
    tf32: bool = False
    # each process has all weights (ddp) or a part (fsdp)
    parallel: str = setting("ddp", choices=("ddp", "fsdp"))
    # print parameters, FLOPs, memory and time of the run, without training
    plan: bool = False
    # with plan: assumed speed; None: measured
    flops_per_second: float | None = setting(None, above=0)
    # with plan: number of processes; None: as started by torchrun
    world_size: int | None = setting(None, 1, 10**6)
    # resume runs/<name> if it exists; False: refuse to change an existing run
    resume: bool = True
    # values for the amount of text, and time (training/presets.py); None: the defaults
    preset: str | None = None
    model: GPTConfig = field(default_factory=GPTConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    data: DataConfig = field(default_factory=python_stdlib)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=MuonConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def rules(self, section: str) -> Iterator[Rule]:
        if self.name is not None:
            check_name(self.name)
        check_path_component("model.name", self.model.name)
        init_from = self.train.init_from or ""
        source = init_from.removeprefix("run:")
        if init_from and self.tokenizer.name in ("bpe", "char"):
            choice = "gpt2" if init_from in GPT2_MODELS else f"run tokenizer.run={source}"
            raise UserError(
                f"train.init_from={init_from} needs the tokenizer of these weights; "
                f"set tokenizer={choice}"
            )
        if "last" in (self.tokenizer.run, source):  # each job of a sweep would find another run
            raise UserError(
                "train.init_from=run:last and tokenizer.run=last can change; set the name of a run"
            )
        if not self.plan:
            for key in ("flops_per_second", "world_size"):
                yield key, getattr(self, key) is None, "needs plan=true"
