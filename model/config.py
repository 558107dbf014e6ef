"""Config of the model and of attention. It does not import torch, which takes more than a second.

To add an activation or a norm, add its name to the choices here, and its function in model/gpt.py.
"""

import math
from dataclasses import dataclass, fields
from itertools import cycle, islice
from typing import Any

from common.errors import UserError
from common.settings import Rule, check, setting

ATTENTION_TYPES = ("softmax", "linear")
MLPS = ("gelu", "gelu_tanh", "relu2", "swiglu")
GATED_MLPS = ("swiglu",)  # these multiply one half of their input by a function of the other half
# Values for models that were saved before a key existed, where its default would change them.
OLDER_MODELS = {"key_offset": False}


@dataclass
class GPTConfig:
    """Architecture of the model. AttentionConfig selects the kernel that computes attention.

    Raises UserError for values that are out of range or do not fit together.
    """

    name: str = "modern"
    n_layer: int = setting(2, 1, 10**4)
    # query heads
    n_head: int = setting(2, 1, 10**4)
    # key/value heads, each shared by several query heads; None: n_head
    n_kv_head: int | None = setting(None, 1, 10**4)
    # channels
    n_embd: int = setting(128, 1, 10**6)
    # context length in tokens
    block_size: int = setting(128, 1, 10**8)
    # of the embeddings, the attention weights, and the outputs of attention and MLP
    dropout: float = setting(0.0, 0, below=1)
    # in linear layers and LayerNorms
    bias: bool = False
    norm: str = setting("rmsnorm", choices=("layernorm", "rmsnorm"))
    mlp: str = setting("relu2", choices=MLPS)
    # channels of the MLP; None: 4 n_embd, or 8/3 n_embd if gated
    mlp_width: int | None = setting(None, 1, 10**7)
    position: str = setting("rotary", choices=("learned", "rotary"))
    # a name, or a list of names, which repeats over the layers
    attention_type: list[str] | str = setting("softmax", choices=ATTENTION_TYPES)
    # number of keys per query, including its own. None is all keys. A list repeats over the layers
    window: int | list[int | None] | None = setting(None, 1, 10**9)
    # normalize queries and keys
    qk_norm: bool = True
    # take the last half of each key's channels from the previous token, before they are rotated
    key_offset: bool = True
    # fraction of the channels that rotary positions rotate; None: 1, or 0.5 with a key offset
    rotary_fraction: float | None = setting(None, above=0, high=1)
    # bound of the attention scores (Gemma 2: 50)
    attention_softcap: float | None = setting(None, above=0, high=1e6)
    # bound of the logits (Gemma 2: 30)
    logit_softcap: float | None = setting(None, above=0, high=1e6)
    # the head uses the weights of the token embedding
    tie_embeddings: bool = False
    # rounds up the number of rows of the embedding and the head; 64 is faster on GPUs
    pad_vocab_multiple: int = setting(1, 1, 10**6)
    # longest n-gram that has an embedding; 1: single tokens only
    max_ngram: int = setting(3, 1, 100)
    # rows that n-grams of two or more tokens are hashed into
    ngram_table_size: int = setting(32768, 1, 10**10)

    def __post_init__(self):
        check(self, "model")

    @classmethod
    def from_saved(cls, values: dict[str, Any]) -> "GPTConfig":
        """The config of a saved model. A missing key has its value in OLDER_MODELS, or its default.

        Raises UserError for unknown keys.
        """
        unknown = values.keys() - {entry.name for entry in fields(cls)}
        if unknown:
            raise UserError(
                f"the model has {', '.join(sorted(unknown))}; "
                "use the version of the code that trained it"
            )
        return cls(**(OLDER_MODELS | values))

    def rules(self, section: str) -> list[Rule]:
        """Rules between settings: (key, whether its value is valid, what to set instead)."""
        windows = _as_list(self.window)
        types = _as_list(self.attention_type)
        return [
            (
                "n_embd",
                self.n_embd % self.n_head == 0,
                f"must be a multiple of model.n_head={self.n_head}",
            ),
            (
                "n_kv_head",
                self.n_head % self.kv_heads == 0,
                f"must divide model.n_head={self.n_head}; set null for one per query head",
            ),
            (
                "window",
                all(window is None or type(window) is int for window in windows),
                "must be a number of tokens, null, or a list of these; set [64,null]",
            ),
            (
                "window",
                1 <= len(windows) <= self.n_layer,
                f"must list 1 to {self.n_layer} layers (model.n_layer)",
            ),
            (
                "attention_type",
                1 <= len(types) <= self.n_layer and None not in types,
                f"must list 1 to {self.n_layer} layers of {', '.join(ATTENTION_TYPES)}",
            ),
            (
                "attention_softcap",
                self.attention_softcap is None or "softmax" in self.attention_types,
                "has no effect without softmax attention; "
                "set null, or model.attention_type=softmax",
            ),
            (
                "position",
                self.position == "learned" or self.head_dim % 2 == 0,
                "needs an even number of channels per head (model.n_embd / model.n_head), "
                f"not {self.head_dim}; "
                f"set model.n_embd={2 * self.n_embd}, or model.position=learned",
            ),
            (
                "rotary_fraction",
                self.rotary_fraction is None or self.position == "rotary",
                f"has no effect with model.position={self.position}; "
                "set null, or model.position=rotary",
            ),
        ]

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each layer; None if the layer attends to all keys."""
        windows = islice(cycle(_as_list(self.window)), self.n_layer)
        return tuple(
            None if window is None or window >= self.block_size else window for window in windows
        )

    @property
    def attention_types(self) -> tuple[str, ...]:
        """Attention type of each layer."""
        return tuple(islice(cycle(_as_list(self.attention_type)), self.n_layer))

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def rotary_channels(self) -> int:
        """The first channels of each query and key, which rotary positions rotate.

        Their number is rounded up to an even one.
        """
        fraction = self.rotary_fraction
        if fraction is None:
            fraction = 0.5 if self.key_offset else 1.0
        return 2 * math.ceil(fraction * self.head_dim / 2)

    @property
    def shifted_channels(self) -> int:
        """The last channels of each key, which a key offset takes from the previous token.

        These are half of the channels, rounded down to an even number.
        """
        return 2 * (self.head_dim // 4)

    @property
    def mlp_channels(self) -> int:
        """Channels between the linear layers of the MLP.

        The default of a gated MLP is 8/3 n_embd, rounded up to a multiple of 32.
        """
        if self.mlp_width is not None:
            return self.mlp_width
        if self.mlp in GATED_MLPS:
            return math.ceil(8 * self.n_embd / 3 / 32) * 32
        return 4 * self.n_embd


def _as_list(value: Any) -> list:
    """A list of values, which repeats over the layers. A single value becomes a list of one."""
    return value if isinstance(value, list) else [value]


@dataclass
class AttentionConfig:
    """Implementation of attention. All implementations give the same results up to rounding."""

    # function in model/attention/backends.py; auto: the fastest (choose_backend in support.py)
    backend: str = "auto"
    # PyTorch kernels that sdpa may use, in order of preference; None allows all
    kernels: list[str] | None = None
    # FA3 or FA4 replace PyTorch's FlashAttention kernel; None: PyTorch's own
    flash_package: str | None = None
