"""The configs of all scripts. Those of train.py, bench.py and prepare.py are in their packages.

Each line has a key, its type, default, limits and meaning. Nothing here imports torch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from attention_bench.config import BenchConfig
from common.errors import UserError
from common.settings import Rule, list_keys, setting
from data.config import DataConfig, PrepareConfig
from generation.config import CheckpointChoice, LoadConfig, SamplingConfig
from training.config import OPTIMIZER_CONFIGS, RunConfig


@dataclass
class SampleConfig(SamplingConfig, LoadConfig):
    """Config of sample.py."""

    # may contain \\n, \\r, \\t and \\\\; None: the sample begins a document
    prompt: str | None = None
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
        keys = ("prompt", "prompt_file", "prompts", "interactive")
        modes = [key for key in keys if getattr(self, key) not in (None, False)]
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

    # tasks of lm-eval or YAML files, separated by commas; None: the loss of documents
    tasks: str | None = None
    limit: int | None = setting(None, 1, 10**9)  # questions per task; None: all
    out: str | None = None  # FILE.jsonl for the results; None: only a table
    # the documents, if tasks is None
    data: DataConfig = field(default_factory=lambda: DataConfig(source="none"))

    def rules(self, section: str) -> Iterator[Rule]:
        yield (
            "limit",
            self.limit is None or self.tasks is not None,
            "needs tasks=NAME; set it, or remove limit",
        )
        yield (
            "tasks",
            self.tasks is not None or self.data.source != "none",
            "needs documents; set data.path, or tasks",
        )


@dataclass
class CompareConfig:
    """Config of compare.py."""

    # runs and sweeps; on the command line, without a key
    folders: list[str] = field(default_factory=list)
    # folder for the files; None: the folder of a single sweep, or runs/comparison
    out: str | None = None


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
    "prepare": PrepareConfig,
    "bench": BenchConfig,
    "compare": CompareConfig,
    "export": ExportConfig,
}


@cache
def key_types(script: str) -> dict[str, Any]:
    """The types of all keys of a script, with the keys of every optimizer."""
    types = dict(list_keys(SCRIPTS[script]))
    if "optimizer" in types:
        for optimizer_type in OPTIMIZER_CONFIGS.values():
            types |= dict(list_keys(optimizer_type, "optimizer."))
    return types


def key_type(script: str, key: str) -> Any:
    """The type of a key, or None if it does not exist. data.mix.NAME has the keys of data."""
    return key_types(script).get(re.sub(r"^data\.mix\.[^.]+", "data", key))
