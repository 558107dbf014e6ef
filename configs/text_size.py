"""text_size=auto: choose the preset in configs/text_size/ that fits the amount of training text."""

from math import log

from omegaconf import DictConfig

from common.errors import UserError
from data import DataConfig
from data.sources import estimate_text_bytes, resolve_sources

AUTO = "auto"


def choose_preset(presets: list[DictConfig], data: DataConfig) -> DictConfig:
    """The preset whose text_bytes are nearest to the size of the training text, on a logarithmic scale.

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
