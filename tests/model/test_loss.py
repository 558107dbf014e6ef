"""The loss: chunks, padded vocabularies, and one step of each model preset with its golden values."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import VARIANTS, make_model, random_tokens
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from configs.cli import parse_config
from data.loader import IGNORE_INDEX
from model import loss as loss_module
from model.attention import get_attention_fn
from model.gpt import GPT
from model.loss import linear_cross_entropy
from training.optimizer import build_optimizers

C = 16


def inputs(N: int, V: int, rows: int):
    random = torch.Generator().manual_seed(N + V)
    x = torch.randn(N, C, generator=random).requires_grad_()
    weight = torch.randn(rows, C, generator=random).requires_grad_()
    targets = torch.randint(V, (N,), generator=random)
    targets[::5] = IGNORE_INDEX
    return x, weight, targets


def loss_by_definition(x, weight, targets, V, reduction, softcap):
    """Cross entropy by its definition, in float64."""
    counted = targets != IGNORE_INDEX
    logits = (x.double() @ weight.double().mT)[:, :V]
    probs = (logits if softcap is None else softcap * (logits / softcap).tanh()).softmax(-1)
    nats = -probs[counted].gather(1, targets[counted].unsqueeze(1)).log()
    return nats.mean() if reduction == "mean" else nats.sum()


@settings(max_examples=40, deadline=None)
@given(
    N=st.integers(2, 40), V=st.integers(2, 50), padding=st.integers(0, 9), chunk=st.integers(1, 2500),
    reduction=st.sampled_from(["mean", "sum"]), softcap=st.sampled_from([None, 3.0]),
)  # fmt: skip
def test_loss_and_gradients_follow_the_definition_for_any_chunk_size(
    N, V, padding, chunk, reduction, softcap
):
    x, weight, targets = inputs(N, V, V + padding)
    expected = loss_by_definition(x, weight, targets, V, reduction, softcap)
    ours = linear_cross_entropy(x, weight, targets, V, reduction, chunk, softcap)
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)
    for a, b in zip(
        *(torch.autograd.grad(3 * loss, (x, weight)) for loss in (ours, expected)), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_only_matrix_products_are_in_bfloat16_under_autocast():
    x, weight, targets = inputs(64, 100, 128)
    expected = linear_cross_entropy(x, weight, targets, 100)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets, 100, chunk_logits=1000)
    logits = (x.bfloat16() @ weight.bfloat16().mT)[:, :100].double()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(
        torch.nn.functional.cross_entropy(logits, targets).item(), rel=1e-6
    )
    ours, theirs = (torch.autograd.grad(y, (x, weight)) for y in (loss, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.02 * b.norm()
    assert (ours[1] != ours[1].bfloat16()).any(), "gradients of the chunks are summed in float32"


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("half", [False, True])
def test_chunked_loss_compiles_without_graph_breaks(half):
    x, weight, targets = inputs(30, 50, 64)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        losses = [f(x, weight, targets, 50, "mean", 640) for f in (linear_cross_entropy, compiled)]
    torch.testing.assert_close(*losses)
    for a, b in zip(*(torch.autograd.grad(y, (x, weight)) for y in losses), strict=True):
        torch.testing.assert_close(a, b, atol=1e-2 if half else 1e-5, rtol=1e-2 if half else 1e-4)


class OperationRecorder(TorchDispatchMode):
    """Context manager: records the number of elements of the largest new tensor."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        out = function(*arguments, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_at_most_one_chunk_of_logits_is_in_memory():
    x, weight, targets = inputs(512, 1000, 1000)
    for chunk, largest in ((20_000, 20_000), (10**9, 512 * 1000)):
        with OperationRecorder() as recorder:
            linear_cross_entropy(x, weight, targets, 1000, chunk_logits=chunk).backward()
        assert recorder.elements == largest


def test_chunks_on_cuda_have_up_to_a_sixteenth_of_its_memory(monkeypatch):
    """Fake tensors need no GPU. One of 8,192 bytes stores 128 float32 logits in a sixteenth: two rows of 64."""
    calls = []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8192)
    )
    monkeypatch.setattr(
        loss_module,
        "_ChunkedCrossEntropy",
        SimpleNamespace(apply=lambda *a: calls.append(a) or 0.0),
    )
    with FakeTensorMode():
        x, weight = torch.empty(9, 4, device="cuda"), torch.empty(64, 4, device="cuda")
        linear_cross_entropy(x, weight, torch.empty(9, dtype=torch.int64, device="cuda"), 64, "sum")
    assert [chunk for *_, chunk, _, _ in calls] == [2]


@pytest.mark.parametrize("chunk", [1, 10**9])
def test_targets_outside_the_vocabulary_are_refused(chunk):
    x, weight, targets = inputs(8, 10, 10)
    targets[3] = -1
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(x, weight, targets, 10, chunk_logits=chunk)


@VARIANTS
def test_padded_vocabulary_changes_neither_logits_nor_loss(variant):
    plain, padded = (
        make_model(variant, vocab_size=50),
        make_model(variant | dict(pad_vocab_multiple=64), vocab_size=50),
    )
    assert padded.lm_head.weight.shape[0] == padded.wte.weight.shape[0] == 64
    weights = plain.state_dict()
    for name in ("wte.weight", "lm_head.weight"):
        weights[name] = torch.cat(
            (weights[name], torch.full((14, 32), 9.0))
        )  # would be likely tokens
    padded.load_state_dict(weights)
    x, y = random_tokens(), random_tokens(seed=1)
    assert padded(x).shape == (2, 24, 50)
    torch.testing.assert_close(padded(x), plain(x))
    torch.testing.assert_close(padded(x, y), plain(x, y))
    padded(x, y).backward()
    assert (padded.lm_head.weight.grad[50:] == 0).all()


# The loss of a batch before and after one step on it. If a loss differs, the mathematics of a preset or its optimizer
# has changed: find out why. If the change is intended, use the printed numbers here, and say so in the commit.
GOLDEN = {
    "gpt2 adamw": (4.16596, 4.09132),
    "nanogpt adamw": (4.16596, 4.09760),
    "modern muon": (4.19008, 3.87066),
    "modern adamw": (4.19008, 4.10515),
}


@pytest.mark.parametrize("recipe", GOLDEN)
def test_one_step_of_each_preset_has_its_golden_losses(recipe):
    model_name, optimizer_name = recipe.split()
    sizes = [
        "model.n_layer=2",
        "model.n_head=2",
        "model.n_embd=32",
        "model.block_size=32",
        "model.ngram_table_size=64",
    ]
    words = [f"model={model_name}", f"optimizer={optimizer_name}", *sizes]
    config = parse_config("train", "", words)
    torch.manual_seed(1337)
    model = GPT(config.model, 65, get_attention_fn(config.attention))
    x, y = random_tokens(4, 32, 65), random_tokens(4, 32, 65, seed=1)
    before = model(x, y)
    before.backward()
    for optimizer in build_optimizers(model, config.optimizer):
        optimizer.step()
    losses = before.item(), model(x, y).item()
    print(recipe, losses)
    assert losses == pytest.approx(GOLDEN[recipe], abs=2e-4)
