"""The model: initialisation, causality, document masks and windows. test_architectures.py compares it with GPT-2."""

import math
from itertools import pairwise

import pytest
import torch
from helpers import TRAINS_ON_CPU
from model_helpers import GPT2, GROUPED, MODERN, VARIANTS, make_model, random_tokens

from common.errors import UserError
from model.attention import BACKENDS
from model.config import MLPS


def test_softcap_bounds_the_logits():
    tokens = random_tokens()
    free, capped = make_model(MODERN), make_model(MODERN | dict(logit_softcap=0.05))
    expected = 0.05 * (free(tokens) / 0.05).tanh()
    assert free(tokens).abs().max() > 0.05
    torch.testing.assert_close(capped(tokens), expected)
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(capped(tokens, tokens), loss)


def test_softcap_bounds_the_attention_scores():
    """With a bound near zero, all visible keys have the same weight, as with queries of zero."""
    uniform, capped = make_model(GPT2), make_model(GPT2 | dict(attention_softcap=1e-6))
    with torch.no_grad():
        for block in uniform.blocks:
            block.attn.qkv.weight[:32] = 0
    assert not torch.allclose(make_model(GPT2)(random_tokens()), capped(random_tokens()))
    torch.testing.assert_close(uniform(random_tokens()), capped(random_tokens()))


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
    loss = model(random_tokens(4, 24, 500), random_tokens(4, 24, 500, seed=1))
    assert loss.item() == pytest.approx(math.log(500), abs=0.15)


@pytest.mark.parametrize("name", TRAINS_ON_CPU)
@VARIANTS
def test_model_is_causal_by_gradient(name, variant):
    """Logits at position i depend on the embeddings of tokens 0 to i only."""
    model = make_model(variant, attend=BACKENDS[name].attend)
    tokens = torch.arange(8).unsqueeze(
        0
    )  # all different, so each row of wte belongs to one position
    logits = model(tokens)
    for i in (0, 3, 7):
        gradient = torch.autograd.grad(
            logits[0, i, 40:].square().sum(), model.wte.weight, retain_graph=True
        )[0]
        reached = gradient[:8].abs().sum(-1) > 0
        assert reached[: i + 1].all()
        assert not reached[i + 1 :].any()


@VARIANTS
def test_every_backend_gives_the_same_loss_and_gradients(variant):
    x, y = random_tokens(), random_tokens(seed=1)
    results = {}
    for name in TRAINS_ON_CPU:
        model = make_model(variant, attend=BACKENDS[name].attend)
        loss = model(x, y)
        loss.backward()
        results[name] = [loss.detach(), *(p.grad for p in model.parameters())]
    for name in results:
        for a, b in zip(results[name], results["naive"], strict=True):
            torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-4)


def test_dropout_acts_only_in_training_and_where_gpt2_has_it():
    model = make_model(GPT2 | dict(dropout=0.5))
    tokens = random_tokens()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    calls = []
    real = torch.nn.functional.dropout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "torch.nn.functional.dropout",
            lambda x, p, training: calls.append(p) or real(x, p, training),
        )
        model.train()(tokens)
    assert calls == [0.5] * (
        1 + 3 * 2
    )  # embeddings; weights, attention branch and MLP branch of each block


def test_sequences_longer_than_block_size_are_refused():
    with pytest.raises(UserError, match=r"25 tokens do not fit into model.block_size=24"):
        make_model(GPT2)(random_tokens(T=25))


# Windows and document masks


@VARIANTS
@pytest.mark.parametrize("name", TRAINS_ON_CPU)
def test_masked_documents_give_the_same_results_as_single_documents(variant, name):
    """Compares logits and gradients."""
    model, tokens, cuts = (
        make_model(variant, attend=BACKENDS[name].attend),
        random_tokens(B=1),
        [0, 5, 6, 17, 24],
    )
    doc_ids = torch.zeros(1, 24, dtype=torch.int64)
    for cut in cuts[1:-1]:
        doc_ids[:, cut:] += 1
    masked = model(tokens, doc_ids=doc_ids)
    single = torch.cat([model(tokens[:, a:b]) for a, b in pairwise(cuts)], dim=1)
    torch.testing.assert_close(masked, single, atol=1e-5, rtol=1e-4)
    parameters = list(model.parameters())
    weights = torch.randn(masked.shape, generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad((single * weights).sum(), parameters, allow_unused=True)
    for a, e in zip(
        torch.autograd.grad((masked * weights).sum(), parameters), expected, strict=True
    ):
        torch.testing.assert_close(a, e, atol=2e-4, rtol=1e-3)
    assert not torch.allclose(model(tokens), single, atol=1e-3)  # without the mask


@pytest.mark.parametrize("variant", [GPT2, GROUPED], ids=["gpt2", "grouped"])
def test_receptive_field_is_the_sum_of_the_windows(variant):
    """With windows 3 and 2, a token depends on itself and the (3 - 1) + (2 - 1) tokens before it."""
    model, tokens = (
        make_model(variant | dict(window=[3, 2], block_size=12)),
        random_tokens(B=1, T=12),
    )
    found = []
    model.wte.register_forward_hook(lambda module, inputs, x: found.append(x) or x.retain_grad())
    model(tokens)[0, -1].pow(2).sum().backward()
    reached = found[0].grad[0].abs().sum(-1) > 0
    assert reached.tolist() == [False] * 8 + [True] * 4


@pytest.mark.parametrize("mlp", MLPS)
def test_every_mlp_of_the_config_can_be_trained(mlp):
    model, tokens = make_model(MODERN | dict(mlp=mlp)), random_tokens(T=24)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
