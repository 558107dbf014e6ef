"""The config of each script: dataclasses assembled from those of the packages, and rules that span packages.

The dataclasses have types and no values: each value is in one YAML file of this folder. Nothing here imports torch.
"""

import re
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from common.errors import UserError, check_positive, check_seed, check_settings
from common.run_dir import check_path_component
from compare.bench.config import BenchConfig
from data import DataConfig, TokenizerConfig
from model import AttentionConfig, SamplingConfig
from training.config import AdamWConfig, MuonConfig, RunConfig

CHECKPOINT_NAME, UNKNOWN_CHECKPOINT = re.compile(r"best|last|step-\d+"), "is unknown; set best, last or step-NNNNNN"


@dataclass
class SampleConfig(SamplingConfig):
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
    attention: AttentionConfig
    attention_map: bool

    def check(self, section: str = "") -> None:
        """Check the rules that span packages. Raises UserError."""
        super().check(section)
        check_seed(self.seed)
        check_positive("", self, num_samples=10**6, batch_size=10**6)
        modes = ["prompt", "prompt_file", "prompts", "interactive"]
        modes = [key for key in modes if getattr(self, key) not in (None, False)]
        if len(modes) > 1:
            raise UserError(f"{' and '.join(modes)} exclude each other; set one of them")
        mode = modes[0] if modes else None
        has_one_prompt = mode in (None, "prompt", "prompt_file")
        rules = [
            ("checkpoint", CHECKPOINT_NAME.fullmatch(self.checkpoint), UNKNOWN_CHECKPOINT),
            ("out", self.out is None or mode == "prompts", "needs prompts=FILE; set it, or remove out"),
            (
                "num_samples",
                self.num_samples == 1 or mode != "interactive",
                "has no effect with interactive",
            ),
            ("max_new_tokens", self.max_new_tokens > 0 or self.attention_map, "generates nothing; set 1 or more"),
            ("attention_map", has_one_prompt or not self.attention_map, f"needs one prompt; remove {mode}"),
        ]
        check_settings("", self, rules)


@dataclass
class EvalConfig:
    """Config of eval.py."""

    run: str
    checkpoint: str
    tasks: str | None
    limit: int | None
    out: str | None
    batch_size: int
    device: str
    dtype: str
    attention: AttentionConfig
    data: DataConfig

    def check(self) -> None:
        """Check the rules that span packages. Raises UserError."""
        self.data.check()
        check_positive("", self, limit=10**9, batch_size=10**6)
        rules = [
            ("checkpoint", CHECKPOINT_NAME.fullmatch(self.checkpoint), UNKNOWN_CHECKPOINT),
            ("limit", self.limit is None or self.tasks is not None, "needs tasks=NAME; set it, or remove limit"),
        ]
        check_settings("", self, rules)


@dataclass
class PrepareConfig:
    """Config of prepare.py."""

    text_size: Any  # name of a preset; None: no value is from a preset
    data: DataConfig
    tokenizer: TokenizerConfig
    inspect: bool
    verify: bool

    def check(self) -> None:
        """Check the rules that span packages. Raises UserError."""
        check_path_component("data.name", self.data.name)
        self.data.check()


@dataclass
class CompareConfig:
    """Config of compare.py."""

    folders: list[str]
    out: str | None
    difference: float | None

    def check(self) -> None:
        """Raises UserError for invalid settings."""
        check_positive("", self, "difference")
        rules = [
            ("folders", len(self.folders) > 0, "leaves nothing to compare; name runs or sweeps, as in runs/a runs/b"),
            ("out", self.out != "", "is empty; set a folder"),
        ]
        check_settings("", self, rules)


@dataclass
class ExportConfig:
    """Config of export.py."""

    run: str
    checkpoint: str
    out: str | None
    dtype: str

    def check(self) -> None:
        """Raises UserError for invalid settings."""
        rules = [
            ("checkpoint", CHECKPOINT_NAME.fullmatch(self.checkpoint), UNKNOWN_CHECKPOINT),
            ("out", self.out != "", "is empty; set a folder"),
            (
                "dtype",
                self.dtype in ("float32", "bfloat16", "float16"),
                "is unknown; set float32, bfloat16 or float16",
            ),
        ]
        check_settings("", self, rules)


SCRIPTS = {
    "train": RunConfig,
    "sample": SampleConfig,
    "eval": EvalConfig,
    "prepare": PrepareConfig,
    "bench": BenchConfig,
    "compare": CompareConfig,
    "export": ExportConfig,
}
OPTIMIZERS = {"adamw": AdamWConfig, "muon": MuonConfig}


def list_keys(script: str) -> dict[str, Any]:
    """The types of all keys of a script, with the keys of every optimizer."""
    types = list_types(SCRIPTS[script])
    if "optimizer" in types:
        types |= {key: type_ for kind in OPTIMIZERS.values() for key, type_ in list_types(kind, "optimizer.").items()}
    return types


def list_types(kind: type, prefix: str = "") -> dict[str, Any]:
    """The types of all keys of a dataclass and its sections: {"model": GPTConfig, "model.n_layer": int, ...}."""
    types = {}
    for field in fields(kind):
        types[prefix + field.name] = field.type
        if is_dataclass(field.type):
            types |= list_types(field.type, f"{prefix}{field.name}.")
    return types
