"""Every backend against naive, naive against the formula, and the label against the kernel that ran."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import UserError
from model.attention import BACKENDS, attention_weights, flash, naive, resolve, sdpa, visible

CPU = torch.device("cpu")


def random_qkv(B, Tq, Tk, H, G, D, Dv=None, dtype=torch.float32, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)

    return draw(B, Tq, H, D), draw(B, Tk, G, D), draw(B, Tk, G, Dv or D)


def loops(q, k, v, position, seen):
    """The definition by hand, a query at a time, in float64: the reference of the reference."""
    B, Tq, H, D = q.shape
    y = torch.zeros(B, Tq, H, v.shape[-1], dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            g = h // (H // k.shape[2])
            for i in range(Tq):
                keys = [j for j in range(k.shape[1]) if seen(b, position(b, i), j)]
                scores = torch.stack([q[b, i, h].double() @ k[b, j, g].double() for j in keys]) / math.sqrt(D)
                y[b, i, h] = sum(w * v[b, j, g].double() for w, j in zip(scores.softmax(0), keys, strict=True))
    return y


@settings(max_examples=25, deadline=None)
@given(
    Tk=st.integers(1, 9), missing=st.integers(0, 8), heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    window=st.none() | st.integers(1, 5), with_documents=st.booleans(), with_positions=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_naive_and_sdpa_are_the_definition(Tk, missing, heads, window, with_documents, with_positions, seed):
    Tq, B = max(1, Tk - missing), 2
    q, k, v = random_qkv(B, Tq, Tk, *heads, 4, 6, seed=seed, grad=False)
    generator = torch.Generator().manual_seed(seed)
    documents = torch.randint(0, 2, (B, Tk), generator=generator).sort(dim=1).values if with_documents else None
    positions = torch.randint(0, Tk, (B, Tq), generator=generator) if with_positions else None

    def position(b, i):
        return Tk - Tq + i if positions is None else int(positions[b, i])

    def seen(b, i, j):
        near = window is None or i - j < window
        together = documents is None or documents[b, i] == documents[b, j]
        return j <= i and near and bool(together)

    expected = loops(q, k, v, position, seen)
    for attend in (naive, sdpa):
        y = attend(q, k, v, window=window, positions=positions, documents=documents)
        torch.testing.assert_close(y.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("attend", [sdpa, flash], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("T", "heads"), [(1, (2, 2)), (7, (4, 2)), (64, (2, 2)), (65, (4, 1))])
def test_outputs_and_gradients_agree_with_naive(attend, T, heads):
    tensors = random_qkv(2, T, T, *heads, 16)
    weights = torch.randn(2, T, heads[0], 16, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad((naive(*tensors) * weights).sum(), tensors)
    actual = torch.autograd.grad((attend(*tensors) * weights).sum(), tensors)
    torch.testing.assert_close(attend(*tensors), naive(*tensors), atol=2e-6, rtol=1e-5)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("attend", [naive, sdpa, flash], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_error_against_float64(attend, dtype, bound):
    q, k, v = random_qkv(2, 96, 96, 4, 4, 32, dtype=dtype, grad=False)
    error = (attend(q, k, v).double() - naive(q.double(), k.double(), v.double())).abs().max()
    assert error < bound


@pytest.mark.parametrize("attend", [naive, sdpa, flash], ids=lambda f: f.__name__)
@pytest.mark.parametrize("Tq", [1, 3, 8])
def test_queries_on_a_cache_stand_at_its_end(attend, Tq):
    """The last Tq rows of a whole computation: torch's own is_causal would align them with the first keys."""
    q, k, v = random_qkv(2, 8, 8, 4, 2, 16, grad=False)
    torch.testing.assert_close(attend(q[:, -Tq:], k, v), naive(q, k, v)[:, -Tq:], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("attend", [naive, sdpa, flash], ids=lambda f: f.__name__)
def test_causal_by_gradient(attend):
    """Output i depends on every key and value up to i, and on none after it."""
    q, k, v = random_qkv(1, 6, 6, 2, 2, 8)
    y = attend(q, k, v)
    for i in range(6):
        dk, dv = torch.autograd.grad(y[:, i].pow(2).sum(), (k, v), retain_graph=True)
        for gradient in (dk, dv):
            reached = gradient.abs().sum(dim=(0, 2, 3)) > 0
            first = 1 if i == 0 and gradient is dk else 0  # a single key has weight one, whatever it is
            assert reached[first : i + 1].all()
            assert not reached[i + 1 :].any()


def test_grad_fn_shows_which_kernel_ran():
    q, k, v = random_qkv(1, 8, 8, 2, 2, 8)

    def graph(y):
        todo, names = [y.grad_fn], set()
        while todo:
            node = todo.pop()
            names.add(type(node).__name__)
            todo += [parent for parent, _ in node.next_functions if parent is not None]
        return names

    kernel = "ScaledDotProductFlashAttentionForCpuBackward0"
    assert kernel in graph(flash(q, k, v))
    assert kernel in graph(sdpa(q, k, v))
    assert kernel not in graph(naive(q, k, v))
    assert {"SoftmaxBackward0", "MaskedFillBackward0"} <= graph(naive(q, k, v))


RESOLVE = dict(B=2, T=16, H=4, G=2, D=8, dtype=torch.float32, device=CPU, dropout_p=0.0)


@pytest.mark.parametrize(
    ("name", "changed", "resolved"),
    [
        ("naive", {}, "naive"), ("naive", {"dropout_p": 0.1}, "naive"), ("naive", {"Dv": 4}, "naive"),
        ("sdpa", {}, "flash"), ("sdpa", {"dropout_p": 0.1}, "math"), ("sdpa", {"Dv": 4}, "math"),
        ("flash", {}, "flash"), ("flash", {"dtype": torch.bfloat16}, "flash"), ("flash", {"grad": False}, "flash"),
    ],
)  # fmt: skip
def test_resolved_is_what_torch_runs(name, changed, resolved):
    arguments = RESOLVE | changed
    answer = resolve(name, **arguments)
    assert (answer.requested, answer.resolved) == (name, resolved)
    q, k, v = random_qkv(2, 16, 16, 4, 2, 8, arguments.get("Dv"), arguments["dtype"])
    with torch.profiler.profile() as profiler:
        BACKENDS[name].attend(q, k, v, dropout_p=arguments["dropout_p"])
    ran_flash = any("_flash_attention_for_cpu" in event.key for event in profiler.key_averages())
    assert ran_flash == (resolved == "flash")


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("flash", {"dropout_p": 0.1}, "model.dropout=0"),
        ("flash", {"Dv": 4}, "Dv=4 and D=8"),
        ("nave", {}, "set one of naive, sdpa, flash"),
        ("flash", {"device": torch.device("mps")}, "does not run on mps"),
    ],
)
def test_refusals_name_the_setting(name, changed, said):
    with pytest.raises(UserError, match=said):
        resolve(name, **RESOLVE | changed)


def test_a_refusal_that_only_torch_knows_of_passes_its_reason_on(monkeypatch):
    """With the table silent, PyTorch's own reason is told."""
    from dataclasses import replace

    from model.attention import Support

    monkeypatch.setitem(BACKENDS, "flash", replace(BACKENDS["flash"], support={"cpu": Support()}))
    with pytest.raises(UserError, match="same last dimension"):
        resolve("flash", **RESOLVE | {"Dv": 4})


def test_flash_itself_refuses_rather_than_fall_back():
    q, k, v = random_qkv(1, 8, 8, 2, 2, 8, 4)
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="No available kernel"):
        flash(q, k, v)


def test_naive_dropout_drops_whole_weights_and_keeps_the_mean():
    q, k, v = random_qkv(1, 64, 64, 8, 8, 8, grad=False)
    torch.manual_seed(0)
    mean = torch.stack([naive(q, k, torch.ones_like(v), dropout_p=0.3) for _ in range(50)]).mean()
    assert abs(mean - 1) < 0.02


def test_weights_are_lower_triangular_and_row_stochastic():
    q, k, _ = random_qkv(2, 10, 10, 4, 2, 8, grad=False)
    weights = attention_weights(q, k)
    assert weights.shape == (2, 4, 10, 10)
    assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 10))
    assert visible(3, 5).tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False], [True] * 5]


def test_compiled_naive_is_not_rewritten_into_a_fused_kernel():
    from torch._dynamo.utils import counters

    q, k, v = random_qkv(1, 16, 16, 2, 2, 8)
    counters.clear()
    torch.testing.assert_close(torch.compile(naive, fullgraph=True)(q, k, v), naive(q, k, v), atol=1e-6, rtol=1e-5)
    assert counters["inductor"]["fuse_attention"] == 0
    torch.testing.assert_close(torch.compile(flash, fullgraph=True)(q, k, v), naive(q, k, v), atol=1e-6, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["naive", "sdpa", "flash"])
def test_on_cuda_in_bfloat16_with_gradients(name):
    device = torch.device("cuda")
    shape = dict(B=2, T=128, H=4, G=4, D=64, dtype=torch.bfloat16, device=device, dropout_p=0.0)
    answer = resolve(name, **shape)
    assert answer.resolved == {"naive": "naive", "flash": "flash"}.get(name, answer.resolved)
    tensors = [t.detach().to(device).requires_grad_() for t in random_qkv(2, 128, 128, 4, 4, 64, dtype=torch.bfloat16)]
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    y, expected = BACKENDS[name].attend(*tensors), naive(*doubles)
    assert (y.double() - expected).abs().max() < 5e-2
    y.float().pow(2).sum().backward()
    expected.pow(2).sum().backward()
    for t, d in zip(tensors, doubles, strict=True):
        assert (t.grad.double() - d.grad).abs().max() < 0.2


@pytest.mark.gpu
def test_flash_on_cuda_refuses_float32():
    with pytest.raises(UserError, match="dtype=bfloat16"):
        resolve("flash", **RESOLVE | {"device": torch.device("cuda")})
