"""The loss: chunks, padded vocabularies, and one step of each preset with its golden values."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import VARIANTS, make_model, random_tokens
from torch.utils._python_dispatch import TorchDispatchMode

from configs.cli import parse_config
from data.loader import IGNORE_INDEX
from model import loss as loss_module
from model.gpt import GPT
from model.loss import linear_cross_entropy
from training.optimizer import build_optimizers

C = 16
UNLIMITED = 10**9


def inputs(N: int, V: int, rows: int):
    generator = torch.Generator().manual_seed(N + V)
    x = torch.randn(N, C, generator=generator).requires_grad_()
    weight = torch.randn(rows, C, generator=generator).requires_grad_()
    targets = torch.randint(V, (N,), generator=generator)
    targets[::5] = IGNORE_INDEX
    return x, weight, targets


def chunked_loss(x, weight, targets, V, chunk_logits, **options):
    """linear_cross_entropy in chunks of at most chunk_logits logits."""
    with patch.object(loss_module, "CHUNK_LOGITS", chunk_logits):
        return linear_cross_entropy(x, weight, targets, V, **options)


def loss_by_definition(x, weight, targets, V, reduction, softcap):
    """Cross entropy by its definition, in float64."""
    logits = (x.double() @ weight.double().mT)[:, :V]
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    is_counted = targets != IGNORE_INDEX
    probs = logits.softmax(-1)[is_counted]
    nats = -probs.gather(1, targets[is_counted].unsqueeze(1)).log()
    return nats.mean() if reduction == "mean" else nats.sum()


@settings(max_examples=40, deadline=None)
@given(
    N=st.integers(2, 40),
    V=st.integers(2, 50),
    padding=st.integers(0, 9),
    chunk_logits=st.integers(1, 2500),
    reduction=st.sampled_from(["mean", "sum"]),
    softcap=st.sampled_from([None, 3.0]),
)
def test_loss_follows_the_definition_for_any_chunk_size(
    N, V, padding, chunk_logits, reduction, softcap
):
    """Compares losses and gradients."""
    x, weight, targets = inputs(N, V, V + padding)
    options = {"reduction": reduction, "softcap": softcap}
    loss = chunked_loss(x, weight, targets, V, chunk_logits, **options)
    expected = loss_by_definition(x, weight, targets, V, **options)
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(3 * loss, (x, weight))
    expected_gradients = torch.autograd.grad(3 * expected, (x, weight))
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-5, rtol=1e-4)


# Precision


@pytest.fixture
def loss_in_bfloat16():
    """A loss in chunks under autocast, and its inputs."""
    x, weight, targets = inputs(64, 100, 128)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_loss(x, weight, targets, 100, chunk_logits=1000)
    return loss, x, weight, targets


def test_only_matrix_products_are_in_bfloat16_under_autocast(loss_in_bfloat16):
    loss, x, weight, targets = loss_in_bfloat16
    logits = (x.bfloat16() @ weight.bfloat16().mT)[:, :100].double()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-6)


def test_gradients_are_summed_in_float32_under_autocast(loss_in_bfloat16):
    loss, x, weight, targets = loss_in_bfloat16
    grad_x, grad_weight = torch.autograd.grad(loss, (x, weight))
    exact_loss = linear_cross_entropy(x, weight, targets, 100)
    exact_grad_x, exact_grad_weight = torch.autograd.grad(exact_loss, (x, weight))
    assert (grad_x - exact_grad_x).norm() < 0.02 * exact_grad_x.norm()
    assert (grad_weight - exact_grad_weight).norm() < 0.02 * exact_grad_weight.norm()
    assert (grad_weight != grad_weight.bfloat16()).any()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk_logits", [1, UNLIMITED])
def test_targets_can_be_probabilities(chunk_logits, softcap):
    """The cross entropy and its gradient are those of the definition in float64."""
    x, weight, targets = inputs(12, 7, rows=9)
    probs = torch.rand(12, 7, generator=torch.Generator().manual_seed(1))
    probs[targets == IGNORE_INDEX] = 0.0
    logits = (x.double() @ weight.double().mT)[:, :7]
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    expected = -(probs * logits.softmax(-1).log()).sum()
    options = {"reduction": "sum", "softcap": softcap}
    loss = chunked_loss(x, weight, probs, 7, chunk_logits, **options)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for one, two in zip(
        torch.autograd.grad(loss, (x, weight)),
        torch.autograd.grad(expected, (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_float16_logits_are_not_chunked(monkeypatch):
    monkeypatch.setattr(loss_module, "_ChunkedCrossEntropy", None)
    x, weight, targets = inputs(8, 10, 10)
    loss = chunked_loss(x.half(), weight.half(), targets, 10, chunk_logits=1)
    assert loss.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("half", "bounds"), [(False, dict(atol=1e-5, rtol=1e-4)), (True, dict(atol=1e-2, rtol=1e-2))]
)
def test_chunked_loss_compiles_without_graph_breaks(half, bounds):
    x, weight, targets = inputs(30, 50, 64)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=half),
        patch.object(loss_module, "CHUNK_LOGITS", 640),
    ):
        losses = [f(x, weight, targets, 50) for f in (linear_cross_entropy, compiled)]
    torch.testing.assert_close(*losses)
    gradients = [torch.autograd.grad(loss, (x, weight)) for loss in losses]
    torch.testing.assert_close(*gradients, **bounds)


# Memory


class LargestTensor(TorchDispatchMode):
    """Context manager: records the number of elements of the largest new tensor."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        out = function(*arguments, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize(
    ("chunk_logits", "largest"),
    [(20_000, 20_000), (UNLIMITED, 512 * 1000)],
    ids=["chunks", "all at once"],
)
def test_at_most_one_chunk_of_logits_is_in_memory(chunk_logits, largest):
    x, weight, targets = inputs(512, 1000, 1000)
    with LargestTensor() as tensor:
        chunked_loss(x, weight, targets, 1000, chunk_logits).backward()
    assert tensor.elements == largest


# Padded vocabulary


@pytest.fixture
def plain_and_padded(variant):
    """Two models with the same weights. One has a padded vocabulary, whose tokens are likely."""
    plain = make_model(variant, vocab_size=50)
    padded = make_model(variant | dict(pad_vocab_multiple=64), vocab_size=50)
    weights = plain.state_dict()
    for name in ("wte.weight", "lm_head.weight"):
        weights[name] = torch.cat((weights[name], torch.full((14, 32), 9.0)))
    padded.load_state_dict(weights)
    return plain, padded


@VARIANTS
def test_padded_vocabulary_does_not_change_the_logits(plain_and_padded):
    plain, padded = plain_and_padded
    assert padded(random_tokens()).shape == (2, 24, 50)
    torch.testing.assert_close(padded(random_tokens()), plain(random_tokens()))


# Golden values

# The loss of a batch before and after one step on it. If a loss differs, the mathematics of a
# preset or its optimizer has changed: find out why. If the change is intended, use the printed
# numbers here, and say so in the commit.
GOLDEN = {
    "gpt2 adamw": (4.16596, 4.09132),
    "nanogpt adamw": (4.16596, 4.09760),
    "modern muon": (4.18954, 3.87041),
    "modern adamw": (4.18954, 4.10389),
}


@pytest.mark.parametrize("recipe", GOLDEN)
def test_one_step_of_each_preset_has_its_golden_losses(recipe):
    model_name, optimizer_name = recipe.split()
    words = [
        f"model={model_name}",
        f"optimizer={optimizer_name}",
        "model.n_layer=2",
        "model.n_head=2",
        "model.n_embd=32",
        "model.block_size=32",
        "model.ngram_table_size=64",
    ]
    config = parse_config("train", "", words)
    torch.manual_seed(1337)
    model = GPT(config.model, 65)
    x = random_tokens(4, 32, 65)
    y = random_tokens(4, 32, 65, seed=1)
    before = model(x, y)
    before.backward()
    for optimizer in build_optimizers(model, config.optimizer):
        optimizer.step()
    losses = (before.item(), model(x, y).item())
    print(recipe, losses)
    assert losses == pytest.approx(GOLDEN[recipe], abs=2e-4)
