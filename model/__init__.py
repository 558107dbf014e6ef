"""The GPT model: architecture, attention backends, loss and FLOPs. Needs torch only."""

from model.config import AttentionConfig, GPTConfig
