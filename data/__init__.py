"""Text to tokens to batches."""

from data.config import DataConfig, TokenizerConfig

__all__ = ["DataConfig", "TokenizerConfig"]
