"""The GPT model: a decoder-only transformer. With configs/model/gpt2.yaml it is GPT-2 (Radford et al., 2019).

Each block computes x + attention(norm(x)), then x + mlp(norm(x)). A final norm precedes the head. Options:

- positions: learned embeddings as in GPT-2, or rotary ones (RoPE, Su et al., arXiv:2104.09864)
- norm: LayerNorm, or RMSNorm (Zhang & Sennrich, arXiv:1910.07467)
- MLP: GELU, exact or GPT-2's tanh approximation, squared ReLU (Primer, So et al., arXiv:2109.08668), or SwiGLU
  (Shazeer, arXiv:2002.05202)
- attention: grouped-query attention (GQA, Ainslie et al., arXiv:2305.13245), normalized queries and keys (QK-norm,
  Henry et al., arXiv:2010.04245), a sliding window per layer (Longformer, Beltagy et al., arXiv:2004.05150), and a
  document mask
- linear attention (Katharopoulos et al., arXiv:2006.16236) instead of softmax attention, for all layers or some
- softcaps of attention scores and logits (model/attention/softcap.py)
- hashed n-gram embeddings (model/ngram.py)

The model does not select a kernel: the caller passes the function `attend`, one of the backends in model/attention/.

Initialization, as in nanoGPT. normal(0, s) has mean 0 and standard deviation s:

    embeddings, linear weights      normal(0, 0.02)
    projections into the residual   normal(0, 0.02 / sqrt(2 n_layer)): the variance of the sum over all blocks does not
                                    depend on n_layer
    biases                          zero
    n-gram embeddings               zero: most n-grams are rare, so random values would remain as noise
    norm weights                    one

B batch, T time, C channels = n_embd, H query heads, G key/value heads, D head dimension of q, k and v, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from model.attention import NON_SOFTMAX, get_attention_fn
from model.attention.positions import apply_rotary, positions_in_document, rotary_cos_sin
from model.attention.softcap import apply_softcap
from model.config import GATED_MLPS, AttentionConfig, GPTConfig
from model.loss import linear_cross_entropy
from model.ngram import NgramEmbedding
from model.startup import empty_embedding, materialize

Rotary = tuple[Tensor, Tensor] | None  # from rotary_cos_sin; None with learned positions


def make_norm(config: GPTConfig, size: int) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(size, eps=1e-5)
    return nn.LayerNorm(size, eps=1e-5, bias=config.bias)


class KVCacheProtocol(Protocol):
    """Interface between the model and a KV cache. model/generation/kv_cache.py implements it."""

    previous_tokens: Tensor | None  # (B, max_ngram - 1): the tokens before the first input, -1 where there is none

    def attend(self, layer: int, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the keys and values of new tokens, and attend to these and to all stored ones.

        layer: index of the layer.
        attend: attention function of the layer, called with q, k, v and positions.
        q (B, T, H, D), k and v (B, T, G, D) -> y (B, T, H, D)
        """
        ...


class CausalSelfAttention(nn.Module):
    """Causal multi-head attention: project to heads, attend, concatenate, project back."""

    def __init__(self, config: GPTConfig, attend: Callable[..., Tensor], layer: int):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.kv_heads, config.head_dim
        self.qkv = nn.Linear(config.n_embd, (self.n_head + 2 * self.n_kv_head) * self.head_dim, bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.layer, self.attention_type, self.window = layer, config.attention_types[layer], config.windows[layer]
        self.attend, self.softcap = attend, config.attention_softcap
        if self.attention_type != "softmax":
            self.attend, self.softcap = NON_SOFTMAX[self.attention_type].attend, None
        self.qk_norm, self.dropout = config.qk_norm, config.dropout

    def forward(
        self, x: Tensor, rotary: Rotary, doc_ids: Tensor | None = None, kv_cache: KVCacheProtocol | None = None
    ) -> Tensor:
        B, T, C = x.shape
        heads = self.qkv(x).view(B, T, -1, self.head_dim)  # (B, T, H + 2G, D)
        q, k, v = heads.split((self.n_head, self.n_kv_head, self.n_kv_head), dim=2)  # (B, T, H, D), 2 x (B, T, G, D)
        if self.qk_norm:
            q = F.rms_norm(q, (self.head_dim,)).type_as(v)  # under autocast the norm may return float32
            k = F.rms_norm(k, (self.head_dim,)).type_as(v)
        if rotary is not None:
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        dropout_p = self.dropout if self.training else 0.0
        options = {"window": self.window, "doc_ids": doc_ids, "dropout_p": dropout_p, "softcap": self.softcap}
        if kv_cache is None:
            y = self.attend(q, k, v, **options)  # (B, T, H, D)
        else:
            y = kv_cache.attend(self.layer, partial(self.attend, **options), q, k, v)
        y = self.proj(y.reshape(B, T, C))  # (B, T, C)
        return F.dropout(y, self.dropout, self.training) if self.dropout else y


def swiglu(x: Tensor) -> Tensor:
    """The first half of the channels, after SiLU, gates the second half: (..., 2W) -> (..., W)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


# To add an activation, add its name to MLPS in model/config.py too, and to GATED_MLPS if it halves the channels.
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "swiglu": swiglu,
}


class MLP(nn.Module):
    """Feed-forward layer: linear (C -> W, or 2W if the activation is gated), activation, linear (W -> C)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        W = config.mlp_channels
        self.fc = nn.Linear(config.n_embd, 2 * W if config.mlp in GATED_MLPS else W, bias=config.bias)
        self.proj = nn.Linear(W, config.n_embd, bias=config.bias)
        self.activation = ACTIVATIONS[config.mlp]
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(self.activation(self.fc(x)))
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Block(nn.Module):
    """Pre-norm transformer block: attention and MLP each add their output to the residual stream x (B, T, C)."""

    def __init__(self, config: GPTConfig, attend: Callable[..., Tensor], layer: int):
        super().__init__()
        self.norm_attn = make_norm(config, config.n_embd)
        self.attn = CausalSelfAttention(config, attend, layer)
        self.norm_mlp = make_norm(config, config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Rotary, doc_ids: Tensor | None, kv_cache: KVCacheProtocol | None) -> Tensor:
        x = x + self.attn(self.norm_attn(x), rotary, doc_ids, kv_cache)
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """The model: model(tokens) returns logits, model(tokens, targets) returns the loss.

    attend: attention function of all layers (model/attention/); defaults to AttentionConfig's backend.
    device: where parameters are allocated; on "meta" they have no values.
    weights: state_dict whose tensors become the parameters; by default, they are initialized randomly.
    """

    def __init__(
        self,
        config: GPTConfig,
        vocab_size: int,
        attend: Callable[..., Tensor] | None = None,
        device: str = "cpu",
        weights: dict[str, Tensor] | None = None,
    ):
        super().__init__()
        attend = attend or get_attention_fn(AttentionConfig())
        self.config, self.vocab_size, self.attend = config, vocab_size, attend
        with torch.device("meta"):  # without values, because PyTorch's default initialization would be overwritten
            padded_vocab_size = -(-vocab_size // config.pad_vocab_multiple) * config.pad_vocab_multiple
            self.wte = empty_embedding(padded_vocab_size, config.n_embd)
            self.wpe = empty_embedding(config.block_size, config.n_embd) if config.position == "learned" else None
            self.ngrams = None
            if config.max_ngram > 1:
                self.ngrams = NgramEmbedding(config.max_ngram, config.ngram_table_size, config.n_embd)
            self.blocks = nn.ModuleList(Block(config, attend, layer) for layer in range(config.n_layer))
            self.norm = make_norm(config, config.n_embd)
            self.lm_head = nn.Linear(config.n_embd, padded_vocab_size, bias=False)
        materialize(self, weights, device)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        if weights is None and device != "meta":
            self.init_weights()
        if config.position == "rotary":
            cos, sin = rotary_cos_sin(torch.arange(config.block_size), config.head_dim)
            self.register_buffer("rotary_cos", cos, persistent=False)
            self.register_buffer("rotary_sin", sin, persistent=False)

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield name and module of the embeddings, the blocks, the final norm and the head, for FSDP."""
        for name, part in self.named_children():
            if part is self.blocks:
                yield from ((f"{name}.{layer}", block) for layer, block in enumerate(self.blocks))
            else:
                yield name, part

    @torch.no_grad()
    def init_weights(self, part: nn.Module | None = None, prefix: str = "") -> None:
        """Initialize weights by the table at the top of this file.

        part: initializes only this module, whose name begins with `prefix`.
        """
        for name, p in (part or self).named_parameters(prefix):
            if p.ndim < 2:
                nn.init.zeros_(p) if name.endswith("bias") else nn.init.ones_(p)
            elif name.startswith("ngrams."):
                nn.init.zeros_(p)
            else:
                into_residual = name.endswith("proj.weight")
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer) if into_residual else 0.02)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        doc_ids: Tensor | None = None,
        positions: Tensor | None = None,
        kv_cache: KVCacheProtocol | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Next-token logits (B, T, V), or the cross entropy in nats, as a float32 scalar, if targets are given.

        targets (B, T): next tokens; -100 is ignored.
        doc_ids, positions, kv_cache: see backbone.
        reduction: "mean" or "sum" over the targets.
        """
        x = self.backbone(tokens, doc_ids=doc_ids, positions=positions, kv_cache=kv_cache)
        if targets is None:
            return self.logits(x)
        x, targets, softcap = x.flatten(0, 1), targets.flatten(), self.config.logit_softcap
        return linear_cross_entropy(x, self.lm_head.weight, targets, self.vocab_size, reduction, softcap=softcap)

    def logits(self, x: Tensor) -> Tensor:
        """Next-token logits of hidden states: (..., C) -> (..., V)."""
        logits, softcap = self.lm_head(x)[..., : self.vocab_size], self.config.logit_softcap
        return logits if softcap is None else apply_softcap(logits.float(), softcap)  # float32 as in the loss

    def backbone(
        self,
        tokens: Tensor,
        *,
        doc_ids: Tensor | None = None,
        positions: Tensor | None = None,
        kv_cache: KVCacheProtocol | None = None,
    ) -> Tensor:
        """Hidden states after the final norm: tokens (B, T) -> (B, T, C).

        doc_ids (B, T): document of each token. Tokens attend within their document, and its positions start at 0.
        positions (B, T): position of each token; by default counted from 0. Rotary positions may exceed block_size.
        kv_cache: stores the keys and values of earlier tokens.
        Raises UserError if positions is None and T exceeds block_size.
        """
        T = tokens.shape[1]
        if positions is None and self.config.block_size < T:
            raise UserError(f"{T} tokens do not fit into model.block_size={self.config.block_size}")
        position_ids = positions_in_document(doc_ids) if positions is None and doc_ids is not None else positions
        x = self.wte(tokens)  # (B, T, C)
        rotary = None
        if self.wpe is not None:
            x = x + (self.wpe.weight[:T] if position_ids is None else self.wpe(position_ids))
        elif positions is not None:
            rotary = rotary_cos_sin(positions, self.config.head_dim)  # the tables end at block_size
        elif position_ids is not None:
            rotary = self.rotary_cos[position_ids], self.rotary_sin[position_ids]
        else:
            rotary = self.rotary_cos[:T], self.rotary_sin[:T]
        if self.ngrams is not None:
            x = x + self.ngrams(tokens, doc_ids, None if kv_cache is None else kv_cache.previous_tokens)
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x, rotary, doc_ids, kv_cache)
        return self.norm(x)
