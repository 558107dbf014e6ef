"""Small models of each architecture."""

import pytest
import torch

from model import GPTConfig
from model.attention import naive
from model.gpt import GPT

GPT2 = dict(
    name="gpt2",
    n_layer=2,
    n_head=4,
    n_kv_head=None,
    n_embd=32,
    block_size=24,
    dropout=0.0,
    bias=True,
    norm="layernorm",
    mlp="gelu_tanh",
    mlp_width=None,
    position="learned",
    attention_type="softmax",
    window=None,
    qk_norm=False,
    key_offset=False,
    rotary_fraction=None,
    attention_softcap=None,
    logit_softcap=None,
    tie_embeddings=True,
    pad_vocab_multiple=1,
    max_ngram=1,
    ngram_table_size=64,
)
MODERN = GPT2 | dict(
    bias=False,
    norm="rmsnorm",
    mlp="relu2",
    position="rotary",
    qk_norm=True,
    key_offset=True,
    tie_embeddings=False,
    max_ngram=4,
)
LLAMA = MODERN | dict(mlp="swiglu", qk_norm=False, key_offset=False, n_kv_head=2, max_ngram=1)
GROUPED = MODERN | dict(n_kv_head=2, mlp="swiglu")
VARIANTS = pytest.mark.parametrize(
    "variant", [GPT2, MODERN, GROUPED], ids=["gpt2", "modern", "grouped"]
)
# Half of the channels rotated or all of them, without and with a key offset.
ROTARY = {
    f"{name}, {fraction:g} rotated": GROUPED | dict(key_offset=offset, rotary_fraction=fraction)
    for name, offset in (("no offset", False), ("offset", True))
    for fraction in (0.5, 1.0)
}


def make_model(variant, vocab_size=50, attend=naive, seed=0):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**variant), vocab_size, attend)


def random_tokens(B=2, T=24, V=50, seed=0):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))
