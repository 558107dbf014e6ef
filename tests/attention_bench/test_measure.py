"""A case of a bench: the list of cases, inputs, the float64 reference, errors and memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_helpers import CONFIG, CPU, make_case
from helpers import TRAINS_ON_CPU

from attention_bench import measure as measure_module
from attention_bench.measure import (
    call_process,
    compute_reference,
    kill_processes,
    list_cases,
    make_call,
    make_inputs,
    measure,
)
from model.attention import linear_attention_scores

MASKS = ["causal", "window:5", "documents:3"]
PHASES = ["forward", "forward+backward", "decode"]


def build(**changes) -> list[list[dict]]:
    options = {"phases": ["forward"], "block_sizes": [16]} | changes
    return list_cases(replace(CONFIG, **options), CPU)


def test_contexts_are_measured_from_short_to_long():
    assert [group[0]["T"] for group in build(block_sizes=[32, 8, 16])] == [8, 16, 32]


def test_default_backends_are_those_that_train_on_the_device():
    (group,) = build()
    assert [case["backend"] for case in group] == TRAINS_ON_CPU


def test_auto_is_the_dtype_of_train(monkeypatch):
    monkeypatch.setattr(measure_module, "resolve_dtype", lambda name, device: torch.float16)
    assert make_case(dtypes=["auto"])["dtype"] == "float16"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, (4, 2, 8, 6)), ({"n_kv_head": None, "value_size": None}, (4, 4, 8, 8))],
)
def test_heads_default_to_each_other(changes, expected):
    case = make_case(**changes)
    assert (case["H"], case["G"], case["D"], case["Dv"]) == expected


@pytest.mark.parametrize(
    ("batch_size", "phase", "T", "expected"),
    [
        (None, "forward", 512, 4),
        (None, "forward", 4096, 1),
        (None, "decode", 128, 1),
        (3, "forward", 9, 3),
    ],
)
def test_default_batch_has_the_tokens_of_a_step_of_the_default_run(batch_size, phase, T, expected):
    assert make_case(phase, T=T, batch_size=batch_size)["B"] == expected


def test_inputs_of_decode_have_the_layout_of_the_kv_cache():
    (_, k, v, _), _ = make_inputs(make_case("decode"), CONFIG.seed)
    assert k.transpose(1, 2).is_contiguous()
    assert v.transpose(1, 2).is_contiguous()


def test_document_ids_number_documents_of_equal_length():
    _, masks = make_inputs(make_case(T=7, mask="documents:3"), CONFIG.seed)
    assert masks["doc_ids"].tolist() == 2 * [[0, 0, 0, 1, 1, 1, 2]]


@pytest.fixture(autouse=True)
def few_inputs(monkeypatch):
    """All calls of a case have the same inputs: 10,000 copies take most of the time."""
    monkeypatch.setattr(measure_module, "INPUT_BYTES", 1)


def measure_with_reference(case: dict) -> dict:
    row, _ = measure(case, CONFIG, compute_reference(case, CONFIG.seed))
    return row


@pytest.mark.parametrize("backend", ["naive", "sdpa"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("phase", PHASES)
def test_backends_compute_the_reference(phase, mask, backend):
    row = measure_with_reference(make_case(phase, backend, T=20, mask=mask))
    assert row["error_y"] < 5e-6
    assert (row["error_gradients"] is not None) == (phase == "forward+backward")
    assert (row["error_gradients"] or 0) < 5e-6


@pytest.mark.parametrize("mask", MASKS[1:])
def test_reference_has_the_mask(mask):
    reference = compute_reference(make_case(T=20), CONFIG.seed)
    row, _ = measure(make_case(T=20, mask=mask), CONFIG, reference)
    assert row["error_y"] > 1e-3


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_error_of_the_gradients_is_the_largest_one(wrong):
    case = make_case("forward+backward")
    reference = compute_reference(case, CONFIG.seed)
    reference[wrong][0, 3, 1, 2] += 5.0
    row, _ = measure(case, CONFIG, reference)
    assert row["error_gradients"] == pytest.approx(5.0, abs=1e-3)
    assert row["error_y"] < 5e-6


def test_row_has_the_kernel_that_ran():
    row, _ = measure(make_case(backend="sdpa", value_size=8), CONFIG)
    assert row["resolved"] == "flash"


def test_calls_use_new_inputs_until_the_caches_are_full(monkeypatch):
    def return_queries(q, k, v, **masks):
        return q

    case = make_case()
    input_bytes = 100_000
    monkeypatch.setattr(measure_module, "INPUT_BYTES", input_bytes)
    monkeypatch.setattr(measure_module, "get_attention_fn", lambda config: return_queries)
    call = make_call(case, CONFIG.seed)
    pointers = [call()[0].data_ptr() for _ in range(50)]
    period = pointers.index(pointers[0], 1)  # calls until the first inputs are used again
    inputs, _ = make_inputs(case, CONFIG.seed)
    assert len(set(pointers)) == period
    assert period * sum(tensor.nbytes for tensor in inputs) > input_bytes


def test_linear_attention_decodes():
    case = make_case("decode", "linear", T=100, value_size=8)
    (q, k, v, _), _ = make_inputs(case, CONFIG.seed)
    weights = linear_attention_scores(q, k).softmax(-1)
    expected = weights @ v.repeat_interleave(2, dim=2).transpose(1, 2)
    torch.testing.assert_close(make_call(case, CONFIG.seed)()[0], expected.transpose(1, 2))


@pytest.mark.parametrize("phase", PHASES)
def test_linear_attention_is_not_compared_with_the_reference(phase):
    row = measure_with_reference(make_case(phase, "linear", value_size=8))
    assert (row["resolved"], row["error_y"]) == ("linear", None)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is known on Linux only"
)
def test_peak_memory_is_that_of_a_call_and_not_of_the_call_before():
    heads = {"batch_size": 1, "n_head": 2, "n_kv_head": 2, "head_size": 64, "value_size": 64}
    flash = make_case(backend="flash", T=8192, **heads)
    naive = make_case("forward+backward", T=2048, **heads)
    pools: dict = {}
    peaks = []
    for case in (flash, naive):
        _, (row, _) = call_process(pools, "one", CONFIG.time_limit, measure, case, CONFIG)
        peaks.append(row["peak_memory_bytes"])
    kill_processes(pools)
    output = 2 * 8192 * 64 * 4
    scores = 2 * 2048**2 * 4  # the weights, their gradients, and the gradients of the scores
    assert peaks == [pytest.approx(output, rel=0.35), pytest.approx(3 * scores, rel=0.2)]


@pytest.mark.compiles
@pytest.mark.slow
def test_each_case_compiles_for_its_shapes():
    """Without a reset, torch.compile would switch to dynamic shapes at the second T."""
    from torch._dynamo.utils import counters  # takes seconds

    before = counters["stats"]["unique_graphs"]
    for T in (16, 32):
        case = make_case("forward", "flex", T=T, n_kv_head=4, head_size=16, value_size=16)
        measure(case, CONFIG)
    assert counters["stats"]["unique_graphs"] - before == 2
