"""Presets: values that depend on the amount of training text. They apply to keys that nothing else sets.

Recipes, YAML files and the command line override them. preset=auto selects the nearest size. 10MB applies to longer
texts, too, and has the defaults of the dataclasses.
"""

from math import log
from typing import Any

from omegaconf import DictConfig, OmegaConf

from common.errors import UserError
from common.settings import check, format_value
from data.sources import resolve_sources

SIZES = {
    "20kB": 2e4,
    "100kB": 1e5,
    "300kB": 3e5,
    "1MB": 1e6,
    "3MB": 3e6,
    "10MB": 1e7,
}  # bytes of training text
PRESETS = {
    "tokenizer.vocab_size": (288, 640, 768, 1024, 1536, 2048),
    "train.batch_size": (4, 8, 8, 16, 16, 16),
    "train.steps": (100, 140, 350, 800, 700, 1000),
    "eval.every": (20, 20, 50, 100, 100, 100),
    "muon.head_lr": (0.003, 0.003, 0.003, 0.005, 0.005, 0.005),
    "muon.weight_decay": (4.0, 3.0, 2.0, 1.0, 0.3, 0.1),
    "muon.ngram_weight_decay": (24.0, 24.0, 12.0, 5.0, 2.0, 0.7),
}


def add_preset_values(schema: DictConfig, prefix: str = "") -> None:
    """Let keys of a schema take their values from the preset that a run will select. prefix: part before the key."""
    for key in PRESETS:
        if (
            key.startswith(prefix)
            and OmegaConf.select(schema, key.removeprefix(prefix)) is not None
        ):
            OmegaConf.update(schema, key.removeprefix(prefix), f"${{preset:{key}}}")


def preset_value(key: str, *, _root_: Any) -> Any:
    """OmegaConf resolver of ${preset:key}. Finetuning has no weight decay, which would erase the initial weights."""
    if key.endswith("weight_decay") and OmegaConf.select(_root_, "train.init_from") is not None:
        return 0.0
    return PRESETS[key][list(SIZES).index(OmegaConf.select(_root_, "preset") or "10MB")]


def select_preset(config: DictConfig) -> str | None:
    """The preset of a composed config: the nearest size on a logarithmic scale; None if no key takes a value from it.

    A text that is not on this machine counts as long, unless data.text_bytes is set. Raises UserError.
    """
    if config.preset not in ("auto", *SIZES):
        raise UserError(
            f"preset={format_value(config.preset)} is unknown; set auto, {', '.join(SIZES)}"
        )
    is_used = "${preset:" in OmegaConf.to_yaml(config)
    if config.preset != "auto" or not is_used:
        return config.preset if is_used else None
    try:
        data: Any = OmegaConf.to_object(config.data)
        check(data, "data")
        sizes = [source.text_bytes or max(SIZES.values()) for source in resolve_sources(data)]
    except UserError:  # check() reports it later, after all errors of keys and types
        return "10MB"
    return min(SIZES, key=lambda name: abs(log(SIZES[name] / max(1, sum(sizes)))))


OmegaConf.register_new_resolver("preset", preset_value, replace=True)
