"""Every backend compared with naive, and naive compared with the formula."""

import math
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from attention_helpers import (
    DTYPES,
    REQUEST,
    REQUEST_CUDA,
    backends_on,
    check_agreement,
    choose,
    compare_with_naive,
    per_device,
    random_masks,
    random_qkv,
    resolve_or_skip,
)
from helpers import ON_CPU
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from model.attention import (
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

HEADS = [(1, 1), (2, 2), (4, 2), (3, 1)]  # H, G
MASK_CHANGES = {
    "causal": {},
    "window": {"window": 3},
    "documents": {"document_mask": True},
    "positions": {"positions": True},
}


def assert_equal_to_naive(attend, qkv, **masks) -> None:
    torch.testing.assert_close(attend(*qkv, **masks), naive(*qkv, **masks), atol=2e-6, rtol=1e-5)


# naive


def attention_by_loops(q, k, v, window, positions, doc_ids, softcap):
    """Attention by its definition, in float64, one query at a time."""
    B, Tq, H, D = q.shape
    Tk, G = k.shape[1:3]
    y = torch.zeros(B, Tq, H, v.shape[-1], dtype=torch.float64)
    for b in range(B):
        for i in range(Tq):
            position = Tk - Tq + i if positions is None else int(positions[b, i])
            keys = [j for j in range(position + 1) if window is None or position - j < window]
            keys = [j for j in keys if doc_ids is None or doc_ids[b, position] == doc_ids[b, j]]
            for h in range(H):
                g = h // (H // G)
                query = q[b, i, h].double()
                scores = torch.stack([query @ k[b, j, g].double() for j in keys]) / math.sqrt(D)
                if softcap is not None:
                    scores = softcap * (scores / softcap).tanh()
                for weight, j in zip(scores.softmax(0), keys, strict=True):
                    y[b, i, h] += weight * v[b, j, g].double()
    return y


@settings(max_examples=25, deadline=None)
@given(
    Tk=st.integers(1, 9),
    missing=st.integers(0, 8),
    heads=st.sampled_from(HEADS),
    window=st.none() | st.integers(1, 5),
    document_mask=st.booleans(),
    positions=st.booleans(),
    softcap=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 99),
)
def test_naive_follows_the_definition(Tk, missing, heads, seed, **options):
    Tq = max(1, Tk - missing)
    H, G = heads
    request = replace(REQUEST, Tq=Tq, Tk=Tk, H=H, G=G, D=4, Dv=6, grad=False, **options)
    qkv = random_qkv(request, seed)
    masks = random_masks(request, seed)
    y = naive(*qkv, **masks).double()
    torch.testing.assert_close(y, attention_by_loops(*qkv, **masks), atol=2e-6, rtol=1e-5)


# Comparison with naive


@st.composite
def requests(draw) -> AttentionRequest:
    Tk = draw(st.sampled_from([1, 7, 24, 64, 257]))
    H, G = draw(st.sampled_from(HEADS))
    D, Dv = draw(st.sampled_from([(16, 16), (8, 8), (16, 8)]))
    return AttentionRequest(
        B=2,
        Tq=draw(st.sampled_from([Tk, 1, max(1, Tk // 2)])),
        Tk=Tk,
        H=H,
        G=G,
        D=D,
        Dv=Dv,
        dtype=draw(st.sampled_from(list(DTYPES.values()))),
        device=REQUEST.device,
        grad=draw(st.booleans()),
        window=draw(st.sampled_from([None, 1, 5, 100, 300])),
        document_mask=draw(st.booleans()),
        positions=draw(st.booleans()),
        softcap=draw(st.sampled_from([None, None, 0.5])),
    )


@pytest.mark.parametrize("name", ON_CPU)
@settings(max_examples=60, deadline=None)
@given(drawn_request=requests(), seed=st.integers(0, 99))
def test_backend_agrees_with_naive_or_refuses(name, drawn_request, seed):
    compare_with_naive(name, drawn_request, seed)


@pytest.mark.parametrize(
    "changed",
    [{}, {"window": 20}, {"document_mask": True}, {"positions": True}, {"G": 2}],
    ids=["causal", "window", "documents", "positions", "grouped"],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "name"), per_device(cpu=ON_CPU, cuda=backends_on("cuda")))
def test_backend_agrees_with_naive_or_refuses_for_each_dtype(device, name, dtype, changed):
    """With as many queries as keys, one query, some queries, and a single key."""
    base = REQUEST_CUDA if device.type == "cuda" else replace(REQUEST, G=4)
    T = 2 * base.Tk + 1
    for Tq, Tk in ((T, T), (1, T), (base.Tq, T), (1, 1)):
        request = replace(base, Tq=Tq, Tk=Tk, dtype=DTYPES[dtype], **changed)
        compare_with_naive(name, request, seed=3)


@pytest.mark.parametrize(
    ("device", "config"),
    per_device(
        cpu=[choose("naive"), choose("sdpa")],
        cuda=[choose("naive"), choose("flash"), choose("cudnn"), choose("sdpa", ["efficient"])],
    ),
)
def test_dropout_keeps_the_mean(device, config):
    base = REQUEST_CUDA if device.type == "cuda" else REQUEST
    request = replace(base, Tq=64, Tk=64, grad=False, dropout_p=0.25)
    resolve_or_skip(config, request)
    q, k, v = random_qkv(request)
    ones = torch.ones_like(v)
    attend = get_attention_fn(config)
    torch.manual_seed(0)
    outputs = torch.stack([attend(q, k, ones, dropout_p=0.25).float() for _ in range(50)])
    assert abs(outputs.mean() - 1) < 0.03
    assert outputs.std() > 0.01, "nothing was dropped"


# sdpa, flash and cudnn


@pytest.fixture
def sdpa_calls(monkeypatch) -> list[tuple]:
    """The arguments of _sdpa, which is not called. Fake tensors need no GPU."""
    calls = []

    def record(q, *arguments):
        calls.append((q, *arguments))
        return q

    monkeypatch.setattr(backends, "_sdpa", record)
    return calls


def call_sdpa_on_cuda(dtype=torch.bfloat16, Tq=9, **options) -> None:
    with FakeTensorMode():
        q = torch.empty(1, Tq, 4, 8, dtype=dtype, device="cuda")
        k = torch.empty(1, 9, 2, 8, dtype=dtype, device="cuda")
        backends.sdpa(q, k, k, **options)


@pytest.mark.parametrize(
    ("changed", "heads"),
    [
        ({}, 2),
        ({"window": 9}, 2),
        ({"window": 3}, 4),
        ({"positions": torch.zeros(1, 9)}, 4),
        ({"doc_ids": torch.zeros(1, 9)}, 4),
        ({"dtype": torch.float32}, 4),
    ],
    ids=["plain", "full window", "window", "positions", "documents", "float32"],
)
def test_sdpa_on_cuda_repeats_heads_for_the_efficient_kernel(sdpa_calls, changed, heads):
    call_sdpa_on_cuda(**changed)
    _, k, v, *_ = sdpa_calls[0]
    assert k.shape[2] == v.shape[2] == heads


@pytest.mark.parametrize(
    ("Tq", "kernels", "allowed"),
    [(9, None, None), (1, None, ["flash", "efficient", "math"]), (1, ["cudnn"], ["cudnn"])],
    ids=["training", "decoding", "decoding with chosen kernels"],
)
def test_sdpa_on_cuda_decodes_without_cudnn(sdpa_calls, Tq, kernels, allowed):
    call_sdpa_on_cuda(Tq=Tq, kernels=kernels)
    expected = None if allowed is None else [KERNELS[name] for name in allowed]
    assert sdpa_calls[0][-1] == expected


@pytest.mark.parametrize(("T", "num_keys"), [(1, 128), (5, 128), (129, 256)])
@pytest.mark.parametrize("changed", MASK_CHANGES.values(), ids=MASK_CHANGES)
def test_cudnn_decodes_with_a_multiple_of_128_keys(monkeypatch, changed, T, num_keys):
    """Runs on a CPU: the math kernel replaces cuDNN's kernel."""
    monkeypatch.setitem(KERNELS, "cudnn", SDPBackend.MATH)
    scaled_dot_product_attention = Mock(wraps=F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", scaled_dot_product_attention)
    request = replace(REQUEST, Tq=1, Tk=T, **changed)
    assert_equal_to_naive(cudnn, random_qkv(request), **random_masks(request))
    k = scaled_dot_product_attention.call_args.args[1]
    assert k.shape[2] == num_keys


def test_flash_does_not_fall_back():
    q, k, v = random_qkv(replace(REQUEST, Dv=4))
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="No available kernel"):
        flash(q, k, v)


# flex


def test_flex_does_not_ignore_dropout():
    with pytest.raises(ValueError, match="not support dropout"):
        flex(*random_qkv(REQUEST), dropout_p=0.1)


@pytest.fixture
def block_masks():
    """The cache of FlexAttention's masks, which is empty."""
    backends._cached_block_mask.cache_clear()
    return backends._cached_block_mask


def test_flex_builds_a_mask_once_for_all_layers(block_masks):
    request = replace(REQUEST, document_mask=True, grad=False)
    qkv = random_qkv(request)
    doc_ids = random_masks(request)["doc_ids"]
    for _ in range(3):
        flex(*qkv, doc_ids=doc_ids)
    assert block_masks.cache_info().misses == 1


def test_flex_builds_a_mask_for_each_batch_of_documents(block_masks):
    request = replace(REQUEST, document_mask=True, grad=False)
    qkv = random_qkv(request)
    doc_ids = random_masks(request)["doc_ids"]
    flex(*qkv, doc_ids=doc_ids)
    assert_equal_to_naive(flex, qkv, doc_ids=doc_ids.flip(0))
    assert block_masks.cache_info().misses == 2


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_masks_of_flex_are_right_for_positions_and_documents(window, document_mask, positions):
    """The support table allows these masks on CUDA only. Here, PyTorch does not compile them."""
    request = replace(
        REQUEST,
        Tq=5,
        Tk=32,
        grad=False,
        window=window,
        document_mask=document_mask,
        positions=positions,
    )
    assert_equal_to_naive(flex, random_qkv(request), **random_masks(request))


@pytest.mark.slow
@pytest.mark.compiles
def test_resolved_flex_kernel_runs():
    request = replace(REQUEST, Tq=140, Tk=140, G=1, D=16, Dv=32, grad=False, window=20)
    assert resolve(choose("flex"), request).resolved == "flex"
    qkv = random_qkv(request)
    flex(*qkv, window=20)  # compiles
    with torch.profiler.profile() as profiler:
        flex(*qkv, window=20)
    events = " ".join(event.key for event in profiler.key_averages())
    assert "CompiledFxGraph" in events
    assert "softmax" not in events


FLEX_CASES = [({}, False), ({"window": 40}, False), ({}, True), ({"window": 40}, True)]
FLEX_CASES_CUDA = [*FLEX_CASES, ({"document_mask": True}, False), ({"document_mask": True}, True)]


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize(("device", "case"), per_device(cpu=FLEX_CASES, cuda=FLEX_CASES_CUDA))
def test_flex_agrees_with_naive_alone_and_inside_a_compiled_function(device, case):
    changed, is_compiled = case
    request = replace(
        REQUEST_CUDA,
        Tq=300,
        Tk=300,
        dtype=torch.float32,
        device=device,
        grad=device.type == "cuda",
        **changed,
    )
    attend = torch.compile(flex, fullgraph=True) if is_compiled else flex
    check_agreement(attend, request, seed=5)


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("Tk", [24, 25])
def test_flex_is_right_for_one_query_and_odd_multiples_of_8_keys(Tk):
    """Without padding, Inductor 2.13 gives wrong results for one query and 8, 24, 40, ... keys."""
    compare_with_naive("flex", replace(REQUEST, Tq=1, Tk=Tk, grad=False), seed=3)


@pytest.mark.slow
@pytest.mark.compiles
def test_flex_is_right_when_compiled_with_the_code_that_computes_q_and_k():
    """Without contiguous(), Inductor 2.13 fuses that code into the kernel, with wrong results."""
    q, k, v = random_qkv(replace(REQUEST, Tq=64, Tk=64, D=16, Dv=16, grad=False))
    packed = torch.cat((q, k, v), dim=2)

    def layer(packed):
        q, k, v = packed.split((4, 2, 2), dim=2)
        return flex(q * 1.5, k * 1.5, v, window=20)

    y = torch.compile(layer, fullgraph=True)(packed)
    expected = naive(q * 1.5, k * 1.5, v, window=20)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.compiles
def test_flex_with_a_softcap_compiles_once():
    """Each call has a new function for the softcap."""
    request = replace(REQUEST, Tq=64, Tk=64, D=16, Dv=16, grad=False, softcap=0.5)
    check_agreement(flex, request, seed=6)
    torch._dynamo.utils.counters.clear()
    check_agreement(flex, request, seed=7)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
