"""Presets for the amount of training text: configs/text_size/.

Other keys refer to the values of the preset, as in ${text_size.steps}.
To add a preset, write a YAML file with the keys of TextSize. text_size=auto then considers it, too.
"""

from dataclasses import dataclass
from math import log
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.errors import UserError
from data import DataConfig
from data.sources import estimate_text_bytes, resolve_sources

AUTO = "auto"


@dataclass
class TextSize:
    """A preset. text_bytes: the amount of text that it fits. The other values are those of keys with the same name."""

    name: str
    text_bytes: int
    vocab_size: int
    batch_size: int
    steps: int
    eval_every: int
    head_lr: float
    weight_decay: float
    ngram_weight_decay: float


def load_presets(folders: list[Path]) -> list[DictConfig]:
    """The presets in text_size/ of all folders. A file replaces that with the same name in an earlier folder.

    Raises UserError, with the name of the file, if a preset is invalid.
    """
    files = {file.stem: file for folder in folders for file in (folder / "text_size").glob("*.yaml")}
    presets = []
    for name, file in sorted(files.items()):
        if name == AUTO:
            continue
        try:
            preset = OmegaConf.merge(OmegaConf.structured(TextSize), OmegaConf.load(file))
            assert isinstance(preset, DictConfig)
            OmegaConf.to_container(preset, throw_on_missing=True)
        except OmegaConfBaseException as error:
            message = str(error).splitlines()[0]
            raise UserError(f"{file}: {message}; set the same keys as in configs/text_size/1MB.yaml") from None
        presets.append(preset)
    return presets


def choose_preset(presets: list[DictConfig], data: DataConfig) -> DictConfig:
    """The preset whose text_bytes are nearest to the size of the text, on a logarithmic scale.

    If the text is not on this machine, data.text_bytes is its size. If that is null, the text counts as very long.
    """
    try:
        data.check()
        size = estimate_text_bytes(resolve_sources(data))
    except UserError:  # config.check() reports it, after all errors of keys and types
        size = None
    if size is None:
        return max(presets, key=lambda preset: preset.text_bytes)
    return min(presets, key=lambda preset: abs(log(preset.text_bytes / max(1, size))))
