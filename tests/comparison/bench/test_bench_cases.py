"""Measurements of a bench: workloads, inputs, the float64 reference, FLOPs and memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_helpers import CONFIG, CPU, make_case
from hypothesis import given
from hypothesis import strategies as st

from comparison.bench import cases
from comparison.bench.cases import build_groups, count_flops, make_inputs, measure, write_reference
from comparison.bench.config import parse_mask
from comparison.bench.worker import Worker
from model.attention import attention_mask, linear_attention_scores
from model.flops import weight_flops_per_token

NO_REFERENCE = Path("missing.pt")


@given(
    Tq=st.integers(1, 40),
    more=st.integers(0, 40),
    mask=st.sampled_from(["causal", "window:1", "window:7", "documents:1", "documents:9"]),
    phase=st.sampled_from(["forward", "forward+backward"]),
)
def test_flops_count_the_visible_keys(Tq, more, mask, phase):
    window, _ = parse_mask(mask)
    case = replace(make_case(phase, Tq=Tq, Tk=Tq + more, window=window), mask=mask)
    positions = torch.arange(more, more + Tq).expand(2, -1)
    visible = attention_mask(
        Tq, Tq + more, window=window, positions=positions, doc_ids=case.doc_ids()
    )[0]
    passes, H, D, Dv = {"forward": 1, "forward+backward": 3}[phase], 4, 8, 6
    assert count_flops(case, CONFIG) == passes * 2 * H * int(visible.sum()) * (2 * D + 2 * Dv)


@pytest.mark.parametrize("backend", ["naive", "sdpa"])
@pytest.mark.parametrize("mask", ["causal", "window:5", "documents:3"])
@pytest.mark.parametrize("phase", ["forward", "forward+backward", "decode"])
def test_masks_and_phases_compute_the_reference(phase, mask, backend, tmp_path):
    changes = {"phases": [phase], "masks": [mask], "block_sizes": [20], "backends": [backend]}
    ((case,),) = build_groups(replace(CONFIG, **changes), CPU)
    assert case.request.Tq == (1 if phase == "decode" else 20)
    write_reference(case, CONFIG.seed, tmp_path / "r.pt")
    row, _ = measure(case, CONFIG, tmp_path / "r.pt")
    assert row.error_y < 5e-6 and row.mask == mask
    assert (
        row.error_gradients < 5e-6 if phase == "forward+backward" else row.error_gradients is None
    )
    unmasked = replace(
        case, mask="causal", request=replace(case.request, window=None, document_mask=False)
    )
    write_reference(unmasked, CONFIG.seed, tmp_path / "r.pt")
    assert (measure(case, CONFIG, tmp_path / "r.pt")[0].error_y > 1e-3) == (mask != "causal")


@pytest.mark.parametrize(
    "dtype, lower, upper", [(torch.float32, 0.0, 5e-6), (torch.bfloat16, 1e-4, 0.1)]
)
def test_errors_are_differences_from_the_reference(dtype, lower, upper, tmp_path):
    case = make_case("forward+backward", dtype=dtype)
    write_reference(case, CONFIG.seed, tmp_path / "r.pt")
    row, seconds = measure(case, CONFIG, tmp_path / "r.pt")
    assert lower < row.error_y < upper and lower < row.error_gradients < upper
    assert len(seconds) >= CONFIG.repeats
    y, dq, dk, dv = torch.load(tmp_path / "r.pt")
    dk[0, 3, 1, 2] += 5.0
    torch.save([y, dq, dk, dv], tmp_path / "r.pt")
    assert 4.5 < measure(case, CONFIG, tmp_path / "r.pt")[0].error_gradients < 5.5
    row, _ = measure(case, CONFIG, NO_REFERENCE)
    assert row.error_y is None and row.error_gradients is None


def test_step_without_attention_keeps_the_gradients_of_all_weights():
    model = replace(CONFIG.model, n_head=4, n_kv_head=2, dropout=0.1)  # flash has no dropout
    changes = {
        "phases": ["step"],
        "backends": ["linear", "flash"],
        "block_sizes": [16],
        "model": model,
    }
    ((*_, case),) = build_groups(replace(CONFIG, **changes, masks=["window:5", "causal"]), CPU)
    assert case.name == "none" and case.attention_type == "softmax"
    assert count_flops(case, CONFIG) == 16 * weight_flops_per_token(CONFIG.model, CONFIG.vocab_size)
    q, k, v = (torch.randn(2, 5, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    y = cases._no_attention(q, k, v, window=None)
    assert y.shape == q.shape
    assert all(gradient.abs().min() > 0 for gradient in torch.autograd.grad(y.sum(), (q, k, v)))
    assert measure(case, replace(CONFIG, model=model), NO_REFERENCE)[0].resolved == "none"


def test_calls_use_new_inputs_until_the_caches_are_full(monkeypatch):
    case, input_bytes = make_case(), 100_000
    monkeypatch.setattr(cases, "INPUT_BYTES", input_bytes)
    monkeypatch.setattr(cases, "get_attention_fn", lambda config: lambda q, k, v, **options: q)
    workload = cases._attention_workload(case, CONFIG)
    pointers = [workload.call()[0].data_ptr() for _ in range(50)]
    period = pointers.index(pointers[0], 1)  # calls until the first inputs are used again
    assert len(set(pointers)) == period
    assert period * sum(tensor.nbytes for tensor in make_inputs(case, CONFIG.seed)) > input_bytes


def test_linear_attention_decodes_with_a_state():
    case = make_case("decode", "linear", T=100, Dv=8)
    q, k, v, _ = make_inputs(case, CONFIG.seed)
    (y,) = cases._attention_workload(case, CONFIG).call()
    v = v.repeat_interleave(2, dim=2).transpose(1, 2)
    torch.testing.assert_close(y, (linear_attention_scores(q, k).softmax(-1) @ v).transpose(1, 2))


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is known on Linux only"
)
@pytest.mark.slow
def test_peak_memory_does_not_depend_on_earlier_cases_of_the_process(tmp_path):
    worker = Worker(tmp_path)

    def peak_memory(case):
        _, (row, _) = worker.call(measure, case, CONFIG, NO_REFERENCE, time_limit=CONFIG.time_limit)
        return row.peak_memory_bytes

    naive_case = make_case("forward+backward", T=2048, B=1, H=2, G=2, D=32, Dv=32)
    scores = 2 * 2048**2 * 4  # bytes
    # three matrices: the weights, their gradients, and the gradients of the scores
    assert peak_memory(naive_case) == pytest.approx(3 * scores, rel=0.2)
    shapes = dict(B=1, H=2, G=2, D=64, Dv=64)
    flash = {
        T: peak_memory(make_case("forward", "flash", T=T, **shapes)) for T in (8192, 4096, 2048)
    }
    output = 2 * 64 * 4  # bytes per token
    assert flash[4096] - flash[2048] == pytest.approx(2048 * output, rel=0.35)
    assert flash[8192] - flash[4096] == pytest.approx(4096 * output, rel=0.35)
    assert peak_memory(naive_case) == pytest.approx(3 * scores, rel=0.2)
    worker.close()


@pytest.mark.compiles
@pytest.mark.slow
def test_each_case_compiles_for_its_shapes():
    """Without a reset, torch.compile would switch to dynamic shapes at the second T of a process."""
    for T in (16, 32, 48):
        row, _ = measure(make_case("forward", "flex", T=T, G=4, D=16, Dv=16), CONFIG, NO_REFERENCE)
        assert row.resolved == "flex" and row.compile_s > 0
