"""Every backend compared with naive, and naive compared with the formula."""

import math
from dataclasses import replace
from unittest.mock import Mock

import attention_helpers
import pytest
import torch
import torch.nn.functional as F
from attention_helpers import (
    DTYPES,
    REQUEST,
    REQUEST_CUDA,
    choose,
    compare_with_naive,
    random_masks,
    random_qkv,
)
from helpers import ON_CPU
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from model.attention import (
    BACKENDS,
    AttentionRequest,
    backends,
    cudnn,
    flash,
    flex,
    get_attention_fn,
    naive,
    resolve,
)
from model.attention.backends import KERNELS
from model.attention.support import FEATURES, missing_feature


def attention_by_loops(q, k, v, window, positions, doc_ids, softcap):
    """Attention by its definition, in float64, one query at a time."""
    B, Tq, H, D = q.shape
    Tk = k.shape[1]
    y = torch.zeros(B, Tq, H, v.shape[-1], dtype=torch.float64)
    for b in range(B):
        for i in range(Tq):
            position = Tk - Tq + i if positions is None else int(positions[b, i])
            keys = [j for j in range(position + 1) if window is None or position - j < window]
            keys = [j for j in keys if doc_ids is None or doc_ids[b, position] == doc_ids[b, j]]
            for h in range(H):
                g = h // (H // k.shape[2])
                scores = torch.stack(
                    [q[b, i, h].double() @ k[b, j, g].double() for j in keys]
                ) / math.sqrt(D)
                if softcap is not None:
                    scores = softcap * (scores / softcap).tanh()
                y[b, i, h] = sum(
                    w * v[b, j, g].double() for w, j in zip(scores.softmax(0), keys, strict=True)
                )
    return y


@settings(max_examples=25, deadline=None)
@given(
    Tk=st.integers(1, 9), missing=st.integers(0, 8), heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    window=st.none() | st.integers(1, 5), document_mask=st.booleans(), positions=st.booleans(),
    softcap=st.sampled_from([None, 0.5]), seed=st.integers(0, 99),
)  # fmt: skip
def test_naive_follows_the_definition(
    Tk, missing, heads, window, document_mask, positions, softcap, seed
):
    request = replace(
        REQUEST, Tq=max(1, Tk - missing), Tk=Tk, H=heads[0], G=heads[1], D=4, Dv=6, grad=False, window=window,
        document_mask=document_mask, positions=positions, softcap=softcap,
    )  # fmt: skip
    qkv, masks = random_qkv(request, seed), random_masks(request, seed)
    torch.testing.assert_close(
        naive(*qkv, **masks).double(), attention_by_loops(*qkv, **masks), atol=2e-6, rtol=1e-5
    )


# Comparison with naive


@st.composite
def requests(draw) -> AttentionRequest:
    T = draw(st.sampled_from([1, 7, 24, 64, 257]))
    H, G = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]))
    D, Dv = draw(st.sampled_from([(16, 16), (8, 8), (16, 8)]))
    return AttentionRequest(
        B=2, Tq=draw(st.sampled_from([T, 1, max(1, T // 2)])), Tk=T, H=H, G=G, D=D, Dv=Dv,
        dtype=draw(st.sampled_from(list(DTYPES.values()))), device=REQUEST.device, grad=draw(st.booleans()),
        window=draw(st.sampled_from([None, 1, 5, 100, 300])), document_mask=draw(st.booleans()),
        positions=draw(st.booleans()), softcap=draw(st.sampled_from([None, None, 0.5])),
    )  # fmt: skip


@pytest.mark.parametrize("name", ON_CPU)
@settings(max_examples=60, deadline=None)
@given(drawn_request=requests(), seed=st.integers(0, 99))
def test_backend_agrees_with_naive_or_refuses(name, drawn_request, seed):
    compare_with_naive(name, drawn_request, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("device", "name"),
    attention_helpers.per_device(cpu=ON_CPU, cuda=attention_helpers.backends_on("cuda")),
)
def test_backend_agrees_with_naive_or_refuses_for_each_dtype(device, name, dtype):
    base = REQUEST_CUDA if device.type == "cuda" else replace(REQUEST, G=4)
    T = 2 * base.Tk + 1
    for Tq, Tk in ((T, T), (1, T), (base.Tq, T), (1, 1)):
        for changed in ({}, {"window": 20}, {"document_mask": True}, {"positions": True}, {"G": 2}):
            compare_with_naive(
                name, replace(base, Tq=Tq, Tk=Tk, dtype=DTYPES[dtype], **changed), seed=3
            )


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_works_or_is_refused(name, feature):
    """Tests one feature at a time, independent of what hypothesis draws."""
    changed = {
        "gradients": {"grad": True}, "dropout": {"dropout_p": 0.5}, "gqa": {"G": 1}, "window": {"window": 3},
        "document_mask": {"document_mask": True}, "positions": {"positions": True}, "different_value_dim": {"Dv": 4},
        "softcap": {"softcap": 0.5},
    }[feature]  # fmt: skip
    request = replace(REQUEST, **{"G": 4, "grad": False} | changed)
    is_supported = getattr(BACKENDS[name].on["cpu"], feature)
    assert FEATURES[feature].is_requested(request)
    assert (missing_feature(BACKENDS[name], request) is None) == is_supported
    if not (
        is_supported and feature == "dropout"
    ):  # dropout is random: see test_dropout_keeps_the_mean
        compare_with_naive(name, request, seed=1)


@pytest.mark.parametrize("name", [name for name in ON_CPU if BACKENDS[name].on["cpu"].gradients])
def test_backend_is_causal_by_gradient(name):
    """Output i depends on every key and value up to i, and on no later one."""
    q, k, v = random_qkv(replace(REQUEST, B=1, Tq=6, Tk=6, G=4))
    y = BACKENDS[name].attend(q, k, v)
    for i in range(6):
        dk, dv = torch.autograd.grad(y[:, i].pow(2).sum(), (k, v), retain_graph=True)
        for gradient in (dk, dv):
            reached = gradient.abs().sum(dim=(0, 2, 3)) > 0
            first = 1 if i == 0 and gradient is dk else 0  # a single key always has weight one
            assert reached[first : i + 1].all() and not reached[i + 1 :].any()


@pytest.mark.parametrize(
    ("device", "config"),
    attention_helpers.per_device(
        cpu=[choose("naive"), choose("sdpa")],
        cuda=[choose("naive"), choose("flash"), choose("cudnn"), choose("sdpa", ["efficient"])],
    ),
)
def test_dropout_keeps_the_mean(device, config):
    request = replace(
        REQUEST_CUDA if device.type == "cuda" else REQUEST, Tq=64, Tk=64, grad=False, dropout_p=0.25
    )
    q, k, v = random_qkv(request)
    attention_helpers.resolve_or_skip(config, request)
    attend = get_attention_fn(config)
    torch.manual_seed(0)
    outputs = torch.stack(
        [attend(q, k, torch.ones_like(v), dropout_p=0.25).float() for _ in range(50)]
    )
    assert abs(outputs.mean() - 1) < 0.03
    assert outputs.std() > 0.01, "nothing was dropped"


# Single backends


def test_cudnn_decodes_with_a_multiple_of_128_keys(monkeypatch):
    """Runs on a CPU: the math kernel replaces cuDNN's kernel."""
    monkeypatch.setitem(KERNELS, "cudnn", SDPBackend.MATH)
    attend = Mock(wraps=F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    for changed in ({}, {"window": 3}, {"document_mask": True}, {"positions": True}):
        for T in (1, 5, 129):
            request = replace(REQUEST, Tq=1, Tk=T, **changed)
            qkv, masks = random_qkv(request), random_masks(request)
            torch.testing.assert_close(
                cudnn(*qkv, **masks), naive(*qkv, **masks), atol=2e-6, rtol=1e-5
            )
    assert {call.args[1].shape[2] for call in attend.call_args_list} == {128, 256}


def test_sdpa_on_cuda_decodes_without_cudnn_and_repeats_heads_for_the_efficient_kernel(monkeypatch):
    """Fake tensors need no GPU."""
    calls = []
    monkeypatch.setattr(
        backends, "_sdpa", lambda q, k, v, *options: calls.append((k.shape[2], options[-1])) or q
    )
    with FakeTensorMode():
        for dtype, Tq, kernels, masks in (
            (torch.bfloat16, 9, None, {}), (torch.bfloat16, 9, None, {"window": 3}), (torch.float32, 9, None, {}),
            (torch.bfloat16, 1, None, {}), (torch.bfloat16, 1, ["cudnn"], {}),
        ):  # fmt: skip
            options = {"dtype": dtype, "device": REQUEST_CUDA.device}
            q, k = torch.empty(1, Tq, 4, 8, **options), torch.empty(1, 9, 2, 8, **options)
            backends.sdpa(q, k, k, kernels=kernels, **masks)
    heads, (*_, decoding, chosen) = zip(*calls, strict=True)
    assert heads == (2, 4, 4, 2, 2)
    assert decoding == [KERNELS[name] for name in ("flash", "efficient", "math")] and chosen == [
        KERNELS["cudnn"]
    ]


def test_flash_and_flex_raise_errors_and_do_not_fall_back():
    q, k, v = random_qkv(replace(REQUEST, Dv=4))
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="No available kernel"):
        flash(q, k, v)
    with pytest.raises(ValueError, match="not support dropout"):
        flex(q, k, v, dropout_p=0.1)


def test_flex_builds_a_mask_once_for_all_layers_and_again_for_other_doc_ids():
    masks = backends._cached_block_mask
    masks.cache_clear()
    request = replace(REQUEST, document_mask=True, grad=False)
    qkv, doc_ids = random_qkv(request), random_masks(request)["doc_ids"]
    for _ in range(3):  # as the layers of a model
        flex(*qkv, doc_ids=doc_ids)
    assert masks.cache_info().misses == 1
    flex(*qkv, doc_ids=doc_ids, window=3)
    assert masks.cache_info().misses == 2
    other = doc_ids.flip(0)
    torch.testing.assert_close(
        flex(*qkv, doc_ids=other), naive(*qkv, doc_ids=other), atol=2e-6, rtol=1e-5
    )
    assert masks.cache_info().misses == 3


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_masks_of_flex_are_right_for_positions_and_documents(window, document_mask):
    """The support table allows these masks on CUDA only. Here, PyTorch computes FlexAttention without compiling it."""
    request = replace(REQUEST, Tq=5, Tk=32, grad=False, window=window, document_mask=document_mask)
    for positions in (False, True):
        qkv, masks = random_qkv(request), random_masks(replace(request, positions=positions))
        torch.testing.assert_close(flex(*qkv, **masks), naive(*qkv, **masks), atol=2e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.compiles
def test_compiled_flex_agrees_with_naive_and_is_the_kernel_that_runs():
    request = replace(REQUEST, Tq=140, Tk=140, G=1, D=16, Dv=32, grad=False, window=20)
    compare_with_naive("flex", request, seed=2)
    qkv, masks = random_qkv(request), random_masks(request)
    with torch.profiler.profile() as profiler:
        flex(*qkv, **masks)
    events = " ".join(event.key for event in profiler.key_averages())
    assert resolve(choose("flex"), request).resolved == "flex"
    assert "CompiledFxGraph" in events and "softmax" not in events


FLEX_CASES = [({}, False), ({"window": 40}, False), ({}, True), ({"window": 40}, True)]
FLEX_CASES_CUDA = [*FLEX_CASES, ({"document_mask": True}, False), ({"document_mask": True}, True)]


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("device", "case"), attention_helpers.per_device(cpu=FLEX_CASES, cuda=FLEX_CASES_CUDA)
)
def test_flex_agrees_with_naive_alone_and_inside_a_compiled_function(device, case):
    changed, is_compiled = case
    request = replace(REQUEST_CUDA, Tq=300, Tk=300, dtype=torch.float32, device=device, **changed)
    attend = torch.compile(flex, fullgraph=True) if is_compiled else None
    compare_with_naive("flex", replace(request, grad=device.type == "cuda"), seed=5, attend=attend)


@pytest.mark.slow
@pytest.mark.compiles
def test_flex_is_right_for_one_query_and_odd_multiples_of_8_keys():
    """Without padding, Inductor 2.13 gives wrong results for one query and 8, 24, 40, ... keys."""
    for Tk in (24, 25):
        compare_with_naive("flex", replace(REQUEST, Tq=1, Tk=Tk, grad=False), seed=3)


@pytest.mark.gpu
@pytest.mark.compiles
@pytest.mark.parametrize(
    "sizes",
    [
        [{"B": B, "Tq": 1, "Tk": 32, "positions": True} for B in (4, 3)],
        [{"Tq": T, "Tk": T, "document_mask": True, "window": 5} for T in (16, 32)],
    ],
    ids=["positions", "doc_ids"],
)
def test_flex_compiles_for_masks_of_different_sizes(sizes):
    for changed in sizes:
        compare_with_naive("flex", replace(REQUEST_CUDA, grad=False, **changed), seed=4)


@pytest.mark.slow
@pytest.mark.compiles
def test_flex_is_right_when_compiled_with_the_code_that_computes_q_and_k():
    """Without contiguous(), Inductor 2.13 fuses that code into the kernel and gives wrong results."""
    q, k, v = random_qkv(replace(REQUEST, Tq=64, Tk=64, D=16, Dv=16, grad=False))
    packed = torch.cat((q, k, v), dim=2)

    def layer(packed):
        q, k, v = packed.split((4, 2, 2), dim=2)
        return flex(q * 1.5, k * 1.5, v, window=20)

    expected = naive(q * 1.5, k * 1.5, v, window=20)
    torch.testing.assert_close(
        torch.compile(layer, fullgraph=True)(packed), expected, atol=1e-5, rtol=1e-4
    )
