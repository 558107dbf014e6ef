"""What a decoder may be. Types and rules only: the values live in configs/model/ and configs/attention/.

Nothing here imports torch, so that a config is checked before the seconds that torch takes to import.
"""

from dataclasses import dataclass
from typing import Any

from common.errors import UserError

NORMS = ("layernorm", "rmsnorm")
MLPS = ("gelu", "gelu_tanh", "relu2")
POSITIONS = ("learned", "rotary")


@dataclass
class GPTConfig:
    """The mathematics of the model; which kernel computes it is AttentionConfig's.

    n_kv_head: key/value heads, each shared by n_head / n_kv_head query heads; None: as many as n_head.
    dropout: probability, on the embeddings, the attention weights and both residual branches, as in GPT-2.
    bias: whether linear layers and LayerNorms have one.
    window: how many keys a query sees, itself included; None: all. A list is a pattern that the layers repeat.
    pad_vocab_multiple: the vocabulary tables are padded to a multiple of this, which is faster on GPUs.
    max_ngram: the longest run of tokens, the newest included, that has an embedding of its own; 1: tokens alone.
    ngram_table_size: rows of the table into which those longer than one token are hashed.
    """

    name: str
    n_layer: int
    n_head: int
    n_kv_head: int | None
    n_embd: int
    block_size: int
    dropout: float
    bias: bool
    norm: str
    mlp: str
    position: str
    window: Any  # int, None, or a list of them
    qk_norm: bool
    tie_embeddings: bool
    pad_vocab_multiple: int
    max_ngram: int
    ngram_table_size: int

    def __post_init__(self):
        for key in ("n_layer", "n_head", "n_embd", "block_size", "pad_vocab_multiple", "max_ngram", "ngram_table_size"):
            if getattr(self, key) < 1:
                raise UserError(f"model.{key}={getattr(self, key)} must be at least 1")
        if self.n_embd % self.n_head:
            below, above = (self.n_embd // self.n_head) * self.n_head, (self.n_embd // self.n_head + 1) * self.n_head
            fits = f"{below} or {above}" if below else above
            raise UserError(
                f"model.n_embd={self.n_embd} does not divide into model.n_head={self.n_head} heads; "
                f"set model.n_embd={fits}, or another number of heads"
            )
        if self.kv_heads < 1 or self.n_head % self.kv_heads:
            raise UserError(
                f"model.n_kv_head={self.n_kv_head} does not divide model.n_head={self.n_head}; "
                f"set one of {', '.join(str(g) for g in range(1, self.n_head + 1) if self.n_head % g == 0)}, or null"
            )
        pattern = self.window if isinstance(self.window, list) else [self.window]
        if not 0 < len(pattern) <= self.n_layer or not all(w is None or (type(w) is int and w > 0) for w in pattern):
            raise UserError(
                f"model.window={self.window} takes a number of tokens from 1, null, or a list of them, at most one "
                f"per layer (model.n_layer={self.n_layer}); set, say, {max(1, self.block_size // 2)}, or "
                f"[{max(1, self.block_size // 2)},null]"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"model.dropout={self.dropout} is a probability; set it from 0 to below 1")
        for key, choices in (("norm", NORMS), ("mlp", MLPS), ("position", POSITIONS)):
            if getattr(self, key) not in choices:
                raise UserError(f"model.{key}={getattr(self, key)} is unknown; set one of {', '.join(choices)}")
        if self.position == "rotary" and self.head_dim % 2:
            raise UserError(
                f"model.position=rotary turns pairs of channels, and a head has {self.head_dim} "
                f"(model.n_embd / model.n_head); set model.n_embd={2 * self.n_embd}, or model.position=learned"
            )

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer, None where it hides nothing."""
        pattern = self.window if isinstance(self.window, list) else [self.window]
        repeated = [pattern[layer % len(pattern)] for layer in range(self.n_layer)]
        return tuple(None if w is None or w >= self.block_size else w for w in repeated)

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


@dataclass
class AttentionConfig:
    """How attention is computed, never what.

    backend: the name of a function in model/attention/. kernels: those that PyTorch may choose from, in order; None:
    all. impl: another implementation of its flash kernel; None: its own.
    """

    backend: str
    kernels: list[str] | None
    impl: str | None
