"""The decoder. With configs/model/gpt2.yaml it is GPT-2 (Radford et al., 2019), as nanoGPT and Hugging Face build it.

- pre-norm blocks: x + attention(norm(x)), then x + mlp(norm(x)); a last norm before the head
- positions are learned and added (GPT-2), or rotate q and k (RoPE, Su et al., arXiv:2104.09864)
- runs of tokens may have embeddings of their own, which their last token adds to its own (hashed n-grams: fastText,
  Bojanowski et al., arXiv:1607.04606; in a decoder: BLT, Pagnoni et al., arXiv:2412.09871)
- LayerNorm or RMSNorm (Zhang & Sennrich, arXiv:1910.07467); GELU, exact or in GPT-2's tanh form, or squared ReLU
  (Primer, So et al., arXiv:2109.08668); queries and keys normalised per head or not (Henry et al., arXiv:2010.04245)
- layers may see a sliding window of the last keys (as in Longformer, Beltagy et al., arXiv:2004.05150); documents that
  share a sequence can be kept apart, each with positions from 0
- which kernel computes attention is not known here: the model is handed an `attend` (model/attention/)

Initialisation, as GPT-2's code does it:

    embeddings, linear weights      normal(0, 0.02)
    projections into the residual   normal(0, 0.02 / sqrt(2 n_layer)): their sum keeps its variance over depth
    biases                          zero
    n-gram embeddings               zero: most are met late or never, and would be noise until then
    norms                           one (and zero for LayerNorm's bias)

B batch, T time, C channels = n_embd, H query heads, G key/value heads, D head size, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from model.config import GPTConfig
from model.loss import linear_cross_entropy


def make_norm(config: GPTConfig, size: int) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(size, eps=1e-5)
    return nn.LayerNorm(size, eps=1e-5, bias=config.bias)


def rotary_cos_sin(at: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency, 10000^(-2i/D) (RoPE, eq. 15): positions (...) -> each (..., 1, D / 2)."""
    frequency = 10_000.0 ** (-torch.arange(0, D, 2, device=at.device).float() / D)
    angle = at.float().unsqueeze(-1) * frequency
    return angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each channel pair (i, i + D/2) of x (B, T, heads, D) by its position's angle; lengths are kept."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


def positions_in_document(documents: Tensor) -> Tensor:
    """Where each token stands in its own document: ids (B, T), alike within a document -> (B, T), from 0."""
    index = torch.arange(documents.shape[1], device=documents.device)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def empty_embedding(rows: int, width: int) -> nn.Embedding:
    """A table without values. nn.Embedding would draw them; on the meta device that imports torch's compiler."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


class NgramEmbedding(nn.Module):
    """Embeddings of the last 2, 3, ... up to n tokens, added up: tokens (B, T) -> (B, T, C).

    Hashed into the rows of one table: two may share a row, the more of them there are the more often. What precedes
    the first token, or belongs to another document, is nothing, which hashes as one more token would.
    """

    PRIME, FACTOR = 2**31 - 1, 1_566_083_941  # a key is below PRIME, so that key x FACTOR fits into int64

    def __init__(self, n: int, rows: int, C: int):
        super().__init__()
        self.n = n
        self.table = empty_embedding(rows, C)

    def ngram_hashes(self, tokens: Tensor, documents: Tensor | None, before: Tensor | None = None) -> Tensor:
        """The row of each n-gram that ends at each token -> (B, T, n - 1). before: see GPT.hidden."""
        T, past = tokens.shape[1], self.n - 1
        known = F.pad(tokens + 1, (past, 0)) if before is None else torch.cat((before, tokens), dim=1) + 1
        key, keys = tokens, []
        for back in range(1, self.n):
            earlier = known[:, past - back : past - back + T]  # 0 where there is nothing
            if documents is not None:
                earlier = earlier.where(F.pad(documents, (back, 0))[:, :T] == documents, 0)
            key = (key * self.FACTOR + earlier) % self.PRIME
            keys.append(key)
        return torch.stack(keys, dim=-1) % self.table.num_embeddings

    def forward(self, tokens: Tensor, documents: Tensor | None, before: Tensor | None = None) -> Tensor:
        rows = self.ngram_hashes(tokens, documents, before)
        return F.embedding_bag(rows.flatten(0, 1), self.table.weight, mode="sum").view(*tokens.shape, -1)


class CausalSelfAttention(nn.Module):
    """Multi-head attention: project to heads, attend, concatenate, project back."""

    def __init__(self, config: GPTConfig, attend: Callable[..., Tensor], window: int | None):
        super().__init__()
        self.H, self.G, self.D = config.n_head, config.kv_heads, config.head_dim
        self.qkv = nn.Linear(config.n_embd, (self.H + 2 * self.G) * self.D, bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attend = attend
        self.window = window
        self.qk_norm = config.qk_norm
        self.dropout = config.dropout

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, documents: Tensor | None = None,
        attend: Callable[..., Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """attend: in place of the layer's own, for this call."""
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, -1, self.D).split((self.H, self.G, self.G), dim=2)  # (B, T, H or G, D)
        if self.qk_norm:
            q, k = (F.rms_norm(each, (self.D,)).type_as(v) for each in (q, k))  # autocast may have made it float32
        if rotary is not None:
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        dropout_p = self.dropout if self.training else 0.0
        y = (attend or self.attend)(q, k, v, window=self.window, documents=documents, dropout_p=dropout_p)
        y = self.proj(y.reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training) if self.dropout else y


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


class MLP(nn.Module):
    """Four times as wide inside: C -> 4C -> C."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.activation = ACTIVATIONS[config.mlp]
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(self.activation(self.fc(x)))
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Block(nn.Module):
    def __init__(self, config: GPTConfig, attend: Callable[..., Tensor], window: int | None):
        super().__init__()
        self.norm_attn = make_norm(config, config.n_embd)
        self.attn = CausalSelfAttention(config, attend, window)
        self.norm_mlp = make_norm(config, config.n_embd)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, documents: Tensor | None = None,
        attend: Callable[..., Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        x = x + self.attn(self.norm_attn(x), rotary, documents, attend)
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Tokens (B, T) -> logits (B, T, V). Weights are drawn from torch's global generator: seed it first.

    device: on meta parameters are shapes alone, for counting. weights: a state_dict whose tensors become the model's,
    and nothing is drawn.
    """

    def __init__(
        self, config: GPTConfig, vocab_size: int, attend: Callable[..., Tensor], device: str = "cpu",
        weights: dict[str, Tensor] | None = None,
    ):  # fmt: skip
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        with torch.device("meta"):  # shapes alone: torch's own initialisation would be drawn for nothing
            rows = -(-vocab_size // config.pad_vocab_multiple) * config.pad_vocab_multiple
            self.wte = empty_embedding(rows, config.n_embd)
            self.wpe = empty_embedding(config.block_size, config.n_embd) if config.position == "learned" else None
            several = config.max_ngram > 1
            self.ngrams = NgramEmbedding(config.max_ngram, config.ngram_table_size, config.n_embd) if several else None
            self.blocks = nn.ModuleList(Block(config, attend, window) for window in config.windows)
            self.norm = make_norm(config, config.n_embd)
            self.lm_head = nn.Linear(config.n_embd, rows, bias=False)
        # Not to_empty: on meta tensors it computes strides by way of sympy, whose import takes half a second.
        empty = {name: torch.empty(weight.shape, device=device) for name, weight in self.state_dict().items()}
        self.load_state_dict(weights or empty, assign=True)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        if weights is None:
            self.init_weights()
        if config.position == "rotary":
            cos, sin = rotary_cos_sin(torch.arange(config.block_size), config.head_dim)
            self.register_buffer("rotary_cos", cos, persistent=False)
            self.register_buffer("rotary_sin", sin, persistent=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights anew, by the table at the top of this file."""
        for name, p in self.named_parameters():
            if p.ndim < 2:
                nn.init.zeros_(p) if name.endswith("bias") else nn.init.ones_(p)
            elif name.startswith("ngrams."):
                nn.init.zeros_(p)
            else:
                into_residual = name.endswith("proj.weight")
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer) if into_residual else 0.02)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, documents: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        """Logits (B, T, V) of the token after each; given targets (B, T), their cross entropy instead.

        The loss is in nats, in float32 also under autocast; targets of -100 do not count. reduction: mean or sum.
        documents (B, T): which document each token is of, where attention and positions should keep
        them apart. Raises UserError where T exceeds block_size.
        """
        x = self.backbone(tokens, documents=documents)
        if targets is None:
            return self.lm_head(x)[..., : self.vocab_size]  # (B, T, V)
        return linear_cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), self.vocab_size, reduction)

    def backbone(
        self, tokens: Tensor, *, documents: Tensor | None = None, at: Tensor | None = None,
        before: Tensor | None = None, attends: Sequence[Callable[..., Tensor]] | None = None,
    ) -> Tensor:  # fmt: skip
        """What the head makes logits of: tokens (B, T) -> (B, T, C), for texts that begin here, or that go on.

        Of those that go on: at (B, T), each token's position, which with rotary ones may exceed block_size; before
        (B, max_ngram - 1), the tokens ahead of the first, -1 where there are none. Their keys and values are
        the business of `attends`, a function for each layer in place of its own. Raises UserError where a text that
        begins here exceeds block_size.
        """
        T = tokens.shape[1]
        if at is None and self.config.block_size < T:
            raise UserError(f"{T} tokens do not fit into model.block_size={self.config.block_size}")
        x = self.wte(tokens)  # (B, T, C)
        place = at if at is not None else slice(T) if documents is None else positions_in_document(documents)  # (B, T)
        if self.wpe is not None:
            x = x + (self.wpe.weight[:T] if isinstance(place, slice) else self.wpe(place))
        if self.ngrams is not None:
            x = x + self.ngrams(tokens, documents, before)
        rotary = None
        if self.wpe is None:
            known = at is None  # else it may lie beyond the tables
            rotary = (
                (self.rotary_cos[place], self.rotary_sin[place]) if known else rotary_cos_sin(at, self.config.head_dim)
            )
        x = F.dropout(x, self.config.dropout, self.training)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotary, documents, attends[layer] if attends is not None else None)
        return self.norm(x)
