"""The GPT of trilGPT for transformers. This file needs torch and transformers only.

Attention is computed by its formula, with all scores in memory. attention_mask (B, S) has the
document id of each token, or 0 for padding. Tokens attend within their document, which is
contiguous, and positions start at 0 in each. Rotary ones can exceed block_size, the largest window.

B batch, T new tokens, S cached and new tokens, C channels, D channels of a head, H heads of
queries, G heads of keys and values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

HASH_PRIME = 2**31 - 1
HASH_FACTOR = 1_566_083_941
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "swiglu": lambda x: F.silu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1],
}


class TrilGPTConfig(PretrainedConfig):
    """Architecture of the model. config.json has all settings, so there are no defaults.

    vocab_size, n_layer, n_embd, bias, dropout, tie_embeddings
    block_size                  context length in tokens
    norm, qk_norm               rmsnorm or layernorm; normalize queries and keys
    position, rotary_channels   rotary or learned; rotated channels of a head
    mlp, mlp_width              gelu, gelu_tanh, relu2 or swiglu; its width
    n_head, n_kv_head           query heads; key/value heads that they share
    attention_type              softmax or linear
    window                      keys per query, or None: block_size. Lists repeat over the layers.
    key_offset                  half of each key comes from the token before
    attention_softcap, logit_softcap   bounds of the attention scores and the logits, or None
    max_ngram, ngram_table_size longest n-gram; rows of the table that n-grams are hashed into
    """

    model_type = "trilgpt"
    attribute_map = {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "hidden_size": "n_embd",
        "max_position_embeddings": "block_size",
        "tie_word_embeddings": "tie_embeddings",
    }


def make_norm(config: TrilGPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=1e-5)
    return nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)


def apply_softcap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def positions_in_document(doc_ids: Tensor) -> Tensor:
    """Position of each token in its document, counted from 0: (B, S) -> (B, S)."""
    index = torch.arange(doc_ids.shape[1], device=doc_ids.device)
    is_first = F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0), value=True)
    return index - (index * is_first).cummax(dim=1).values


def look_back(x: Tensor, positions: Tensor, distance: int) -> Tensor:
    """x (B, heads, S, D) of the token `distance` before each token; 0 before its document."""
    is_inside = (positions >= distance)[:, None, :, None]
    return torch.where(is_inside, x.roll(distance, dims=2), 0)


def key_distances(doc_ids: Tensor, T: int) -> Tensor:
    """Number of tokens from key to query (B, 1, T, S); -1 between documents: doc_ids (B, S)."""
    index = torch.arange(doc_ids.shape[1], device=doc_ids.device)
    distances = index[-T:, None] - index
    is_same_document = doc_ids[:, -T:, None] == doc_ids[:, None, :]
    return distances.where(is_same_document, -1).unsqueeze(1)


def rotate(x: Tensor, positions: Tensor, R: int) -> Tensor:
    """Rotate the channels (i, i + R/2) of x (B, heads, T, D) by position x 10000^(-2i/R)."""
    frequency = 10_000.0 ** (-torch.arange(0, R, 2, device=x.device) / R)
    angle = positions[:, None, :, None] * frequency  # (B, 1, T, R/2)
    a, b, rest = x.split((R // 2, R // 2, x.shape[-1] - R), dim=-1)
    rotated_a = a * angle.cos() - b * angle.sin()
    rotated_b = a * angle.sin() + b * angle.cos()
    return torch.cat((rotated_a, rotated_b, rest), dim=-1)


def linear_features(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1. Linear attention has the weights softmax(log phi(q).phi(k))."""
    return F.relu(x) + x.clamp(max=0).exp()


class NgramEmbedding(nn.Module):
    """Sum of the embeddings of the 2-gram, ..., max_ngram-gram that end at each token."""

    def __init__(self, config: TrilGPTConfig):
        super().__init__()
        self.max_ngram = config.max_ngram
        self.table = nn.Embedding(config.ngram_table_size, config.n_embd)

    def forward(self, tokens: Tensor, positions: Tensor, T: int) -> Tensor:
        """Embeddings of the last T tokens (B, T, C): tokens (B, 1, S, 1), positions (B, S)."""
        hashes = tokens
        total = 0
        for distance in range(1, self.max_ngram):
            earlier = look_back(tokens + 1, positions, distance)
            hashes = (hashes * HASH_FACTOR + earlier) % HASH_PRIME
            total = total + self.table(hashes[:, 0, -T:, 0] % self.table.num_embeddings)
        return total


def value_of_layer(value, layer: int):
    return value[layer % len(value)] if isinstance(value, list) else value


class Attention(nn.Module):
    def __init__(self, config: TrilGPTConfig, layer: int):
        super().__init__()
        self.config = config
        self.layer = layer
        window = value_of_layer(config.window, layer) or config.block_size
        self.window = min(window, config.block_size)
        self.attention_type = value_of_layer(config.attention_type, layer)
        self.head_dim = config.n_embd // config.n_head
        qkv_channels = (config.n_head + 2 * config.n_kv_head) * self.head_dim
        self.qkv = nn.Linear(config.n_embd, qkv_channels, bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, positions: Tensor, distances: Tensor, cache) -> Tensor:
        config = self.config
        B, T, C = x.shape
        H, G, D = config.n_head, config.n_kv_head, self.head_dim
        heads = self.qkv(x).view(B, T, H + 2 * G, D).transpose(1, 2)
        qk, v = heads.split((H + G, G), dim=1)
        if config.qk_norm:
            qk = F.rms_norm(qk.float(), (D,))
        q, k = qk.type_as(v).split((H, G), dim=1)  # (B, H, T, D), (B, G, T, D)
        k, v = cache.update(k, v, self.layer)  # (B, G, S, D), not yet rotated
        if config.key_offset:
            kept, shifted = k.tensor_split((D - 2 * (D // 4),), dim=-1)
            k = torch.cat((kept, look_back(shifted, positions, 1)), dim=-1)
        if config.position == "rotary":  # in float32
            q = rotate(q, positions[:, -T:], config.rotary_channels).type_as(v)
            k = rotate(k, positions, config.rotary_channels).type_as(v)
        k = k.repeat_interleave(H // G, dim=1)  # (B, H, S, D)
        v = v.repeat_interleave(H // G, dim=1)
        if self.attention_type == "linear":
            with torch.autocast(x.device.type, enabled=False):  # sums in float32
                scores = (linear_features(q.float()) @ linear_features(k.float()).mT).log()
        else:
            scores = q @ k.mT / D**0.5  # (B, H, T, S)
            scores = apply_softcap(scores, config.attention_softcap)
        is_visible = (distances >= 0) & (distances < self.window)
        weights = scores.float().masked_fill(~is_visible, -torch.inf).softmax(dim=-1)
        weights = F.dropout(weights, config.dropout, self.training).type_as(v)
        y = (weights @ v).transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.proj(y), config.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: TrilGPTConfig):
        super().__init__()
        self.config = config
        W = config.mlp_width
        self.fc = nn.Linear(config.n_embd, 2 * W if config.mlp == "swiglu" else W, config.bias)
        self.proj = nn.Linear(W, config.n_embd, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(ACTIVATIONS[self.config.mlp](self.fc(x)))
        return F.dropout(x, self.config.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config: TrilGPTConfig, layer: int):
        super().__init__()
        self.norm_attn = make_norm(config)
        self.attn = Attention(config, layer)
        self.norm_mlp = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, positions: Tensor, distances: Tensor, cache) -> Tensor:
        x = x + self.attn(self.norm_attn(x), positions, distances, cache)
        return x + self.mlp(self.norm_mlp(x))


class TrilGPTForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TrilGPTConfig
    _input_embed_layer = "wte"
    _no_split_modules = ["Block"]
    _tied_weights_keys = {"lm_head.weight": "wte.weight"}

    def __init__(self, config: TrilGPTConfig):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if config.position == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        if config.max_ngram > 1:
            self.ngrams = NgramEmbedding(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = make_norm(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids, attention_mask=None, labels=None, use_cache=None, logits_to_keep=0, **extra
    ):
        """Logits (B, T, V) of the next tokens, and the loss in nats per label: input_ids (B, T).

        labels (B, T): shifted here, and -100 is ignored. position_ids have no effect.
        """
        config = self.config
        # the name depends on the version of transformers
        caches = [extra.pop(name, None) for name in ("cache", "past_key_values")]
        cache = next((cache for cache in caches if cache is not None), DynamicCache())
        if use_cache is None:
            use_cache = labels is None
        B, T = input_ids.shape
        S = cache.get_seq_length() + T
        doc_ids = input_ids.new_ones(B, S) if attention_mask is None else attention_mask
        if doc_ids.shape != (B, S):
            raise ValueError(f"attention_mask must have the shape {(B, S)}; set a dynamic cache")
        if config.position == "learned" and config.block_size < S:
            raise ValueError(f"{S} tokens do not fit into block_size={config.block_size}")
        positions = positions_in_document(doc_ids)
        x = self.wte(input_ids)
        if config.position == "learned":
            x = x + self.wpe(positions[:, -T:])
        if config.max_ngram > 1:
            if len(cache.layers) == config.n_layer:  # one more layer stores tokens
                cache.layers.append(DynamicLayer())
            tokens = input_ids.long()[:, None, :, None]
            tokens, _ = cache.update(tokens, tokens, config.n_layer)
            x = x + self.ngrams(tokens, positions, T)
        x = F.dropout(x, config.dropout, self.training)
        distances = key_distances(doc_ids, T)
        for block in self.blocks:
            x = block(x, positions, distances, cache)
        logits = self.lm_head(self.norm(x)[:, -logits_to_keep:]).float()
        logits = apply_softcap(logits, config.logit_softcap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=config.vocab_size, **extra)
        return CausalLMOutputWithPast(loss, logits, cache if use_cache else None)
