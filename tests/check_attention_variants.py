"""Checks of docs/attention-variants.md, which need its changes of the code.

tests/test_attention_variants.py runs them in a copy of the code that has all changes.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from generation_helpers import logits_without_cache, make_random_model
from helpers import ON_CPU, sampling
from model_helpers import GROUPED, random_tokens

from common.errors import UserError
from generation.engine import Engine, Prompt
from model import GPTConfig
from model.attention import BACKENDS
from model.layers import apply_rotary, rotary_cos_sin

SMALL = GROUPED | dict(n_embd=64, max_ngram=1)  # head_dim 16, two key/value heads, block_size 24
OPTIONS = {
    "exclusive": dict(exclusive=True),
    "output_gate": dict(output_gate=True),
    "value_residual": dict(value_residual=True),
    "alibi": dict(score_bias="alibi"),
    "forgetting": dict(score_bias="forgetting"),
    "sink": dict(score_bias="sink"),
}
VARIANTS = {name: SMALL | options for name, options in OPTIONS.items()}
ALL = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
# A window hides the virtual key of the sink, and so does a document mask.
MASKABLE = {name: variant for name, variant in VARIANTS.items() if name != "sink"}


OTHER_BACKENDS = []
for name in ON_CPU:
    marks = [pytest.mark.compiles, pytest.mark.slow] if BACKENDS[name].needs_compiler else []
    if name != "naive":
        OTHER_BACKENDS.append(pytest.param(name, marks=marks))


def logits_and_gradients(model, tokens):
    logits = model(tokens)
    gradients = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
    return logits.detach(), gradients


def make_trainable(variant, **options):
    return make_random_model(variant, **options).requires_grad_(True)


@ALL
def test_variant_has_an_effect(variant):
    model = make_random_model(variant)
    without = make_random_model(SMALL | dict(n_layer=variant["n_layer"]))
    model.load_state_dict(without.state_dict(), strict=False)
    difference = model(random_tokens()) - without(random_tokens())
    assert difference.abs().max() > 0.01


@ALL
@pytest.mark.parametrize("i", [0, 3, 7])
def test_variant_is_causal_by_gradient(variant, i):
    model = make_trainable(variant, V=50)
    score = model(torch.arange(8).unsqueeze(0))[0, i, 40:].square().sum()
    (gradient,) = torch.autograd.grad(score, model.wte.weight)
    is_reached = gradient[:8].abs().sum(-1) > 0
    assert is_reached.tolist() == [j <= i for j in range(8)]


@pytest.mark.parametrize("name", OTHER_BACKENDS)
@ALL
def test_variant_runs_with_every_backend(variant, name):
    if "training" in BACKENDS[name].on["cpu"].lacks:
        model = make_random_model(variant, attend=BACKENDS[name].attend)
        expected = make_random_model(variant)(random_tokens())
        torch.testing.assert_close(model(random_tokens()), expected, atol=1e-4, rtol=1e-4)
        return
    model = make_trainable(variant, attend=BACKENDS[name].attend)
    logits, gradients = logits_and_gradients(model, random_tokens())
    expected, expected_gradients = logits_and_gradients(make_trainable(variant), random_tokens())
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-4 * other.abs().max(), rtol=0)


def assert_decoding_equals_recomputation(model):
    """Three sequences of different lengths, one of which ends early and leaves its row."""
    engine = Engine(model, sampling(temperature=0.0), batch_size=3, max_length=24)
    recorded = []
    model.lm_head.register_forward_hook(lambda module, inputs, logits: recorded.append(logits))
    engine.add([Prompt(tokens, seed=0) for tokens in ([7], [3, 1, 4, 1, 5], [2, 7, 1])])
    for step in range(15):
        if step == 4:
            engine.remove(0)
        if step == 6:
            engine.add([Prompt([9, 9, 8], seed=0)])
        before = [list(sequence.tokens) for sequence in engine.sequences]
        engine.step()
        for logits, tokens in zip(recorded[-1], before, strict=True):
            if len(tokens) <= model.config.block_size:
                expected = model(torch.tensor([tokens]))[0, -1]
            else:
                (expected,) = logits_without_cache(model, tokens, len(tokens))
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@ALL
def test_cached_decoding_equals_recomputation(variant):
    assert_decoding_equals_recomputation(make_random_model(variant))


@pytest.mark.parametrize("options", [dict(window=[5, None]), dict(block_size=8)])
@pytest.mark.parametrize("variant", MASKABLE.values(), ids=MASKABLE)
def test_cached_decoding_equals_recomputation_with_windows(variant, options):
    """Beyond block_size, the context is a window, too."""
    assert_decoding_equals_recomputation(make_random_model(variant | options))


@ALL
def test_bfloat16_is_about_as_precise_as_without_the_variant(variant):
    errors = []
    for options in (SMALL, variant):
        model = make_random_model(options | dict(block_size=128))
        tokens = random_tokens(T=128)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        expected = model.double()(tokens)
        errors.append((logits - expected).square().mean() / expected.square().mean())
    without, with_variant = errors
    assert with_variant < 3 * without


@pytest.mark.parametrize("variant", MASKABLE.values(), ids=MASKABLE)
def test_documents_do_not_see_each_other(variant):
    model = make_random_model(variant)
    tokens = random_tokens(B=1)
    doc_ids = torch.tensor([[0] * 9 + [1] * 15])
    packed = model(tokens, doc_ids=doc_ids)
    separate = torch.cat((model(tokens[:, :9]), model(tokens[:, 9:])), dim=1)
    torch.testing.assert_close(packed, separate, atol=1e-4, rtol=1e-4)


def test_sink_refuses_a_document_mask():
    model = make_random_model(VARIANTS["sink"])
    with pytest.raises(UserError, match="needs data"):
        model(random_tokens(B=1), doc_ids=torch.zeros(1, 24, dtype=torch.int64))


@pytest.mark.parametrize(
    "options",
    [
        dict(score_bias="sink", window=8),
        dict(score_bias="alibi", attention_softcap=50.0),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(options):
    with pytest.raises(UserError, match="needs model"):
        GPTConfig(**(SMALL | options))


# The formulas of the page in float64, with a loop over queries and heads.


def run_layers(name):
    """Run a random model in float64: [(attention layer, its input (T, C), its output (T, C))]."""
    model = make_random_model(VARIANTS[name]).double()
    layers = []
    for block in model.blocks:
        block.attn.register_forward_hook(
            lambda module, inputs, y: layers.append((module, inputs[0][0], y[0]))
        )
    model(random_tokens(B=1))
    return layers


def project(attn, x):
    """Queries (T, H, D), and keys and values repeated for all query heads.

    Half of the 16 channels of queries and keys are rotated, and the other half of each key comes
    from the previous token.
    """
    H, G, D = attn.config.n_head, attn.config.kv_heads, attn.config.head_dim
    q, k, v = attn.qkv(x).view(len(x), H + 2 * G, D).split((H, G, G), dim=1)
    if attn.config.qk_norm:
        q, k = F.rms_norm(q, (D,)), F.rms_norm(k, (D,))
    tables = rotary_cos_sin(torch.arange(len(x)), 8)
    q, k = [apply_rotary(y.unsqueeze(0), *tables)[0] for y in (q, k)]
    k[1:, :, 8:] = k[:-1, :, 8:].clone()
    k[0, :, 8:] = 0
    return q, k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1)


def softmax_average(q, k, v, bias=None, sink=None):
    """softmax(q k / sqrt(D) + bias) v, query by query. bias (T, H): of the keys. sink (H)."""
    T, H, D = q.shape
    y = torch.zeros_like(v)
    for i in range(T):
        for h in range(H):
            scores = k[: i + 1, h] @ q[i, h] / math.sqrt(D)
            if bias is not None:
                scores = scores + bias[: i + 1, h]
            weights = scores.exp()
            total = weights.sum() + (0 if sink is None else sink[h].exp())
            y[i, h] = weights / total @ v[: i + 1, h]
    return y


def project_back(attn, y):
    return attn.proj(y.flatten(1))


def test_exclusive_output_is_orthogonal_to_the_value():
    _, (attn, x, y) = run_layers("exclusive")
    q, k, v = project(attn, x)
    mean = softmax_average(q, k, v)
    unit = v / v.norm(dim=-1, keepdim=True)
    expected = mean - (mean * unit).sum(-1, keepdim=True) * unit
    torch.testing.assert_close(y, project_back(attn, expected))
    assert y[0].abs().max() < 1e-12  # the first token sees only its own value


def test_output_gate_scales_each_head():
    _, (attn, x, y) = run_layers("output_gate")
    q, k, v = project(attn, x)
    mean = softmax_average(q, k, v)
    expected = mean * (2 * torch.sigmoid(x @ attn.gate.weight.T)).unsqueeze(-1)
    torch.testing.assert_close(y, project_back(attn, expected))


def test_value_residual_mixes_the_values_of_the_first_layer():
    (first, first_x, _), (attn, x, y) = run_layers("value_residual")
    q, k, v = project(attn, x)
    _, _, first_v = project(first, first_x)
    mixed = attn.value_mix * v + (1 - attn.value_mix) * first_v
    expected = softmax_average(q, k, mixed)
    torch.testing.assert_close(y, project_back(attn, expected))


@pytest.mark.parametrize("name", ["alibi", "forgetting"])
def test_decay_is_a_bias_of_the_scores(name):
    _, (attn, x, y) = run_layers(name)
    q, k, v = project(attn, x)
    if name == "alibi":
        log_f = -torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64).expand(len(x), 2)
    else:
        log_f = torch.sigmoid(attn.forget_gate(x)).log()
    bias = -log_f.cumsum(0).repeat_interleave(2, dim=1)
    expected = softmax_average(q, k, v, bias)
    torch.testing.assert_close(y, project_back(attn, expected))


def test_sink_is_a_term_of_the_denominator():
    _, (attn, x, y) = run_layers("sink")
    q, k, v = project(attn, x)
    expected = softmax_average(q, k, v, sink=attn.sink_bias)
    torch.testing.assert_close(y, project_back(attn, expected))
