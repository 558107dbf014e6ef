"""Config of the model and of attention. This module does not import torch, which takes more than a second.

To add an activation or a norm, add its name to the choices here, and its function in model/gpt.py.
"""

from dataclasses import dataclass, fields
from itertools import cycle, islice
from typing import Any

from common.errors import UserError
from common.settings import Rule, check, setting

ATTENTION_TYPES = ("softmax", "linear")
MLPS = ("gelu", "gelu_tanh", "relu2", "swiglu")
GATED_MLPS = ("swiglu",)  # these multiply one half of their input by a function of the other half


@dataclass
class GPTConfig:
    """Architecture of the model. AttentionConfig selects the kernel that computes attention.

    Raises UserError for values that are out of range or do not fit together.
    """

    name: str = "modern"
    n_layer: int = setting(2, 1, 10**4)
    n_head: int = setting(2, 1, 10**4)  # query heads
    n_kv_head: int | None = setting(
        None, 1, 10**4
    )  # key/value heads, each shared by several query heads; None: n_head
    n_embd: int = setting(128, 1, 10**6)  # channels
    block_size: int = setting(128, 1, 10**8)  # context length in tokens
    dropout: float = setting(
        0.0, 0, below=1
    )  # of the embeddings, the attention weights, and attention and MLP outputs
    bias: bool = False  # in linear layers and LayerNorms
    norm: str = setting("rmsnorm", choices=("layernorm", "rmsnorm"))
    mlp: str = setting("relu2", choices=MLPS)
    mlp_width: int | None = setting(
        None, 1, 10**7
    )  # channels of the MLP; None: 4 n_embd, or 8/3 n_embd if gated
    position: str = setting("rotary", choices=("learned", "rotary"))
    attention_type: Any = setting(
        "softmax", choices=ATTENTION_TYPES
    )  # a list repeats over the layers
    window: Any = setting(
        None, 1, 10**9
    )  # keys per query with its own; None: all; a list repeats over the layers
    qk_norm: bool = True  # normalize queries and keys
    attention_softcap: float | None = setting(
        None, above=0, high=1e6
    )  # bound of the attention scores (Gemma 2: 50)
    logit_softcap: float | None = setting(
        None, above=0, high=1e6
    )  # bound of the logits (Gemma 2: 30)
    tie_embeddings: bool = False  # the head uses the weights of the token embedding
    pad_vocab_multiple: int = setting(
        1, 1, 10**6
    )  # round the rows of embedding and head up; 64 is faster on GPUs
    max_ngram: int = setting(
        3, 1, 100
    )  # longest n-gram that has an embedding; 1: single tokens only
    ngram_table_size: int = setting(
        32768, 1, 10**10
    )  # rows that n-grams of two or more tokens are hashed into

    def __post_init__(self):
        check(self, "model")

    @classmethod
    def from_saved(cls, values: dict[str, Any]) -> "GPTConfig":
        """The config of a saved model. Keys that a newer version has added have their defaults. Raises UserError."""
        if unknown := values.keys() - {entry.name for entry in fields(cls)}:
            raise UserError(
                f"the model has {', '.join(sorted(unknown))}; use the version of the code that trained it"
            )
        return cls(**values)

    def rules(self, section: str) -> list[Rule]:
        divisors = ", ".join(str(G) for G in range(1, self.n_head + 1) if self.n_head % G == 0)
        n_embd = (
            max(1, round(self.n_embd / self.n_head / 2)) * 2 * self.n_head
        )  # rotary needs an even head_dim
        is_window = [w is None or type(w) is int for w in self.window_pattern]
        n_attention, n_window = len(self.attention_type_pattern), len(self.window_pattern)
        has_types = 0 < n_attention <= self.n_layer and all(self.attention_type_pattern)
        return [
            ("n_embd", self.n_embd % self.n_head == 0,
             f"must be a multiple of model.n_head={self.n_head}; set model.n_embd={n_embd}, for example"),
            ("n_kv_head", self.n_head % self.kv_heads == 0,
             f"must divide model.n_head={self.n_head}; set one of {divisors}, or null"),
            ("window", all(is_window), "must be a number of tokens, null, or a list of these; set [64,null]"),
            ("window", 0 < n_window <= self.n_layer, f"must list 1 to {self.n_layer} layers (model.n_layer)"),
            ("attention_type", has_types, f"must list 1 to {self.n_layer} layers of {', '.join(ATTENTION_TYPES)}"),
            ("attention_softcap", self.attention_softcap is None or "softmax" in self.attention_types,
             "has no effect without softmax attention; set null, or model.attention_type=softmax"),
            ("position", self.position == "learned" or self.head_dim % 2 == 0,
             f"needs an even number of channels per head (model.n_embd / model.n_head), not {self.head_dim}; "
             f"set model.n_embd={2 * self.n_embd}, or model.position=learned"),
        ]  # fmt: skip

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def window_pattern(self) -> list[int | None]:
        return self.window if isinstance(self.window, list) else [self.window]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each layer; None if the layer attends to all keys."""
        repeated = islice(cycle(self.window_pattern), self.n_layer)
        return tuple(
            None if window is None or window >= self.block_size else window for window in repeated
        )

    @property
    def attention_type_pattern(self) -> list[str]:
        return (
            self.attention_type if isinstance(self.attention_type, list) else [self.attention_type]
        )

    @property
    def attention_types(self) -> tuple[str, ...]:
        """Attention type of each layer."""
        return tuple(islice(cycle(self.attention_type_pattern), self.n_layer))

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def mlp_channels(self) -> int:
        """Channels between the linear layers of the MLP. If gated, 8/3 n_embd is rounded up to a multiple of 32."""
        if self.mlp_width is not None:
            return self.mlp_width
        return -(-8 * self.n_embd // 96) * 32 if self.mlp in GATED_MLPS else 4 * self.n_embd


@dataclass
class AttentionConfig:
    """Implementation of attention. All implementations give the same results up to rounding."""

    backend: str = "sdpa"  # function in model/attention/backends.py
    kernels: list[str] | None = (
        None  # PyTorch kernels that sdpa may use, in order of preference; None: all
    )
    flash_package: str | None = (
        None  # FA3 or FA4 replace PyTorch's FlashAttention kernel; None: PyTorch's own
    )
