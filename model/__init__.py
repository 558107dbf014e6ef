"""The GPT model: architecture, attention backends, loss, FLOPs and generation."""

from model.config import AttentionConfig, GPTConfig
from model.generation.config import SamplingConfig
