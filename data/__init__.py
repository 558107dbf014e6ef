"""Data: prepare.py converts text to token files, loader.py reads batches from them."""

from data.config import DataConfig, TokenizerConfig, python_stdlib
