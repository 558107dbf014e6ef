"""Cases of a bench: which combinations are measured, and their FLOPs."""

from dataclasses import replace

import pytest
import torch
from bench_helpers import CONFIG, CPU, make_case
from helpers import TRAINS_ON_CPU
from hypothesis import given
from hypothesis import strategies as st

from attention_bench.cases import Case, build_groups, count_flops
from attention_bench.config import BenchConfig, parse_mask
from model.attention import attention_mask
from model.flops import flops_per_token, weight_flops_per_token


def build(**changes) -> list[list[Case]]:
    return build_groups(replace(CONFIG, **changes), CPU)


def test_a_group_has_a_case_per_backend():
    (group,) = build(backends=["naive", "sdpa:math"], phases=["forward"], block_sizes=[16])
    assert [case.name for case in group] == ["naive", "sdpa:math"]


def test_contexts_are_measured_from_short_to_long():
    groups = build(phases=["forward"], block_sizes=[32, 8, 16])
    assert [group[0].request.Tk for group in groups] == [8, 16, 32]


def test_default_backends_are_those_that_train_on_the_device():
    (group,) = build(phases=["forward"], block_sizes=[16])
    assert [case.name for case in group] == TRAINS_ON_CPU


@pytest.mark.parametrize(
    ("batch_size", "phase", "T", "expected"),
    [
        (None, "step", 128, 16),
        (None, "forward", 512, 4),
        (None, "forward", 4096, 1),
        (None, "decode", 128, 1),
        (3, "step", 128, 3),
    ],
)
def test_default_batch_has_the_tokens_of_a_step_of_the_default_run(batch_size, phase, T, expected):
    assert BenchConfig(batch_size=batch_size).num_sequences(phase, T) == expected


def test_decode_has_one_query():
    (group,) = build(phases=["decode"], block_sizes=[16])
    assert {(case.request.Tq, case.request.Tk) for case in group} == {(1, 16)}


def test_two_names_of_one_dtype_are_measured_once():
    groups = build(phases=["forward"], block_sizes=[16], dtypes=["float32", "bfloat16", "auto"])
    assert [group[0].request.dtype for group in groups] == [torch.float32, torch.bfloat16]


def test_steps_have_the_mask_of_the_model():
    groups = build(phases=["step"], block_sizes=[16], masks=["window:5", "documents:4"])
    assert [group[0].mask for group in groups] == ["causal"]


def test_steps_are_also_measured_without_attention():
    (group,) = build(phases=["step"], block_sizes=[16], backends=["flash"])
    assert [case.name for case in group] == ["flash", "none"]


def test_shapes_default_to_those_of_the_model():
    model = replace(CONFIG.model, n_head=4, n_kv_head=2, n_embd=64)
    assert replace(CONFIG, model=model).kernel_shape() == (4, 2, 16, 16)


def test_shapes_can_be_set():
    config = replace(CONFIG, n_head=8, n_kv_head=4, head_size=32, value_size=16)
    assert config.kernel_shape() == (8, 4, 32, 16)


def test_key_value_heads_default_to_the_heads_that_are_set():
    model = replace(CONFIG.model, n_head=4, n_kv_head=2)
    assert replace(CONFIG, model=model, n_head=8).kernel_shape()[:2] == (8, 8)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("causal", (None, None)),
        ("window:256", (256, None)),
        ("documents:7", (None, 7)),
    ],
)
def test_masks_have_a_window_or_documents(mask, expected):
    assert parse_mask(mask) == expected


def test_document_ids_number_documents_of_equal_length():
    ids = make_case(T=7, mask="documents:3").doc_ids()
    assert ids.tolist() == 2 * [[0, 0, 0, 1, 1, 1, 2]]


@given(
    Tq=st.integers(1, 40),
    more=st.integers(0, 40),
    mask=st.sampled_from(["causal", "window:1", "window:7", "documents:1", "documents:9"]),
    phase=st.sampled_from(["forward", "forward+backward"]),
)
def test_flops_count_the_visible_keys(Tq, more, mask, phase):
    window, _ = parse_mask(mask)
    Tk = Tq + more
    case = make_case(phase, mask=mask, Tq=Tq, Tk=Tk, window=window)
    positions = torch.arange(more, Tk).expand(2, -1)
    masks = {"window": window, "positions": positions, "doc_ids": case.doc_ids()}
    visible_pairs = int(attention_mask(Tq, Tk, **masks)[0].sum())
    passes = {"forward": 1, "forward+backward": 3}[phase]
    r = case.request
    assert count_flops(case, CONFIG) == passes * 2 * r.H * visible_pairs * (2 * r.D + 2 * r.Dv)


def test_flops_of_a_step_are_those_of_the_model():
    model = CONFIG.model
    expected = 2 * 16 * flops_per_token(model, CONFIG.vocab_size, 16)
    assert count_flops(make_case("step"), CONFIG) == expected


def test_flops_of_a_step_have_the_context_of_the_case():
    """A window that is as long as the model's context is no window, but may be one here."""
    model = replace(CONFIG.model, block_size=8, window=12)
    expected = 2 * 16 * flops_per_token(replace(model, block_size=16), CONFIG.vocab_size, 16)
    assert count_flops(make_case("step"), replace(CONFIG, model=model)) == expected


def test_flops_of_a_step_with_linear_attention_are_those_of_its_model():
    model = replace(CONFIG.model, block_size=256, attention_type="linear")
    expected = 2 * 256 * flops_per_token(model, CONFIG.vocab_size, 256)
    assert count_flops(make_case("step", "linear", T=256), CONFIG) == expected


def test_flops_of_a_step_without_attention_are_those_of_the_weights():
    case = replace(make_case("step"), name="none")
    expected = 2 * 16 * weight_flops_per_token(CONFIG.model, CONFIG.vocab_size)
    assert count_flops(case, CONFIG) == expected
