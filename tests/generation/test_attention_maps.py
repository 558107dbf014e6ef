"""Attention weights and statistics, compared with their definitions, and plots of the weights."""

import math
import shutil
from contextlib import chdir

import pytest
import torch
import torch.nn.functional as F
from generation_helpers import BYTES, MIXED, make_peaked_model, make_random_model
from helpers import TEXT, metrics, run_command, summary, train_here
from model_helpers import GPT2, GROUPED, MODERN, ROTARY, make_model, random_tokens

import sample
from common.errors import UserError
from common.plots import make_figure
from data import tokenizer
from generation import attention_maps as maps_module
from generation.attention_maps import (
    attention_maps,
    attention_statistics,
    draw_attention,
    entropy,
    plot_attention,
    record_attention,
    score_variance,
)
from model.attention import BACKENDS
from model.attention.backends import attention_scores
from model.layers import apply_rotary

EPS = torch.finfo(torch.float64).eps
WINDOW = GPT2 | dict(window=[None, 3])
PNG = b"\x89PNG"


# Weights


def head_input(attn, x, rotary, head, D, key_offset=False):
    """Queries or keys (T, D) of one head, after QK-norm, key offset and rotary positions."""
    rows = slice(head * D, (head + 1) * D)
    y = x @ attn.qkv.weight[rows].T
    if attn.qkv.bias is not None:
        y = y + attn.qkv.bias[rows]
    if attn.config.qk_norm:
        y = y / (y.square().mean(-1, keepdim=True) + EPS).sqrt()
    if key_offset:
        y = torch.cat((y[:, : D // 2], F.pad(y[:-1, D // 2 :], (0, 0, 1, 0))), dim=1)
    if rotary is not None:
        y = apply_rotary(y[None, :, None], *rotary)[0, :, 0]
    return y


@pytest.mark.parametrize(
    "variant",
    [GPT2, MODERN, GROUPED, *ROTARY.values()],
    ids=["gpt2", "modern", "grouped", *ROTARY],
)
def test_weights_equal_the_formula(variant):
    """The expected weights are computed head by head and query by query, in float64."""
    model = make_peaked_model(variant).double().eval()
    T, D = 17, 8
    tokens = random_tokens(1, T)
    inputs = []
    for block in model.blocks:
        block.attn.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments))
    model(tokens)
    expected = torch.zeros(2, 4, T, T, dtype=torch.float64)
    for layer, (x, shared) in enumerate(inputs):
        attn = model.blocks[layer].attn
        for head in range(4):
            key_head = 4 + head // (4 // model.config.kv_heads)  # after the 4 query heads
            q = head_input(attn, x[0], shared.rotary, head, D)
            k = head_input(attn, x[0], shared.rotary, key_head, D, model.config.key_offset)
            for i in range(T):
                scores = k[: i + 1] @ q[i] / math.sqrt(D)
                expected[layer, head, i, : i + 1] = scores.softmax(0)
    torch.testing.assert_close(attention_maps(model, tokens).double(), expected, atol=1e-7, rtol=0)


def test_keys_outside_the_window_or_the_document_have_no_weight():
    doc_ids = torch.tensor([[0] * 5 + [1] * 4])
    full, windowed = attention_maps(make_peaked_model(WINDOW), random_tokens(1, 9), doc_ids)
    assert (full.tril(-3) > 0).any()
    assert (windowed.tril(-3) == 0).all()
    assert (full[:, 5:, :5] == 0).all()


def test_weights_of_linear_attention_are_causal_and_sum_to_one():
    maps = attention_maps(make_random_model(MIXED), random_tokens(1))
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 4, 24))
    assert (maps.triu(1) == 0).all()


@pytest.mark.parametrize("variant", [GPT2, MIXED | dict(attention_softcap=0.5)])
def test_recording_does_not_change_what_the_layers_compute(variant):
    model = make_random_model(variant)
    attended = []
    for block in model.blocks:
        block.attn.proj.register_forward_pre_hook(lambda _, inputs: attended.append(inputs[0]))
    tokens = random_tokens(1)
    model(tokens)
    attention_maps(model, tokens)
    torch.testing.assert_close(attended[2:], attended[:2])


@pytest.fixture
def model():
    """With another attention function than the recorded one."""
    return make_peaked_model(GPT2, attend=BACKENDS["sdpa"].attend)


def test_recording_has_no_gradients(model):
    assert not attention_maps(model, random_tokens(1, 12)).requires_grad


@pytest.mark.parametrize("T", [12, 25], ids=["success", "error"])
def test_attention_functions_are_restored(model, T):
    functions = [block.attn.attend for block in model.blocks]
    try:
        attention_maps(model, random_tokens(1, T))
    except UserError:
        assert T == 25
    assert [block.attn.attend for block in model.blocks] == functions


# Statistics

DOCUMENTS = torch.tensor([[0] * 3 + [1] * 4 + [2] * 2])


@pytest.mark.parametrize(
    "mask", [{}, dict(window=3), dict(doc_ids=DOCUMENTS)], ids=["causal", "window", "documents"]
)
def test_statistics_equal_their_definitions(mask):
    """Pair by pair. Masked pairs do not count."""
    generator = torch.Generator().manual_seed(0)
    q, k = 2 * torch.randn(2, 1, 9, 4, 8, dtype=torch.float64, generator=generator)
    scores = attention_scores(q, k, **mask)[0]
    for head, rows in enumerate(scores.tolist()):
        visible = [[score for score in row if score > -math.inf] for row in rows]
        pairs = [score for row in visible for score in row]
        mean = sum(pairs) / len(pairs)
        variance = sum((score - mean) ** 2 for score in pairs) / len(pairs)
        assert score_variance(scores[None])[head].item() == pytest.approx(variance)
        nats = 0.0
        for row in visible:
            total = sum(map(math.exp, row))
            nats -= sum(math.exp(s) / total * math.log(math.exp(s) / total) for s in row)
        assert entropy(scores.softmax(-1))[head].item() == pytest.approx(nats / 9)


def test_statistics_are_means_over_layers_heads_and_sequences():
    model = make_peaked_model(GPT2 | dict(window=[None, 5]))
    tokens = random_tokens(3, 24)
    doc_ids = (torch.arange(24) >= torch.tensor([[8], [12], [24]])).long()
    values = []
    for i in range(3):
        weights = attention_maps(model, tokens[i:], doc_ids[i:])
        values += entropy(weights).flatten().tolist()
    statistics = attention_statistics(model, tokens, doc_ids)
    assert set(statistics) == {"attention/score_variance", "attention/entropy"}
    assert statistics["attention/entropy"] == pytest.approx(sum(values) / 24, rel=1e-5)


def test_scores_under_autocast_are_in_float32(model):
    with torch.autocast("cpu", torch.bfloat16):
        scores = record_attention(model, random_tokens(1), None, torch.clone)
    assert scores.dtype == torch.float32


# Plots

DIFFICULT_TOKENS = ["$x$", r"$\frac{$", "_^%#", r"\n    ", "", "\\", "a" * 99, "é"]


def uniform_weights(n_layer, H, T):
    return torch.ones(n_layer, H, T, T).tril() / torch.arange(1, T + 1).unsqueeze(1)


@pytest.mark.draws
@pytest.mark.parametrize("words", [[], DIFFICULT_TOKENS], ids=["heads", "tokens"])
@pytest.mark.parametrize("H", [1, 5])
@pytest.mark.filterwarnings("error")
def test_weights_are_drawn_without_a_warning(tmp_path, H, words):
    path = tmp_path / "new/folder/a.png"
    plot_attention(uniform_weights(2, H, max(1, len(words))), path, words)
    assert path.read_bytes().startswith(PNG)


def test_token_strings_are_one_line_without_control_characters():
    tokens = ["\n ", "\x1b[", "\\", r"\udc4d", "'s", "é"]
    vocabulary = [token.encode() for token in tokens]
    encoding = tokenizer.Tokenizer("words", r"(?s).", vocabulary, {})
    expected = [r"\n ", r"\x1b[", r"\\", r"\\udc4d", "'s", "é"]
    assert tokenizer.token_strings(encoding, range(6)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("é\n", [r"'\xc3'", r"'\xa9'", r"'\n'"]), (24 * "a" + 24 * "b", ["'b'"] * 24)],
    ids=["bytes", "the end of a long prompt"],
)
def test_labels_are_the_tokens_of_the_prompt(tmp_path, monkeypatch, text, expected):
    """The context of the model is 24 tokens."""
    figures = []
    monkeypatch.setattr(
        maps_module, "make_figure", lambda *size: figures.append(make_figure(*size)) or figures[-1]
    )
    draw_attention(make_model(GPT2, 256), BYTES, list(text.encode()), tmp_path / "a.png")
    labels = [label.get_text() for label in figures[-1].axes[0].get_yticklabels()]
    assert labels == expected


def test_prompt_is_plotted_in_the_folder_of_the_run(trained, workdir, monkeypatch, capsys):
    """Another run becomes run=last while the model is loaded. The context is 16 tokens."""
    load = sample.load_for_inference

    def load_slowly(*arguments):
        loaded = load(*arguments)
        shutil.copytree("runs/a", "runs/newer", copy_function=shutil.copy)
        return loaded

    monkeypatch.setattr(sample, "load_for_inference", load_slowly)
    assert run_command("sample", "attention_map=true", "prompt=" + 9 * "The ") == 0
    assert (workdir / "runs/a/attention/prompt.png").read_bytes().startswith(PNG)
    out, err = capsys.readouterr()
    assert out == ""
    assert "written  runs/a/attention/prompt.png" in err


@pytest.mark.parametrize("prompt", ["", "T"])
def test_prompt_of_fewer_than_two_tokens_is_refused(trained, capsys, prompt):
    assert run_command("sample", "run=a", "attention_map=true", f"prompt={prompt}") == 2
    assert "set a longer prompt" in capsys.readouterr().err


# Training


@pytest.fixture(scope="module")
def run_with_maps(tmp_path_factory):
    """The folder of two runs: a measures attention at its evaluations, and b does not."""
    folder = tmp_path_factory.mktemp("maps")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    settings = ["train.steps=4", "eval.every=4", "model.dropout=0.2", "dtype=bfloat16"]
    with chdir(folder):
        attention = ["eval.attention_maps=true", "eval.attention_stats=true"]
        assert train_here("name=a", *attention, *settings) == 0
        assert train_here("name=b", *settings) == 0
    return folder


def test_evaluations_plot_attention_maps_and_log_statistics(run_with_maps, monkeypatch):
    monkeypatch.chdir(run_with_maps)
    for row in metrics("a"):
        keys = {key for key in row if key.startswith("attention")}
        if "val/loss" not in row:
            assert keys == set()
            continue
        assert keys == {"attention_maps", "attention/score_variance", "attention/entropy"}
        assert row["attention_maps"] == f"attention/step-{row['step']:06d}.png"
        picture = run_with_maps / "runs/a" / row["attention_maps"]
        assert picture.read_bytes().startswith(PNG)
    assert summary("a")["last_attention_entropy"] == metrics("a")[-1]["attention/entropy"]


@pytest.mark.parametrize("key", ["train/loss", "sample"])
def test_measuring_attention_does_not_change_the_training(run_with_maps, monkeypatch, key):
    monkeypatch.chdir(run_with_maps)
    assert [row.get(key) for row in metrics("a")] == [row.get(key) for row in metrics("b")]
