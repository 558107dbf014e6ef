"""The model: initialisation, causality, document masks, windows and generate.

test_architectures.py compares it with GPT-2.
"""

import math
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from helpers import TRAINS_ON_CPU
from model_helpers import GPT2, GROUPED, MODERN, ROTARY, VARIANTS, make_model, random_tokens

from common.errors import UserError
from model.attention import BACKENDS, naive
from model.config import MLPS


@VARIANTS
def test_initialisation_follows_the_table_in_the_docstring(variant):
    model = make_model(variant | dict(n_embd=128, n_layer=8), vocab_size=500)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
        elif name.startswith("ngrams."):
            assert (p == 0).all(), name
        else:
            std = 0.02 / math.sqrt(16) if name.endswith("proj.weight") else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name


def assert_causal(model, i):
    """Logits at position i depend on the embeddings of tokens 0 to i only."""
    tokens = torch.arange(8).unsqueeze(0)  # each row of wte belongs to one position
    score = model(tokens)[0, i, 40:].square().sum()
    (gradient,) = torch.autograd.grad(score, model.wte.weight)
    is_reached = gradient[:8].abs().sum(-1) > 0
    assert is_reached.tolist() == [j <= i for j in range(8)]


@pytest.mark.parametrize("name", TRAINS_ON_CPU)
@VARIANTS
@pytest.mark.parametrize("i", [0, 3, 7])
def test_model_is_causal_by_gradient(name, variant, i):
    assert_causal(make_model(variant, attend=BACKENDS[name].attend), i)


@pytest.mark.parametrize("variant", ROTARY.values(), ids=ROTARY)
@pytest.mark.parametrize("i", [0, 3, 7])
def test_rotary_fraction_and_key_offset_are_causal_by_gradient(variant, i):
    assert_causal(make_model(variant), i)


@pytest.mark.parametrize("name", TRAINS_ON_CPU)
@VARIANTS
def test_every_backend_gives_the_loss_and_gradients_of_naive(variant, name):
    losses = []
    gradients = []
    for backend in (name, "naive"):
        model = make_model(variant, attend=BACKENDS[backend].attend)
        loss = model(random_tokens(), random_tokens(seed=1))
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(*losses, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(*gradients, atol=2e-6, rtol=1e-4)


def test_sequences_longer_than_block_size_are_refused():
    with pytest.raises(UserError, match=r"25 tokens do not fit into model.block_size=24"):
        make_model(GPT2)(random_tokens(T=25))


@pytest.mark.parametrize("mlp", MLPS)
def test_every_mlp_of_the_config_can_be_trained(mlp):
    model = make_model(MODERN | dict(mlp=mlp))
    tokens = random_tokens(T=24)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# Dropout


def test_dropout_does_not_act_in_eval_mode():
    model = make_model(GPT2 | dict(dropout=0.5)).eval()
    assert torch.equal(model(random_tokens()), model(random_tokens()))


def test_dropout_is_where_gpt2_has_it(monkeypatch):
    """On embeddings, and on the weights, the attention branch and the MLP branch of each block."""
    model = make_model(GPT2 | dict(dropout=0.5))
    dropout = Mock(wraps=F.dropout)
    monkeypatch.setattr(F, "dropout", dropout)
    model(random_tokens())
    assert [call.args[1] for call in dropout.call_args_list] == [0.5] * (1 + 3 * 2)


# Positions and the key offset


def queries_and_keys(variant, positions=None) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, T, H, D) and k (B, T, G, D) of the first layer."""
    recorded = []

    def attend(q, k, v, **options):
        recorded.append((q, k))
        return naive(q, k, v, **options)

    make_model(variant, attend=attend).backbone(random_tokens(), positions=positions)
    return recorded[0]


@pytest.mark.parametrize(
    "changed",
    [dict(position="learned"), dict(rotary_fraction=0.5), dict(rotary_fraction=1.0)],
    ids=["learned", "0.5", "1"],
)
def test_key_offset_takes_half_of_the_channels_from_the_previous_key(changed):
    """At position 0, where the angles of rotary positions are zero."""
    zeros = torch.zeros(1, 24, dtype=torch.int64)
    q, k = queries_and_keys(GROUPED | changed | dict(key_offset=True), zeros)
    plain_q, plain_k = queries_and_keys(GROUPED | changed | dict(key_offset=False), zeros)
    assert torch.equal(q, plain_q)
    assert torch.equal(k[..., :4], plain_k[..., :4])
    assert torch.equal(k[:, 1:, :, 4:], plain_k[:, :-1, :, 4:])
    assert (k[:, 0, :, 4:] == 0).all()


@pytest.mark.parametrize("key_offset", [False, True])
@pytest.mark.parametrize(("fraction", "rotated"), [(0.25, 2), (0.5, 4), (1.0, 8)])
def test_rotary_positions_change_the_first_channels_only(fraction, rotated, key_offset):
    variant = GROUPED | dict(rotary_fraction=fraction, key_offset=key_offset)
    positions = torch.zeros(1, 24, dtype=torch.int64)
    for x, shifted in zip(
        queries_and_keys(variant, positions), queries_and_keys(variant, positions + 3), strict=True
    ):
        is_rotated = (x != shifted).any(dim=(0, 1, 2))
        assert is_rotated.tolist() == [i < rotated for i in range(8)]


@pytest.mark.parametrize("variant", ROTARY.values(), ids=ROTARY)
def test_scores_of_rotary_positions_depend_on_distances_only(variant):
    model = make_peaked_model(variant)
    positions = torch.arange(24).unsqueeze(0)
    x = model.backbone(random_tokens(), positions=positions)
    shifted = model.backbone(random_tokens(), positions=positions + 5)
    torch.testing.assert_close(shifted, x, atol=1e-4, rtol=1e-4)
    stretched = model.backbone(random_tokens(), positions=2 * positions)
    assert not torch.allclose(stretched, x, atol=1e-2)


@pytest.mark.parametrize(("key_offset", "fraction"), [(False, 1.0), (True, 0.5)])
def test_default_rotary_fraction_is_half_with_a_key_offset(key_offset, fraction):
    variant = MODERN | dict(key_offset=key_offset)
    explicit = make_model(variant | dict(rotary_fraction=fraction))
    assert torch.equal(make_model(variant)(random_tokens()), explicit(random_tokens()))


# Softcaps


def capped_logits() -> torch.Tensor:
    logits = make_model(MODERN)(random_tokens())
    assert logits.abs().max() > 0.05
    return 0.05 * (logits / 0.05).tanh()


def test_softcap_bounds_the_logits_and_those_of_the_loss():
    capped = make_model(MODERN | dict(logit_softcap=0.05))
    torch.testing.assert_close(capped(random_tokens()), capped_logits())
    targets = random_tokens(seed=1)
    expected = F.cross_entropy(capped_logits().flatten(0, 1), targets.flatten())
    torch.testing.assert_close(capped(random_tokens(), targets), expected)


def test_softcap_bounds_the_attention_scores():
    """With a bound near zero, all visible keys have the same weight, as with queries of zero."""
    capped = make_model(GPT2 | dict(attention_softcap=1e-6))
    uniform = make_model(GPT2)
    with torch.no_grad():
        for block in uniform.blocks:
            block.attn.qkv.weight[:32] = 0
    tokens = random_tokens()
    torch.testing.assert_close(uniform(tokens), capped(tokens))
    assert not torch.allclose(make_model(GPT2)(tokens), capped(tokens))


# Windows and document masks

DOCUMENT_BOUNDARIES = [0, 5, 6, 17, 24]


def logits_of_documents(model, tokens):
    """Logits of a sequence of four documents: with a document mask, and of each document alone."""
    doc_ids = torch.zeros(1, 24, dtype=torch.int64)
    for boundary in DOCUMENT_BOUNDARIES[1:-1]:
        doc_ids[:, boundary:] += 1
    masked = model(tokens, doc_ids=doc_ids)
    single = [model(tokens[:, start:end]) for start, end in pairwise(DOCUMENT_BOUNDARIES)]
    return masked, torch.cat(single, dim=1)


def assert_documents_are_isolated(model):
    tokens = random_tokens(B=1)
    masked, single = logits_of_documents(model, tokens)
    torch.testing.assert_close(masked, single, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(model(tokens), single, atol=1e-3), "the mask has no effect"


@VARIANTS
@pytest.mark.parametrize("name", TRAINS_ON_CPU)
def test_masked_documents_have_the_logits_of_single_documents(variant, name):
    assert_documents_are_isolated(make_model(variant, attend=BACKENDS[name].attend))


@pytest.mark.parametrize("variant", ROTARY.values(), ids=ROTARY)
def test_rotary_fraction_and_key_offset_keep_documents_apart(variant):
    assert_documents_are_isolated(make_model(variant))


@pytest.mark.parametrize(
    ("variant", "expected"), [(GPT2, 4), (GROUPED, 6)], ids=["gpt2", "key offset"]
)
def test_receptive_field_is_the_sum_of_the_windows(variant, expected):
    """With windows 3 and 2, a token depends on itself and the (3 - 1) + (2 - 1) tokens before.

    With a key offset, a layer also reads half of the key before its window.
    """
    model = make_model(variant | dict(window=[3, 2], block_size=12))
    embeddings = []

    def record(module, inputs, x):
        x.retain_grad()
        embeddings.append(x)

    model.wte.register_forward_hook(record)
    model(random_tokens(B=1, T=12))[0, -1].pow(2).sum().backward()
    is_reached = embeddings[0].grad[0].abs().sum(-1) > 0
    assert is_reached.tolist() == [False] * (12 - expected) + [True] * expected


# generate


def make_peaked_model(variant=MODERN):
    """A model in eval mode with random weights, so that some tokens are more likely than others."""
    model = make_model(variant).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return model


@pytest.mark.parametrize("n", [0, 1, 7])
def test_generate_appends_n_tokens_to_each_prompt(n):
    prompts = random_tokens(B=3, T=5)
    tokens = make_peaked_model().generate(prompts, n)
    assert tokens.shape == (3, 5 + n)
    assert torch.equal(tokens[:, :5], prompts)
    assert ((tokens >= 0) & (tokens < 50)).all()


@VARIANTS
def test_generate_with_top_k_1_appends_the_most_likely_token(variant):
    """Also when the context is full, and only its last block_size tokens are read."""
    model = make_peaked_model(variant)
    expected = random_tokens(B=2, T=20)
    for _ in range(10):
        logits = model(expected[:, -24:])[:, -1]
        expected = torch.cat((expected, logits.argmax(-1, keepdim=True)), dim=1)
    tokens = model.generate(random_tokens(B=2, T=20), 10, top_k=1)
    assert tokens.tolist() == expected.tolist()


def test_generate_with_a_low_temperature_appends_the_most_likely_token():
    model = make_peaked_model()
    greedy = model.generate(random_tokens(), 5, top_k=1)
    assert torch.equal(model.generate(random_tokens(), 5, temperature=1e-6), greedy)


def next_tokens(model, top_k) -> set[int]:
    """The tokens that follow the same prompt in 2,000 samples."""
    prompts = random_tokens(B=1, T=5).expand(2000, -1)
    torch.manual_seed(0)
    return set(model.generate(prompts, 1, top_k=top_k)[:, -1].tolist())


def test_generate_draws_only_the_top_k_tokens():
    model = make_peaked_model()
    logits = model(random_tokens(B=1, T=5))[0, -1]
    assert next_tokens(model, top_k=3) == set(logits.topk(3).indices.tolist())


@pytest.mark.parametrize("top_k", [None, 50, 99])
def test_generate_draws_all_tokens_without_a_smaller_top_k(top_k):
    assert next_tokens(make_peaked_model(), top_k) == set(range(50))
