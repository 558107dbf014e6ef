"""The decoder: its numbers against transformers' GPT-2, its initialisation, causality and costs."""

import math

import pytest
import torch
from helpers import TRAINS_ON_CPU
from model_helpers import GPT2, VARIANTS, make, some_tokens
from torch.utils.flop_counter import FlopCounterMode

from common.errors import UserError
from model import GPTConfig
from model.attention import BACKENDS, naive
from model.flops import flops_per_token, n_params
from model.gpt import GPT, apply_rotary, rotary_cos_sin


def test_logits_loss_and_gradients_are_those_of_transformers_gpt2():
    transformers = pytest.importorskip("transformers", reason="NOT RUN: pip install transformers for this test")
    model = make(GPT2)
    for p in model.parameters():  # larger than at the start of training, so that nothing hides in small numbers
        torch.nn.init.normal_(p, std=0.2)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50, n_positions=24, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )
    names = {"wte": "wte", "wpe": "wpe", "norm": "ln_f"}
    for i in range(2):
        ours = {"norm_attn": "ln_1", "norm_mlp": "ln_2", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj"}
        ours |= {"mlp.fc": "mlp.c_fc", "mlp.proj": "mlp.c_proj"}
        names |= {f"blocks.{i}.{a}": f"h.{i}.{b}" for a, b in ours.items()}
    their_params = dict(theirs.transformer.named_parameters())
    pairs = []
    for name, p in model.named_parameters():
        module, kind = name.rsplit(".", 1)
        other = their_params[f"{names[module]}.{kind}"]
        flip = ".c_" in names[module] and kind == "weight"  # theirs are laid out as inputs x outputs
        with torch.no_grad():
            other.copy_(p.T if flip else p)
        pairs.append((p, other, flip))
    tokens = some_tokens(T=24)
    expected = theirs(tokens, labels=tokens)
    torch.testing.assert_close(model(tokens), expected.logits, atol=1e-4, rtol=1e-4)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, expected.loss, atol=1e-5, rtol=1e-5)
    loss.backward()
    expected.loss.backward()
    for p, other, flip in pairs:
        torch.testing.assert_close(p.grad, other.grad.T if flip else other.grad, atol=1e-4, rtol=1e-3)


@VARIANTS
def test_initialisation_is_the_table(variant):
    model = make(variant | dict(n_embd=128, n_layer=8), vocab_size=500)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
        elif name.startswith("ngrams."):
            assert (p == 0).all(), name
        else:
            std = 0.02 / math.sqrt(16) if name.endswith("proj.weight") else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name
    loss = model(some_tokens(4, 24, 500), some_tokens(4, 24, 500, seed=1))
    assert loss.item() == pytest.approx(math.log(500), abs=0.15)


@pytest.mark.parametrize("name", TRAINS_ON_CPU)
@VARIANTS
def test_the_model_is_causal_by_gradient(name, variant):
    """Logits at i depend on the embeddings of tokens up to i and on none after it."""
    model = make(variant, attend=BACKENDS[name].attend)
    tokens = torch.arange(8).unsqueeze(0)  # all different, so that a row of wte stands for a place
    logits = model(tokens)
    for i in (0, 3, 7):
        gradient = torch.autograd.grad(logits[0, i, 40:].square().sum(), model.wte.weight, retain_graph=True)[0]
        reached = gradient[:8].abs().sum(-1) > 0
        assert reached[: i + 1].all()
        assert not reached[i + 1 :].any()


@VARIANTS
def test_every_backend_gives_the_same_loss_and_gradients(variant):
    x, y = some_tokens(), some_tokens(seed=1)
    results = {}
    for name in TRAINS_ON_CPU:
        model = make(variant, attend=BACKENDS[name].attend)
        loss = model(x, y)
        loss.backward()
        results[name] = [loss.detach(), *(p.grad for p in model.parameters())]
    for name in results:
        for a, b in zip(results[name], results["naive"], strict=True):
            torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-4)


def test_dropout_acts_in_training_alone_and_everywhere_that_gpt2_has_it():
    model = make(GPT2 | dict(dropout=0.5))
    tokens = some_tokens()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    calls = []
    real = torch.nn.functional.dropout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.functional.dropout", lambda x, p, training: calls.append(p) or real(x, p, training))
        model.train()(tokens)
    assert calls == [0.5] * (1 + 3 * 2)  # embeddings; weights, attention branch and MLP branch of each block


def test_a_target_of_minus_100_does_not_count():
    model = make(GPT2)
    x, y = some_tokens(), some_tokens(seed=1)
    y[:, 12:] = -100
    torch.testing.assert_close(model(x, y), model(x[:, :12], y[:, :12]))


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    cos, sin = rotary_cos_sin(torch.arange(32), 8)
    q, k = torch.randn(8), torch.randn(8)

    def at(x, position):
        return apply_rotary(x.view(1, 1, 1, 8), cos[position : position + 1], sin[position : position + 1]).flatten()

    assert at(q, 5).norm() == pytest.approx(q.norm().item(), rel=1e-5)
    torch.testing.assert_close(at(q, 9) @ at(k, 4), at(q, 25) @ at(k, 20), atol=1e-4, rtol=1e-4)


@VARIANTS
def test_flops_are_those_that_torch_counts_on_naive(variant):
    variant = variant | dict(n_embd=64, block_size=32)
    model = make(variant, vocab_size=300)
    x, y = some_tokens(4, 32, 300), some_tokens(4, 32, 300, seed=1)
    with FlopCounterMode(display=False) as counter:
        model(x, y).backward()
    assert flops_per_token(model.config, 300, 32) * 128 == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_parameters_of_gpt2_124m_are_counted_as_published():
    config = GPTConfig(**GPT2 | dict(n_layer=12, n_head=12, n_embd=768, block_size=1024))
    with torch.device("meta"):
        model = GPT(config, 50257, naive)
    assert n_params(model) == 124_439_808
    assert n_params(model, embedding=False) == 124_439_808 - 1024 * 768


def test_more_tokens_than_block_size_are_refused():
    with pytest.raises(UserError, match=r"25 tokens do not fit into model.block_size=24"):
        make(GPT2)(some_tokens(T=25))
