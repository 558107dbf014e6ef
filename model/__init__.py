"""The decoder: attention, the blocks around it, generation, and what it all costs."""

from model.config import AttentionConfig, GPTConfig, SamplingConfig

__all__ = ["AttentionConfig", "GPTConfig", "SamplingConfig"]
