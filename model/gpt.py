"""The GPT model: a decoder-only transformer. With configs/model/gpt2.yaml, it is GPT-2.

Each block computes x + attention(norm(x)), then x + mlp(norm(x)). A final norm precedes the head.
The options beyond GPT-2 (Radford et al., 2019):

- positions: rotary (RoPE, Su et al., arXiv:2104.09864) instead of learned embeddings
- norm: RMSNorm (Zhang & Sennrich, arXiv:1910.07467) instead of LayerNorm
- MLP: squared ReLU (Primer, So et al., arXiv:2109.08668) or SwiGLU (Shazeer, arXiv:2002.05202)
- grouped-query attention (GQA, Ainslie et al., arXiv:2305.13245)
- normalized queries and keys (QK-norm, Henry et al., arXiv:2010.04245)
- a key offset (github.com/KellerJordan/modded-nanogpt/pull/169): half of each key is taken from the
  previous token, and by default, rotary positions rotate the other half only
- a sliding window per layer (Longformer, Beltagy et al., arXiv:2004.05150), and a document mask
- linear attention (Katharopoulos et al., arXiv:2006.16236) in all layers or in some
- softcaps of attention scores and logits (model/layers.py)
- hashed n-gram embeddings (model/layers.py)

The model does not select a kernel: the caller passes the function `attend`, one of the backends in
model/attention/backends.py, which also has the causal mask. Only layers with softmax attention
call it.

Initialization, as in nanoGPT. normal(0, s) has mean 0 and standard deviation s:

    embeddings, linear weights      normal(0, 0.02)
    projections into the residual   normal(0, 0.02 / sqrt(2 n_layer)), so that the variance of the
                                    sum over all blocks does not depend on n_layer
    biases                          zero
    n-gram embeddings               zero: most n-grams are rare, and random values would be noise
    norm weights                    one

B batch, T time, C channels = n_embd, V vocabulary, H query heads, G key/value heads, D head
dimension of q, k and v.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from model.attention import NON_SOFTMAX, sdpa
from model.config import GATED_MLPS, GPTConfig
from model.layers import (
    Embedding,
    Linear,
    NgramEmbedding,
    RMSNorm,
    apply_rotary,
    apply_softcap,
    positions_in_document,
    previous_in_document,
    rms_norm,
    rotary_cos_sin,
)
from model.loss import linear_cross_entropy


@dataclass
class SharedInputs:
    """Inputs of a forward pass that all blocks share. doc_ids, kv_cache: see GPT.backbone."""

    doc_ids: Tensor | None = None
    kv_cache: Any = None
    rotary: tuple[Tensor, Tensor] | None = None  # cosine and sine, from rotary_cos_sin


def make_norm(config: GPTConfig) -> nn.Module:
    """The norm over the C channels that config.norm names."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd, eps=1e-5)
    return nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)


class CausalSelfAttention(nn.Module):
    """Causal multi-head attention: project to heads, attend, concatenate, project back.

    docs/attention-variants.md has variants, such as a sink per head, as changes of this class.
    """

    def __init__(self, config: GPTConfig, attend: Callable[..., Tensor], layer: int):
        super().__init__()
        self.config = config
        self.layer = layer
        self.window = config.windows[layer]
        self.attention_type = config.attention_types[layer]
        self.attend = attend
        self.softcap = config.attention_softcap
        if self.attention_type != "softmax":  # one implementation, and no scores to bound
            self.attend = NON_SOFTMAX[self.attention_type].attend
            self.softcap = None
        qkv_channels = (config.n_head + 2 * config.kv_heads) * config.head_dim
        self.qkv = Linear(config.n_embd, qkv_channels, bias=config.bias)
        self.proj = Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, shared: SharedInputs) -> Tensor:
        config = self.config
        B, T, C = x.shape
        heads = self.qkv(x).view(B, T, -1, config.head_dim)  # (B, T, H + 2G, D)
        # queries and keys stay one tensor, so that norm and rotation are one operation each
        qk, v = heads.split((config.n_head + config.kv_heads, config.kv_heads), dim=2)
        if config.qk_norm:  # bounds the scores, so that higher learning rates are stable
            qk = rms_norm(qk)
        if config.key_offset:
            qk = self.offset_keys(qk, shared)
        if shared.rotary is not None:
            qk = apply_rotary(qk, *shared.rotary)
        # norm and rotation compute in float32: return to the dtype of v
        q, k = qk.type_as(v).split((config.n_head, config.kv_heads), dim=2)
        positions = None  # index of each query among the keys; None: the last ones
        if shared.kv_cache is not None:
            k, v, positions = shared.kv_cache.update(self.layer, k, v)
        y = self.attend(  # (B, T, H, D)
            q,
            k,
            v,
            window=self.window,
            positions=positions,
            doc_ids=shared.doc_ids,
            dropout_p=config.dropout if self.training else 0.0,
            softcap=self.softcap,
        )
        y = self.proj(y.reshape(B, T, C))  # (B, T, C)
        return F.dropout(y, config.dropout, self.training)

    def offset_keys(self, qk: Tensor, shared: SharedInputs) -> Tensor:
        """Take the last half of each key in qk (B, T, H + G, D) from the previous token.

        One layer can then act as an induction head: a query that matches an earlier copy of its
        token reads the token after it.

        Call this before the rotation, so that both halves of a key are rotated by its position.
        Otherwise, scores would depend on more than distances: rotated pairs contain both halves.
        """
        q, k = qk.split((self.config.n_head, self.config.kv_heads), dim=2)
        kept_channels = self.config.head_dim - self.config.shifted_channels
        kept, shifted = k.tensor_split((kept_channels,), dim=3)
        if shared.kv_cache is not None:
            shifted = shared.kv_cache.shift_keys(self.layer, shifted)
        else:
            shifted = previous_in_document(shifted, shared.doc_ids)
        k = torch.cat((kept, shifted), dim=3)
        return torch.cat((q, k), dim=2)


def swiglu(x: Tensor) -> Tensor:
    """SiLU of the first half of the channels, times the second half: (..., 2W) -> (..., W)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


# To add an activation, add its name to MLPS in model/config.py too, and to GATED_MLPS if it halves
# the channels.
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "swiglu": swiglu,
}


class MLP(nn.Module):
    """Feed-forward layer: linear (C -> W, or 2W if gated), activation, linear (W -> C)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        W = config.mlp_channels
        fc_channels = 2 * W if config.mlp in GATED_MLPS else W
        self.fc = Linear(config.n_embd, fc_channels, bias=config.bias)
        self.proj = Linear(W, config.n_embd, bias=config.bias)
        self.activation = ACTIVATIONS[config.mlp]
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(self.activation(self.fc(x)))
        return F.dropout(x, self.dropout, self.training)


class Block(nn.Module):
    """Pre-norm transformer block: attention and MLP each add their output to x (B, T, C)."""

    def __init__(self, config: GPTConfig, attend: Callable[..., Tensor], layer: int):
        super().__init__()
        self.norm_attn = make_norm(config)
        self.attn = CausalSelfAttention(config, attend, layer)
        self.norm_mlp = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, shared: SharedInputs) -> Tensor:
        # The norms are inside of the branches: the residual x is a plain sum, through which the
        # gradient of the last block reaches the first one unchanged.
        x = x + self.attn(self.norm_attn(x), shared)
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """The model: model(tokens) returns logits, model(tokens, targets) returns the loss.

    vocab_size: number V of tokens. Embedding and head may have more rows (pad_vocab_multiple).
    attend: attention function of the layers with softmax attention (model/attention/backends.py).

    On the meta device, the model is built without memory, and its weights are loaded later
    (generation/load.py).
    """

    def __init__(self, config: GPTConfig, vocab_size: int, attend: Callable[..., Tensor] = sdpa):
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.attend = attend
        # GPUs multiply faster if the number of rows is a multiple of 64
        rows = math.ceil(vocab_size / config.pad_vocab_multiple) * config.pad_vocab_multiple
        # init_weights and the optimizers choose parameters by these names
        self.wte = Embedding(rows, config.n_embd)
        self.wpe = None
        if config.position == "learned":
            self.wpe = Embedding(config.block_size, config.n_embd)
        self.ngrams = None
        if config.max_ngram > 1:
            self.ngrams = NgramEmbedding(config.max_ngram, config.ngram_table_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, attend, layer) for layer in range(config.n_layer))
        self.norm = make_norm(config)
        self.lm_head = Linear(config.n_embd, rows, bias=False)
        self.tie_weights()
        if not self.wte.weight.is_meta:
            self.init_weights()

    def tie_weights(self) -> None:
        """Let the head use the weights of the token embedding, if the config says so.

        Call this again after load_state_dict(assign=True), which replaces both weights.
        """
        if self.config.tie_embeddings:
            self.lm_head.weight = self.wte.weight

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize all weights by the table at the top of this file."""
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, p in self.named_parameters():
            if name.endswith("bias") or name.startswith("ngrams."):
                nn.init.zeros_(p)
            elif p.ndim < 2:  # of norms, and other vectors
                nn.init.ones_(p)
            elif name.endswith("proj.weight"):  # into the residual
                nn.init.normal_(p, std=residual_std)
            else:
                nn.init.normal_(p, std=0.02)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        doc_ids: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Next-token logits (B, T, V), or the cross entropy if targets are given.

        targets (B, T): next tokens; -100 is ignored. Or (B, T, V): their probabilities.
        doc_ids (B, T): document of each token, see backbone.
        reduction: "mean" or "sum" over the targets.
        The cross entropy is a float32 scalar, in nats per target with "mean".
        """
        x = self.backbone(tokens, doc_ids=doc_ids)
        if targets is None:
            return self.logits(x)
        return linear_cross_entropy(
            x.flatten(0, 1),
            self.lm_head.weight,
            targets.flatten(0, 1),
            self.vocab_size,
            reduction,
            softcap=self.config.logit_softcap,
        )

    def logits(self, x: Tensor) -> Tensor:
        """Next-token logits of hidden states: (..., C) -> (..., V).

        With a softcap, they are float32, as in the loss.
        """
        logits = self.lm_head(x)[..., : self.vocab_size]
        if self.config.logit_softcap is None:
            return logits
        return apply_softcap(logits.float(), self.config.logit_softcap)

    def backbone(
        self,
        tokens: Tensor,
        *,
        doc_ids: Tensor | None = None,
        positions: Tensor | None = None,
        kv_cache: Any = None,
    ) -> Tensor:
        """Hidden states after the final norm: tokens (B, T) -> (B, T, C).

        doc_ids (B, T): document of each token. Tokens attend within their document. Positions
            start at 0 in each document, unless `positions` is set.
        positions (B, T): position of each token; by default counted from 0. Rotary positions may
            exceed block_size.
        kv_cache: stores the keys and values of earlier tokens (generation/kv_cache.py).
            kv_cache.previous_tokens precede `tokens` in n-grams (see NgramEmbedding).
        Raises UserError if positions is None and T exceeds block_size.
        """
        T = tokens.shape[1]
        if positions is None:
            block_size = self.config.block_size
            if block_size < T:
                raise UserError(f"{T} tokens do not fit into model.block_size={block_size}")
            if doc_ids is None:
                positions = torch.arange(T, device=tokens.device)  # (T)
            else:
                positions = positions_in_document(doc_ids)  # (B, T)
        x = self.wte(tokens)  # (B, T, C)
        rotary = None
        if self.wpe is not None:
            x = x + self.wpe(positions)
        else:  # not stored, because positions differ from row to row with documents and a cache
            rotary = rotary_cos_sin(positions, self.config.rotary_channels)
        if self.ngrams is not None:  # a lookup costs no FLOPs, so the table can be large
            previous_tokens = None if kv_cache is None else kv_cache.previous_tokens
            x = x + self.ngrams(tokens, doc_ids, previous_tokens)
        x = F.dropout(x, self.config.dropout, self.training)
        shared = SharedInputs(doc_ids, kv_cache, rotary)
        for block in self.blocks:
            x = block(x, shared)
        return self.norm(x)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> Tensor:
        """Append sampled tokens: tokens (B, T) -> (B, T + max_new_tokens).

        temperature: divides the logits; above 0.
        top_k: sample from the k most likely tokens; None is all.

        Each token is one forward pass over the last block_size tokens, without a KV cache. This is
        the reference for the faster generation/engine.py up to block_size tokens; then the engine
        keeps the cache of the tokens before. Call eval() first.
        """
        for _ in range(max_new_tokens):
            x = self.backbone(tokens[:, -self.config.block_size :])
            logits = self.logits(x[:, -1]) / temperature  # (B, V)
            if top_k is not None:
                top_logits = logits.topk(min(top_k, self.vocab_size)).values  # in descending order
                logits = logits.masked_fill(logits < top_logits[:, -1:], -torch.inf)
            next_tokens = torch.multinomial(logits.softmax(-1), num_samples=1)  # (B, 1)
            tokens = torch.cat((tokens, next_tokens), dim=1)
        return tokens
