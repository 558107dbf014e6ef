"""The decoder: attention, the blocks around it, generation, and what it all costs."""

from model.config import AttentionConfig, GPTConfig
from model.generation.config import SamplingConfig

__all__ = ["AttentionConfig", "GPTConfig", "SamplingConfig"]
