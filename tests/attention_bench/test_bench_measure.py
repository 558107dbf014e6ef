"""Measurements of a bench: inputs, the float64 reference, errors, training steps and memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_helpers import CONFIG, CPU, make_case
from torch._dynamo.utils import counters

from attention_bench import measure as measure_module
from attention_bench.cases import Case, build_groups
from attention_bench.measure import make_attention_call, make_inputs, measure, write_reference
from attention_bench.results import Timing
from attention_bench.worker import Worker
from model.attention import linear_attention_scores

NO_REFERENCE = Path("missing.pt")
NEEDS_PEAK_MEMORY = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is known on Linux only"
)


@pytest.fixture
def reference(tmp_path) -> Path:
    return tmp_path / "reference.pt"


def measure_with_reference(case: Case, reference: Path) -> Timing:
    write_reference(case, CONFIG.seed, reference)
    row, _ = measure(case, CONFIG, reference)
    return row


def build_case(phase: str, mask: str, backend: str) -> Case:
    changes = {"phases": [phase], "masks": [mask], "block_sizes": [20], "backends": [backend]}
    ((case,),) = build_groups(replace(CONFIG, **changes), CPU)
    return case


@pytest.mark.parametrize("backend", ["naive", "sdpa"])
@pytest.mark.parametrize("mask", ["causal", "window:5", "documents:3"])
@pytest.mark.parametrize("phase", ["forward", "forward+backward", "decode"])
def test_output_is_that_of_the_reference(phase, mask, backend, reference):
    row = measure_with_reference(build_case(phase, mask, backend), reference)
    assert row.error_y < 5e-6


@pytest.mark.parametrize("mask", ["window:5", "documents:3"])
@pytest.mark.parametrize("phase", ["forward", "decode"])
def test_reference_without_the_mask_differs(phase, mask, reference):
    case = build_case(phase, mask, "naive")
    request = replace(case.request, window=None, document_mask=False)
    write_reference(replace(case, mask="causal", request=request), CONFIG.seed, reference)
    row, _ = measure(case, CONFIG, reference)
    assert row.error_y > 1e-3


@pytest.mark.parametrize("backend", ["naive", "sdpa"])
@pytest.mark.parametrize("mask", ["causal", "window:5", "documents:3"])
def test_gradients_are_those_of_the_reference(mask, backend, reference):
    row = measure_with_reference(build_case("forward+backward", mask, backend), reference)
    assert row.error_gradients < 5e-6


def test_errors_show_the_rounding_of_the_dtype(reference):
    row = measure_with_reference(make_case("forward+backward", dtype=torch.bfloat16), reference)
    assert 1e-4 < row.error_y < 0.1
    assert 1e-4 < row.error_gradients < 0.1


@pytest.mark.parametrize("wrong", ["dq", "dk", "dv"])
def test_error_of_the_gradients_is_the_largest_one(wrong, reference):
    case = make_case("forward+backward")
    write_reference(case, CONFIG.seed, reference)
    outputs = torch.load(reference)
    outputs[["y", "dq", "dk", "dv"].index(wrong)][0, 3, 1, 2] += 5.0
    torch.save(outputs, reference)
    row, _ = measure(case, CONFIG, reference)
    assert row.error_gradients == pytest.approx(5.0, abs=1e-3)
    assert row.error_y < 5e-6


def test_nan_is_the_error_of_an_output_with_nan(reference, monkeypatch):
    def broken(q, k, v, **masks):
        return q[..., : v.shape[3]] * float("nan")

    monkeypatch.setattr(measure_module, "get_attention_fn", lambda config: broken)
    row = measure_with_reference(make_case(), reference)
    assert row.error_y != row.error_y


@pytest.mark.parametrize("phase", ["forward", "decode"])
def test_phase_without_gradients_has_no_error_of_them(phase, reference):
    assert measure_with_reference(make_case(phase), reference).error_gradients is None


def test_errors_are_unknown_without_a_reference():
    row, _ = measure(make_case("forward+backward"), CONFIG, NO_REFERENCE)
    assert row.error_y is None
    assert row.error_gradients is None


def test_a_turn_has_at_least_the_repeats():
    _, seconds = measure(make_case(), replace(CONFIG, repeats=7, seconds=1e-9), NO_REFERENCE)
    assert len(seconds) >= 7


def test_calls_use_new_inputs_until_the_caches_are_full(monkeypatch):
    def return_queries(q, k, v, **masks):
        return q

    case = make_case()
    input_bytes = 100_000
    monkeypatch.setattr(measure_module, "INPUT_BYTES", input_bytes)
    monkeypatch.setattr(measure_module, "get_attention_fn", lambda config: return_queries)
    _, call = make_attention_call(case, CONFIG)
    pointers = [call()[0].data_ptr() for _ in range(50)]
    period = pointers.index(pointers[0], 1)  # calls until the first inputs are used again
    assert len(set(pointers)) == period
    assert period * sum(tensor.nbytes for tensor in make_inputs(case, CONFIG.seed)) > input_bytes


def test_inputs_of_decode_have_the_layout_of_the_kv_cache():
    _, k, v, _ = make_inputs(make_case("decode"), CONFIG.seed)
    assert k.transpose(1, 2).is_contiguous()
    assert v.transpose(1, 2).is_contiguous()


def test_linear_attention_decodes_with_a_state():
    case = make_case("decode", "linear", T=100, Dv=8)
    q, k, v, _ = make_inputs(case, CONFIG.seed)
    _, call = make_attention_call(case, CONFIG)
    weights = linear_attention_scores(q, k).softmax(-1)
    values = v.repeat_interleave(2, dim=2).transpose(1, 2)
    torch.testing.assert_close(call()[0], (weights @ values).transpose(1, 2))


@pytest.mark.parametrize("phase", ["forward", "forward+backward", "decode"])
def test_linear_attention_is_not_compared_with_the_reference(phase, reference):
    row = measure_with_reference(make_case(phase, "linear", Dv=8), reference)
    assert (row.resolved, row.error_y) == ("linear", None)


def measure_step(name: str = "none", **changes) -> Timing:
    """A step of a model with shared key/value heads. changes: of the model."""
    model = replace(CONFIG.model, n_head=4, n_kv_head=2, **changes)
    case = replace(make_case("step", "flash"), name=name)
    row, _ = measure(case, replace(CONFIG, model=model), NO_REFERENCE)
    return row


def test_step_has_the_kernel_that_ran():
    assert measure_step("flash").resolved == "flash"


def test_step_with_linear_attention_has_its_kernel():
    row, _ = measure(make_case("step", "linear"), CONFIG, NO_REFERENCE)
    assert row.resolved == "linear"


def test_step_without_attention_has_no_kernel():
    assert measure_step().resolved == "none"


def test_step_without_attention_runs_with_settings_that_the_backend_refuses():
    assert measure_step(dropout=0.1).status == "finished"


def test_step_without_attention_keeps_the_gradients_of_all_weights():
    q, k, v = (torch.randn(2, 5, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    y = measure_module._no_attention(q, k, v, window=None)
    assert y.shape == q.shape
    gradients = torch.autograd.grad(y.sum(), (q, k, v))
    assert all(gradient.abs().min() > 0 for gradient in gradients)


@pytest.fixture
def measure_peak(tmp_path):
    """measure_peak(case) returns the peak memory in bytes. All cases have one process."""
    worker = Worker(tmp_path)

    def measure_in_worker(case: Case, config=CONFIG) -> int:
        arguments = case, config, NO_REFERENCE
        _, (row, _) = worker.call(measure, *arguments, time_limit=CONFIG.time_limit)
        return row.peak_memory_bytes

    yield measure_in_worker
    worker.close()


NAIVE = make_case("forward+backward", T=2048, B=1, H=2, G=2, D=32, Dv=32)
SCORES_BYTES = 2 * 2048**2 * 4


def make_flash(T: int) -> Case:
    return make_case("forward", "flash", T=T, B=1, H=2, G=2, D=64, Dv=64)


@NEEDS_PEAK_MEMORY
@pytest.mark.slow
def test_naive_attention_needs_three_matrices_of_scores(measure_peak):
    # the weights, their gradients, and the gradients of the scores
    assert measure_peak(NAIVE) == pytest.approx(3 * SCORES_BYTES, rel=0.2)


@NEEDS_PEAK_MEMORY
@pytest.mark.slow
def test_memory_of_flash_grows_with_its_output(measure_peak):
    long, short = (measure_peak(make_flash(T)) for T in (8192, 4096))
    output_bytes = 2 * 64 * 4  # of a token
    assert long - short == pytest.approx(4096 * output_bytes, rel=0.35)


@NEEDS_PEAK_MEMORY
@pytest.mark.slow
def test_peak_memory_does_not_depend_on_earlier_cases_of_the_process(measure_peak):
    measure_peak(make_flash(8192))
    assert measure_peak(NAIVE) == pytest.approx(3 * SCORES_BYTES, rel=0.2)


@NEEDS_PEAK_MEMORY
@pytest.mark.slow
def test_memory_of_a_step_has_the_gradients_but_not_the_weights(measure_peak):
    model = replace(CONFIG.model, n_layer=1, max_ngram=1)
    config = replace(CONFIG, model=model, vocab_size=2**17)
    weight_bytes = 2 * 2**17 * model.n_embd * 4  # of embedding and head
    peak = measure_peak(make_case("step", T=8, B=1), config)
    assert weight_bytes < peak < 1.5 * weight_bytes


@pytest.mark.compiles
@pytest.mark.slow
def test_each_case_compiles_for_its_shapes():
    """Without a reset, torch.compile would switch to dynamic shapes at the second T."""
    before = counters["stats"]["unique_graphs"]
    for T in (16, 32, 48):
        measure(make_case("forward", "flex", T=T, G=4, D=16, Dv=16), CONFIG, NO_REFERENCE)
    assert counters["stats"]["unique_graphs"] - before == 3
