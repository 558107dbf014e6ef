"""Types and rules of the model and attention settings. The values are in configs/model/ and configs/attention/.

This module does not import torch, which takes seconds, so that invalid settings are reported immediately.
"""

from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from common.errors import check_positive, check_settings

NORMS = ("layernorm", "rmsnorm")
MLPS = ("gelu", "gelu_tanh", "relu2", "swiglu")
POSITIONS = ("learned", "rotary")
MIXER_NAMES = ("softmax", "linear")
# Settings that were added later, with the values of checkpoints that do not have them.
ADDED_SETTINGS = {"mixer": "softmax", "mlp_width": None, "attention_softcap": None, "logit_softcap": None}


@dataclass
class GPTConfig:
    """Architecture of the model. AttentionConfig selects the kernel that computes attention.

    n_kv_head: number of key/value heads; each is shared by n_head / n_kv_head query heads. None: n_head.
    dropout: probability of zeroing an element of the embeddings, the attention weights and the output of attention and
        MLP, as in GPT-2.
    bias: whether linear layers and LayerNorms have a bias.
    mixer: "softmax" or "linear" attention (model/attention/linear.py). A list repeats over the layers.
    mlp_width: channels between the linear layers of the MLP; None: 4 n_embd, or with swiglu 8/3 n_embd, rounded up to a
        multiple of 32, which are as many parameters.
    window: number of keys that a query attends to, including its own; None: all. A list repeats over the layers.
    attention_softcap, logit_softcap: bound of the attention scores and of the logits, as in Gemma 2; None: no bound.
    pad_vocab_multiple: the rows of token embedding and head are rounded up to a multiple of this, for speed on GPUs.
    max_ngram: longest n-gram that has an embedding; 1: single tokens only.
    ngram_table_size: number of rows of the table that n-grams of two or more tokens are hashed into.

    Raises UserError for settings that are invalid or do not fit together.
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
    mlp_width: int | None
    position: str
    mixer: Any  # str, or a list of them
    window: Any  # int, None, or a list of them
    qk_norm: bool
    attention_softcap: float | None
    logit_softcap: float | None
    tie_embeddings: bool
    pad_vocab_multiple: int
    max_ngram: int
    ngram_table_size: int

    def __post_init__(self):
        check_positive("model", self, n_layer=10**4, n_head=10**4, n_embd=10**6, mlp_width=10**7, block_size=10**8,
                       attention_softcap=10**6, logit_softcap=10**6, pad_vocab_multiple=10**6, max_ngram=100,
                       ngram_table_size=10**10)  # fmt: skip
        choices = {"norm": NORMS, "mlp": MLPS, "position": POSITIONS}
        check_settings("model", self, [
            (key, getattr(self, key) in allowed, f"is unknown; set one of {', '.join(allowed)}")
            for key, allowed in choices.items()
        ])  # fmt: skip

        divisors = ", ".join(str(G) for G in range(1, self.n_head + 1) if self.n_head % G == 0)
        n_embd = max(1, round(self.n_embd / self.n_head / 2)) * 2 * self.n_head  # rotary needs an even head_dim
        half = max(1, self.block_size // 2)
        windows, mixers = self.window_pattern, self.mixer_pattern
        check_settings("model", self, [
            ("dropout", 0 <= self.dropout < 1, "must be a probability below 1; set 0.1, or 0 for no dropout"),
            ("n_embd", self.n_embd % self.n_head == 0,
             f"must be a multiple of model.n_head={self.n_head}; set model.n_embd={n_embd}, for example"),
            ("n_kv_head", self.kv_heads >= 1 and self.n_head % self.kv_heads == 0,
             f"must divide model.n_head={self.n_head}; set one of {divisors}, or null"),
            ("window", len(windows) > 0 and all(w is None or (type(w) is int and w > 0) for w in windows),
             f"must be a number of tokens, null, or a list of these; set {half}, for example, or [{half},null]"),
            ("mixer", len(mixers) > 0 and all(mixer in MIXER_NAMES for mixer in mixers),
             f"is unknown; set one of {', '.join(MIXER_NAMES)}, or a list of these"),
            ("attention_softcap", self.attention_softcap is None or "softmax" in mixers,
             "has no effect without softmax attention; set null, or model.mixer=softmax"),
            *((key, len(pattern) <= self.n_layer,
               f"lists {len(pattern)} layers, but model.n_layer={self.n_layer}; shorten the list or add layers")
              for key, pattern in (("window", windows), ("mixer", mixers))),
            ("position", self.position == "learned" or self.head_dim % 2 == 0,
             f"needs an even number of channels per head (model.n_embd / model.n_head), not {self.head_dim}; "
             f"set model.n_embd={2 * self.n_embd}, or model.position=learned"),
        ])  # fmt: skip

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
        return tuple(None if window is None or window >= self.block_size else window for window in repeated)

    @property
    def mixer_pattern(self) -> list[str]:
        return self.mixer if isinstance(self.mixer, list) else [self.mixer]

    @property
    def mixers(self) -> tuple[str, ...]:
        """Mixer of each layer."""
        return tuple(islice(cycle(self.mixer_pattern), self.n_layer))

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def mlp_channels(self) -> int:
        """Channels between the linear layers of the MLP."""
        if self.mlp_width is not None:
            return self.mlp_width
        return -(-8 * self.n_embd // 96) * 32 if self.mlp == "swiglu" else 4 * self.n_embd

    @classmethod
    def from_checkpoint(cls, saved: dict[str, Any]) -> "GPTConfig":
        return cls(**ADDED_SETTINGS | saved)


@dataclass
class AttentionConfig:
    """Implementation of attention; all implementations give the same results up to rounding.

    backend: name of a function registered in model/attention/backends.py.
    kernels: PyTorch kernels that attention=sdpa may use, in order of preference; None: all.
    impl: package that replaces PyTorch's FlashAttention kernel, FA3 or FA4; None: PyTorch's own kernel.
    """

    backend: str
    kernels: list[str] | None
    impl: str | None
