"""Every backend against naive, naive against the formula, and refusals where the table says so."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention_helpers import CPU, DTYPES, NEED, choose, random_masks, random_qkv
from helpers import ON_CPU, ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import GROUPED
from torch.nn.attention import SDPBackend, flex_attention

from common.errors import UserError
from model import GPTConfig
from model.attention import (
    BACKENDS,
    AttentionRequest,
    Support,
    attention_mask,
    attention_weights,
    backend,
    cudnn,
    flash,
    flex,
    get_attention_fn,
    naive,
    resolve,
    resolve_model,
    sdpa,
    support_table,
)
from model.attention.backends import KERNELS
from model.attention.support import FEATURES, missing_feature


@pytest.fixture(autouse=True)
def _flex_need_not_compile(request, monkeypatch):
    """FlexAttention's own definition in place of its kernels, seconds each to compile, except where a test asks."""
    if "compiles" not in request.keywords:
        monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        monkeypatch.setattr("model.attention.backends._compiled_flex", lambda: flex_attention.flex_attention)


def loops(q, k, v, window, positions, doc_ids):
    """The definition by hand, a query at a time, in float64: the reference of the reference."""
    B, Tq, H, D = q.shape
    Tk = k.shape[1]
    y = torch.zeros(B, Tq, H, v.shape[-1], dtype=torch.float64)
    for b in range(B):
        for i in range(Tq):
            at = Tk - Tq + i if positions is None else int(positions[b, i])
            keys = [
                j for j in range(at + 1)
                if (window is None or at - j < window) and (doc_ids is None or doc_ids[b, at] == doc_ids[b, j])
            ]  # fmt: skip
            for h in range(H):
                g = h // (H // k.shape[2])
                scores = torch.stack([q[b, i, h].double() @ k[b, j, g].double() for j in keys]) / math.sqrt(D)
                y[b, i, h] = sum(w * v[b, j, g].double() for w, j in zip(scores.softmax(0), keys, strict=True))
    return y


@settings(max_examples=25, deadline=None)
@given(
    Tk=st.integers(1, 9), missing=st.integers(0, 8), heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    window=st.none() | st.integers(1, 5), document_mask=st.booleans(), positions=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_naive_is_the_definition(Tk, missing, heads, window, document_mask, positions, seed):
    need = AttentionRequest(
        B=2, Tq=max(1, Tk - missing), Tk=Tk, H=heads[0], G=heads[1], D=4, Dv=6, dtype=torch.float32, device=CPU,
        grad=False, window=window, document_mask=document_mask, positions=positions,
    )  # fmt: skip
    qkv, masks = random_qkv(need, seed), random_masks(need, seed)
    torch.testing.assert_close(naive(*qkv, **masks).double(), loops(*qkv, **masks), atol=2e-6, rtol=1e-5)


# The largest error of an output, and of a gradient relative to the largest gradient, that rounding explains.
BOUNDS = {"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-5), "bfloat16": (5e-2, 5e-2), "float16": (5e-3, 5e-3)}


def agree_or_refuse(name: str, need: AttentionRequest, seed: int, bounds=BOUNDS) -> None:
    """Backend `name` gives what naive gives in float64, forward and gradients, or refuses as the table says."""
    lacks = missing_feature(BACKENDS[name], need)
    if lacks is not None:
        what, setting = lacks
        with pytest.raises(UserError) as refused:
            resolve(choose(name), need)
        assert f"attention={name}" in str(refused.value) and what in str(refused.value)
        assert (setting or "attention=naive") in str(refused.value)
        return
    resolve(choose(name), need)
    qkv, masks = random_qkv(need, seed), random_masks(need, seed)
    doubles = [t.detach().double().requires_grad_(need.grad) for t in qkv]
    y, expected = BACKENDS[name].attend(*qkv, **masks), naive(*doubles, **masks)
    y_bound, gradient_bound = bounds[str(need.dtype).removeprefix("torch.")]
    assert y.dtype == need.dtype
    assert (y.double() - expected).abs().max() < y_bound
    if need.grad:
        weights = torch.randn(*y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        weights = weights.to(need.device)
        actual = torch.autograd.grad((y.double() * weights).sum(), qkv)
        for a, e in zip(actual, torch.autograd.grad((expected * weights).sum(), doubles), strict=True):
            assert (a.double() - e).abs().max() < gradient_bound * max(1.0, e.abs().max())


NEEDS = dict(
    T=st.sampled_from([1, 7, 24, 64, 257]), queries=st.sampled_from(["all", "one", "some"]),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]), sizes=st.sampled_from([(16, 16), (8, 8), (16, 8)]),
    dtype=st.sampled_from(list(DTYPES)), window=st.sampled_from([None, 1, 5, 100, 300]), document_mask=st.booleans(),
    positions=st.booleans(), grad=st.booleans(), dropout=st.sampled_from([0.0, 0.0, 0.0, 0.1]), seed=st.integers(0, 99),
)  # fmt: skip


def drawn_need(T, queries, heads, sizes, dtype, window, document_mask, positions, grad) -> AttentionRequest:
    Tq = {"all": T, "one": 1, "some": max(1, T // 2)}[queries]
    return AttentionRequest(
        B=2, Tq=Tq, Tk=T, H=heads[0], G=heads[1], D=sizes[0], Dv=sizes[1], dtype=DTYPES[dtype], device=CPU,
        grad=grad, window=window, document_mask=document_mask, positions=positions,
    )  # fmt: skip


@pytest.mark.parametrize("name", ON_CPU)
@settings(max_examples=60, deadline=None)
@given(**NEEDS)
def test_each_backend_agrees_with_naive_or_refuses(name, seed, dropout, **drawn):
    need = drawn_need(**drawn)
    if dropout:  # random, so that only a refusal can be compared
        need = replace(need, dropout_p=dropout)
        if missing_feature(BACKENDS[name], need) is None:
            return
    agree_or_refuse(name, need, seed)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_is_there_or_refused(name, feature):
    """The same, a feature at a time, so that none depends on what hypothesis draws."""
    changed = {
        "gradients": {"grad": True}, "dropout": {"dropout_p": 0.5}, "gqa": {"G": 1}, "window": {"window": 3},
        "document_mask": {"document_mask": True}, "positions": {"positions": True}, "any_dv": {"Dv": 4},
    }[feature]  # fmt: skip
    need = replace(NEED, **{"G": 4, "grad": False} | changed)
    able = getattr(BACKENDS[name].on["cpu"], feature)
    assert FEATURES[feature].asked(need) and (missing_feature(BACKENDS[name], need) is None) == able
    if not (able and feature == "dropout"):
        agree_or_refuse(name, need, seed=1)


@pytest.mark.compiles
def test_flex_compiled_agrees_too_and_is_what_runs():
    need = replace(
        NEED, Tq=70, Tk=140, G=1, D=16, Dv=32, grad=False, window=20, document_mask=True, positions=True
    )  # fmt: skip
    agree_or_refuse("flex", need, seed=2)
    qkv, masks = random_qkv(need), random_masks(need)
    with torch.profiler.profile() as profiler:
        flex(*qkv, **masks)
    ran = " ".join(event.key for event in profiler.key_averages())
    assert resolve(choose("flex"), need).resolved == "flex" and "CompiledFxGraph" in ran and "softmax" not in ran


@pytest.mark.slow
@pytest.mark.compiles
def test_flex_on_a_cache_is_right_for_odd_multiples_of_8_too():
    """Inductor 2.13, left to itself, gives other numbers for one query on 8, 24, 40, ... keys."""
    for Tk in (24, 25):
        agree_or_refuse("flex", replace(NEED, Tq=1, Tk=Tk, grad=False), seed=3)


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("sizes", [
    [{"B": B, "Tq": 1, "Tk": 32, "positions": True} for B in (4, 3)],
    [{"Tq": T, "Tk": T, "document_mask": True, "window": 5} for T in (16, 32)],
], ids=["positions", "documents"])  # fmt: skip
def test_flex_compiles_for_positions_and_documents_of_any_size(sizes):
    """Inductor 2.13, left to itself, writes a kernel that is no C++ once their sizes vary."""
    for each in sizes:
        agree_or_refuse("flex", replace(NEED, grad=False, **each), seed=4)


@pytest.mark.slow
@pytest.mark.compiles
def test_flex_compiled_into_a_model_is_right_too():
    """Inductor, left to fuse what comes before it into the kernel, gives other numbers."""
    need = replace(NEED, Tq=64, Tk=64, D=16, Dv=16, grad=False)
    q, k, v = random_qkv(need)
    packed = torch.cat((q, k, v), dim=2)

    def layer(packed):
        q, k, v = packed.split((4, 2, 2), dim=2)
        return flex(q * 1.5, k * 1.5, v, window=20)

    expected = naive(q * 1.5, k * 1.5, v, window=20)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(packed), expected, atol=1e-5, rtol=1e-4)


def test_flex_makes_a_mask_once_for_all_layers_and_anew_for_other_doc_ids(monkeypatch):
    from model.attention import backends

    made = []
    monkeypatch.setattr(backends, "_masks", {})
    original = backends._block_mask
    monkeypatch.setattr(backends, "_block_mask", lambda *given: made.append(1) or original(*given))
    need = replace(NEED, document_mask=True, grad=False)
    qkv, doc_ids = random_qkv(need), random_masks(need)["doc_ids"]
    for _ in range(3):
        flex(*qkv, doc_ids=doc_ids)
    assert len(made) == 1
    flex(*qkv, doc_ids=doc_ids, window=3)
    assert len(made) == 2
    other = doc_ids.clone()
    flex(*qkv, doc_ids=other)  # another tensor
    other.zero_()  # and the same one, written over
    torch.testing.assert_close(flex(*qkv, doc_ids=other), naive(*qkv, doc_ids=other), atol=2e-6, rtol=1e-5)
    assert len(made) == 4
    with torch.inference_mode():  # whose tensors have no version to tell
        written = doc_ids.clone()
        for _ in range(2):
            written += 1
            torch.testing.assert_close(flex(*qkv, doc_ids=written), naive(*qkv, doc_ids=written))


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 5e-2)])
def test_error_against_float64(name, dtype, bound):
    need = AttentionRequest(B=2, Tq=257, Tk=257, H=4, G=4, D=64, Dv=64, dtype=DTYPES[dtype], device=CPU, grad=False)
    q, k, v = random_qkv(need)
    error = (BACKENDS[name].attend(q, k, v).double() - naive(q.double(), k.double(), v.double())).abs().max()
    assert 0 < error < bound


@pytest.mark.parametrize("name", ON_CPU)
def test_causal_by_gradient(name):
    """Output i depends on every key and value up to i, and on none after it."""
    need = replace(NEED, B=1, Tq=6, Tk=6, G=4, grad="gradients" not in _cannot(name))
    q, k, v = random_qkv(need)
    if not need.grad:  # by what a change of the future changes instead
        y = BACKENDS[name].attend(q, k, v)
        for i in range(5):
            other = torch.cat((v[:, : i + 1], v[:, i + 1 :] + 1), dim=1)
            changed = (BACKENDS[name].attend(q, k, other) != y).any(dim=-1).any(dim=-1)[0]
            assert not changed[: i + 1].any() and changed[i + 1 :].all()
        return
    y = BACKENDS[name].attend(q, k, v)
    for i in range(6):
        dk, dv = torch.autograd.grad(y[:, i].pow(2).sum(), (k, v), retain_graph=True)
        for gradient in (dk, dv):
            reached = gradient.abs().sum(dim=(0, 2, 3)) > 0
            first = 1 if i == 0 and gradient is dk else 0  # a single key has weight one, whatever it is
            assert reached[first : i + 1].all()
            assert not reached[i + 1 :].any()


def _cannot(name: str) -> set[str]:
    return {key for key in FEATURES if not getattr(BACKENDS[name].on["cpu"], key)}


@pytest.mark.parametrize(
    ("config", "changed", "said"),
    [
        (choose("flash"), {"dropout_p": 0.1}, "has no dropout; set model.dropout=0, or attention=naive or sdpa$"),
        (choose("flash"), {"Dv": 4}, "values as wide as keys, not Dv=4 and D=8; set attention=naive or sdpa$"),
        (choose("flex"), {}, "has no gradients, and cannot train; set attention=naive, sdpa or flash$"),
        (choose("flex"), {"grad": False, "dtype": torch.float64}, "does not compute in float64; set dtype=float32, or"),
        (choose("cudnn"), {}, "attention=cudnn does not run on cpu; set device=cuda, or attention=naive, sdpa or fl"),
        (choose("flash"), {"device": torch.device("mps")}, "not run on mps; set device=cpu or cuda, or attention=n"),
        (choose("flash", impl="FA3"), {}, "attention.impl=FA3 does not run on cpu; set attention.impl=null$"),
        (choose("sdpa", impl="FA3"), {}, "no attention.impl=FA3; set null, or another attention"),
        (choose("flash", impl="FA9"), {}, "no attention.impl=FA9; set null, or FA3 or FA4"),
        (choose("nave"), {}, "set one of naive, sdpa, flash, cudnn, flex"),
        (choose("naive", kernels=["math"]), {}, "set attention.kernels=null, or attention=sdpa"),
        (choose("sdpa", kernels=["mth"]), {}, "needs one or more of cudnn, flash, efficient, math"),
        (choose("sdpa", kernels=[]), {}, "needs one or more of cudnn, flash, efficient, math"),
        (choose("sdpa", kernels=["cudnn"]), {}, r"\(none of them is for this on cpu\); set attention.kernels=null$"),
    ],
)  # fmt: skip
def test_refusals_name_the_setting(config, changed, said):
    with pytest.raises(UserError, match=said):
        resolve(config, replace(NEED, **changed))


ON_CUDA = replace(NEED, device=torch.device("cuda"), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "impl", "changed", "said"),
    [
        ("flash", None, {"dtype": torch.float32}, "does not compute in float32; set dtype=bfloat16"),
        (
            "flash",
            None,
            {"window": 4},
            "has no sliding window; set model.window=null, or attention=naive, sdpa or",
        ),
        ("flash", None, {"document_mask": True}, "cannot keep documents apart; set data.document_mask=false"),
        ("flash", None, {"Tq": 3}, "takes no queries in the middle of the keys; set attention=naive"),
        ("flash", None, {"D": 512, "Dv": 512}, "heads of at most 256 channels, not 512; set a larger model.n_head"),
        ("flash", "FA3", {"dropout_p": 0.1}, "attention.impl=FA3 on cuda has no dropout; set attention.impl=null$"),
        ("flex", None, {"dropout_p": 0.1}, "has no dropout; set model.dropout=0, or attention=naive, sdpa, flash"),
        ("cudnn", None, {"dtype": torch.float32}, "does not compute in float32; set dtype=bfloat16, or attention=na"),
    ],
)
def test_what_cuda_lacks_is_refused_by_the_table_alone(name, impl, changed, said):
    """Which a machine without CUDA can test."""
    with pytest.raises(UserError, match=said):
        resolve(choose(name, impl=impl), replace(ON_CUDA, **changed))


def test_a_whole_model_is_asked_for_all_that_its_layers_need():
    """Also by the table alone, on a device that is not here."""
    model = GPTConfig(**GROUPED | dict(window=[4, None], dropout=0.1))
    asked = dict(B=2, dtype=torch.bfloat16, device=ON_CUDA.device)
    for changed, said in (
        ({"window": None, "dropout": 0.0}, "FA3 cannot be used"), ({"dropout": 0.0}, "no sliding window"),
        ({"window": 24}, "no dropout"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            resolve_model(choose("flash", impl="FA3"), replace(model, **changed), grad=True, **asked)
    with pytest.raises(UserError, match="documents apart"):
        resolve_model(choose("flash"), replace(model, window=None), grad=False, document_mask=True, **asked)
    cpu = asked | {"device": CPU, "dtype": torch.float32}
    with pytest.raises(UserError, match="cannot train"):
        resolve_model(choose("flex"), replace(model, dropout=0.0), grad=True, **cpu)
    assert resolve_model(choose("flex"), model, grad=False, **cpu).resolved == "flex"  # no dropout where nothing trains
    assert resolve_model(choose("sdpa"), model, grad=True, **cpu).resolved == "math"


def test_a_refusal_that_only_torch_knows_of_passes_its_reason_on(monkeypatch):
    """With the table silent, PyTorch's own reason is told."""
    monkeypatch.setitem(BACKENDS, "flash", replace(BACKENDS["flash"], on={"cpu": Support()}))
    with pytest.raises(UserError, match=r"cannot run here \([^)]*same last dimension"):
        resolve(choose("flash"), replace(NEED, Dv=4))


def test_flex_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match=r"flex needs a C\+\+ compiler .* set attention="):
        resolve(choose("flex"), replace(NEED, grad=False))


def test_cudnn_is_given_a_second_key_where_there_is_one_alone(monkeypatch):
    """What is done around its kernel, with another in its place."""
    monkeypatch.setitem(KERNELS, "cudnn", SDPBackend.MATH)
    given, attend = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **how: given.append(a[1].shape[2]) or attend(*a, **how)
    )
    for changed in ({}, {"window": 3}, {"document_mask": True}, {"positions": True}):
        for T in (1, 5):
            need = replace(NEED, Tq=1, Tk=T, **changed)
            qkv, masks = random_qkv(need), random_masks(need)
            torch.testing.assert_close(cudnn(*qkv, **masks), naive(*qkv, **masks), atol=2e-6, rtol=1e-5)
    assert set(given) == {2, 5}


def test_flash_and_flex_themselves_refuse_rather_than_fall_back():
    q, k, v = random_qkv(replace(NEED, Dv=4))
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="No available kernel"):
        flash(q, k, v)
    with pytest.raises(ValueError, match="no dropout"):
        flex(q, k, v, dropout_p=0.1)


def test_the_readme_has_the_table_that_the_checks_are_made_from():
    told = support_table() in (ROOT / "README.md").read_text()
    assert told, f"the README's table of attention backends is to be replaced by\n{support_table()}"


def test_naive_dropout_drops_whole_weights_and_keeps_the_mean():
    q, k, v = random_qkv(replace(NEED, Tq=64, Tk=64, grad=False))
    torch.manual_seed(0)
    mean = torch.stack([naive(q, k, torch.ones_like(v), dropout_p=0.3) for _ in range(50)]).mean()
    assert abs(mean - 1) < 0.02


def test_weights_are_lower_triangular_and_row_stochastic():
    q, k, _ = random_qkv(replace(NEED, Tq=10, Tk=10, grad=False))
    weights = attention_weights(q, k)
    assert weights.shape == (2, 4, 10, 10)
    assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 10))
    assert attention_mask(3, 5).tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False], [True] * 5]


def test_a_new_backend_is_one_function_and_one_yaml_file(train, workdir, capsys):
    import json

    calls = []

    @backend(on={"cpu": Support(dropout=False)})
    def toy(q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0):
        calls.append(q.shape)
        return naive(q, k, v, window=window, positions=positions, doc_ids=doc_ids)

    try:
        (workdir / "own/attention").mkdir(parents=True)
        (workdir / "own/attention/toy.yaml").write_text("backend: toy\nkernels: null\nimpl: null\n")
        assert train("--config-dir", "own", "attention=toy", "name=toy") == 0
        assert train("attention=naive", "name=naive") == 0
        told = {name: json.loads((workdir / f"runs/{name}/summary.json").read_text()) for name in ("toy", "naive")}
        assert told["toy"]["attention"] == {"requested": "toy", "resolved": "toy", "impl": None}
        assert told["toy"]["last_val_loss"] == told["naive"]["last_val_loss"] and calls
        assert train("--config-dir", "own", "attention=toy", "name=b", "model.dropout=0.1") == 2
        assert "attention=toy on cpu has no dropout; set model.dropout=0, or attention=naive" in capsys.readouterr().err
        assert "| `toy` | cpu | any | ✓ | no |" in support_table()
        (workdir / "own/attention/toy.yaml").write_text("kernels: null\nimpl: null\n")
        with pytest.raises(SystemExit):  # and a file that forgets whose it is trains nothing else instead
            train("--config-dir", "own", "attention=toy", "name=c")
        assert "attention.backend has no value; set a word in the YAML file" in capsys.readouterr().err
    finally:
        BACKENDS.pop("toy", None)


def test_bound_kernels_are_handed_to_the_function():
    q, k, v = random_qkv(NEED)
    attend = get_attention_fn(choose("sdpa", kernels=["math"]))
    torch.testing.assert_close(attend(q, k, v), sdpa(q, k, v), atol=2e-6, rtol=1e-5)
    assert attend.keywords == {"kernels": ("math",)}
