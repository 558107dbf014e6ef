"""The configs of all scripts. Those of train.py and bench.py are in their packages.

Each line has a key, its type, default, limits and meaning. Nothing here imports torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from attention_bench.config import BenchConfig
from common.errors import UserError
from common.settings import Rule, setting
from data.config import DataConfig
from generation.config import CheckpointChoice, LoadConfig, SamplingConfig
from training.config import RunConfig


@dataclass
class SampleConfig(SamplingConfig, LoadConfig):
    """Config of sample.py."""

    # may contain \\n, \\r, \\t and \\\\; empty: the sample begins a document
    prompt: str = ""
    prompt_file: str | None = None  # file whose exact text is the prompt
    prompts: str | None = None  # file with one prompt per line, or .jsonl with {"prompt": ...}
    out: str | None = None  # FILE.jsonl for the samples of prompts; None: stdout
    interactive: bool = False  # continue the lines that are typed
    num_samples: int = setting(1, 1, 10**6)  # per prompt
    # seed of the first sample; the next sample has seed + 1, and so on
    seed: int = setting(1337, 0, 2**32 - 1)
    # plot the attention weights for the prompt
    attention_map: bool = False

    def rules(self, section: str) -> Iterator[Rule]:
        yield from super().rules(section)
        modes = [
            key for key in ("prompt", "prompt_file", "prompts", "interactive") if getattr(self, key)
        ]
        if len(modes) > 1:
            raise UserError(f"{' and '.join(modes)} exclude each other; set one of them")
        yield (
            "num_samples",
            self.num_samples == 1 or not self.interactive,
            "needs interactive=false; set one of them",
        )
        yield (
            "max_new_tokens",
            self.max_new_tokens > 0 or self.attention_map,
            "generates nothing; set a larger number",
        )
        yield (
            "out",
            self.out is None or self.prompts is not None,
            "needs prompts=FILE; set it, or remove out",
        )
        yield (
            "attention_map",
            not self.attention_map or (self.prompts is None and not self.interactive),
            "needs one prompt; remove prompts and interactive",
        )


@dataclass
class EvalScriptConfig(LoadConfig):
    """Config of eval.py."""

    out: str | None = None  # FILE.jsonl for the results; None: only a table
    # the documents
    data: DataConfig = field(default_factory=lambda: DataConfig(source="none"))

    def rules(self, section: str) -> Iterator[Rule]:
        yield (
            "data.path",
            self.data.source != "none",
            "has no documents; set a file, a folder or a pattern",
        )
        yield (
            "data.val_path",
            self.data.val_path is None,
            "is not scored; set it as data.path",
        )


@dataclass
class CompareConfig:
    """Config of compare.py."""

    # runs and sweeps; on the command line, without a key
    folders: list[str] = field(default_factory=list)
    # folder for the files; None: the folder of a single sweep, or runs/comparison
    out: str | None = None
    # relative difference of validation losses that counts as none; None: as in the first run
    difference: float | None = setting(None, 0, below=1)


@dataclass
class ExportConfig(CheckpointChoice):
    """Config of export.py."""

    out: str | None = None  # the folder to write; None: huggingface in the folder of the run
    # of the weights
    dtype: str = setting("float32", choices=("float32", "bfloat16", "float16"))


SCRIPTS = {
    "train": RunConfig,
    "sample": SampleConfig,
    "eval": EvalScriptConfig,
    "prepare": RunConfig,  # the same words as for train.py
    "bench": BenchConfig,
    "compare": CompareConfig,
    "export": ExportConfig,
}


# Our keys and settings, and the keys of other programs for which they are suggested: of nanoGPT,
# transformers and litgpt.
SYNONYMS = {
    "name": "out_dir output_dir run_name wandb_run_name",
    "run": "name ckpt out_dir",
    "out": "out_dir output_dir",
    "checkpoint": "ckpt",
    "device=cuda": "gpu",
    "dtype": "precision",
    "dtype=float16": "fp16",
    "dtype=bfloat16": "bf16",
    "attention=flash": "flash flash_attn",
    "optimizer.lr": "learning_rate",
    "optimizer.betas": "beta1 beta2",
    "schedule.warmup_steps": "warmup_iters",
    "schedule.final_fraction": "min_lr",
    "train.steps": "max_iter max_iters lr_decay_iters",
    "train.epochs": "num_train_epochs",
    "train.batch_size": "batch",
    "train.micro_batch_size": "batch gradient_accumulation_steps grad_accum accumulate "
    "per_device_train_batch_size",
    "eval.every": "eval_interval log_interval",
    "eval.windows": "eval_iters",
    "checkpoint.every": "save_every save_interval save_steps",
    "wandb.mode": "wandb_log",
    "model.n_head": "num_attention_heads num_heads",
    "model.n_embd": "hidden_size d_model width dim",
    "model.n_layer": "num_hidden_layers depth",
    "model.block_size": "seq_len seq_length context_length context max_seq_length n_ctx ctx",
    "model.window": "window_size",
    "block_sizes": "block_size",
    "backends": "attention",
    "prompt": "start",
    "num_samples": "n",
    "temperature": "temp",
    "eval.sample.temperature": "temp",
    "max_new_tokens": "length num_tokens max_tokens",
}
