"""Presets: values for the amount of training text. They apply to keys that nothing else sets.

Recipes, YAML files and the command line override them. preset=auto selects the nearest size.
10MB applies to longer texts, too, and has the defaults of the dataclasses.
"""

from math import log
from typing import Any

from omegaconf import DictConfig, OmegaConf

from common.errors import UserError
from common.settings import format_value
from data.sources import Source

# The presets, and the bytes of training text that each is for.
SIZES = {"20kB": 2e4, "100kB": 1e5, "300kB": 3e5, "1MB": 1e6, "3MB": 3e6, "10MB": 1e7}
# The values of each key, in the order of SIZES. muon.KEY is optimizer.KEY with optimizer=muon.
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
    """Let keys of a schema take their values from the preset that a run will select.

    prefix: "muon." for the schema of this optimizer.
    """
    for preset_key in PRESETS:
        key = preset_key.removeprefix(prefix)
        if preset_key.startswith(prefix) and OmegaConf.select(schema, key) is not None:
            OmegaConf.update(schema, key, f"${{preset:{preset_key}}}")


def preset_value(key: str, *, _root_: Any) -> Any:
    """The value of ${preset:key}, an interpolation of OmegaConf. _root_: the complete config."""
    # The initial weights of finetuning have been learned. Weight decay would erase them.
    if key.endswith("weight_decay") and OmegaConf.select(_root_, "train.init_from") is not None:
        return 0.0
    preset = OmegaConf.select(_root_, "preset") or "10MB"
    return PRESETS[key][list(SIZES).index(preset)]


OmegaConf.register_new_resolver("preset", preset_value, replace=True)


def select_preset(config: DictConfig, sources: list[Source]) -> str | None:
    """The preset of a composed config; None if no key takes a value from it.

    preset=auto is the nearest size on a logarithmic scale. A text that is not on this machine
    counts as long, unless data.text_bytes is set. Raises UserError for an unknown preset.
    """
    if config.preset not in ("auto", *SIZES):
        choices = ", ".join(SIZES)
        raise UserError(f"preset={format_value(config.preset)} is unknown; set auto, {choices}")
    if "${preset:" not in OmegaConf.to_yaml(config):
        return None
    if config.preset != "auto":
        return config.preset
    text_bytes = sum(source.text_bytes or max(SIZES.values()) for source in sources)
    return min(SIZES, key=lambda name: abs(log(SIZES[name] / max(1, text_bytes))))
