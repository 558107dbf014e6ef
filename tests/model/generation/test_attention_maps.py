"""Looking inside: causal weights and their entropies, against other ways to the same numbers, and what is written."""

import csv
import math
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import BYTE
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import GPT2, GROUPED, VARIANTS, make, some_tokens

from common.errors import UserError
from configs.cli import parse_config, run_main
from data import tokenizer
from model.attention import BACKENDS
from model.generation.attention_maps import attention_maps, entropy, layer_entropies, uniform_entropy
from model.generation.attention_plots import entropy_table, label, plot_maps, plot_overview, write_entropies
from model.gpt import apply_rotary
from training.loss_plot import read_metrics
from training.wandb_logger import WandbRun


def restless(variant, **how):
    """A model whose heads have something to look at: at the start of training all keys are nearly alike."""
    model = make(variant, **how)
    with torch.no_grad():
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.3) if p.ndim > 1 else None
    return model


def is_png(path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


# The weights


@settings(deadline=None, max_examples=8)
@given(st.integers(1, 24), st.integers(0, 2**31), st.sampled_from([GPT2, GROUPED]), st.sampled_from(list(BACKENDS)))
def test_rows_sum_to_one_and_no_key_is_seen_ahead_of_time(T, seed, variant, backend):
    weights = attention_maps(restless(variant, attend=BACKENDS[backend].attend, seed=seed), some_tokens(1, T))
    assert weights.shape == (2, 4, T, T)
    assert (weights >= 0).all()
    assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, T))
    assert (entropy(weights) <= uniform_entropy(T) + 1e-6).all()


@VARIANTS
def test_the_weights_are_those_of_the_formula_written_out(variant):
    """From each layer's own input: project, normalise, rotate, and one softmax per head and query, in float64."""
    model, T, D = restless(variant).double().eval(), 17, 8
    inputs = []
    hooks = [block.attn.register_forward_pre_hook(lambda _, given: inputs.append(given)) for block in model.blocks]
    tokens = some_tokens(1, T)
    model(tokens)
    for hook in hooks:
        hook.remove()
    expected = torch.zeros(2, 4, T, T, dtype=torch.float64)
    for layer, (x, rotary, *_) in enumerate(inputs):
        attn = model.blocks[layer].attn
        for head in range(4):
            shared = 4 + head // (4 // attn.n_kv_head)  # the keys stand behind the 4 query heads
            q, k = (
                x[0] @ attn.qkv.weight[i * D : (i + 1) * D].T
                + (0 if attn.qkv.bias is None else attn.qkv.bias[i * D : (i + 1) * D])
                for i in (head, shared)
            )
            if variant["qk_norm"]:
                q, k = (each / (each.square().mean(-1, keepdim=True) + 2.220446049250313e-16).sqrt() for each in (q, k))
            if rotary is not None:
                q, k = (apply_rotary(each[None, :, None], *rotary)[0, :, 0] for each in (q, k))
            for i in range(T):
                expected[layer, head, i, : i + 1] = (k[: i + 1] @ q[i] / math.sqrt(D)).softmax(0)
    torch.testing.assert_close(attention_maps(model, tokens).double(), expected, atol=1e-7, rtol=0)


def test_windows_and_documents_are_seen_in_the_maps():
    model, documents = restless(GPT2 | dict(window=[None, 3])), torch.tensor([[0] * 5 + [1] * 4])
    whole, narrow = attention_maps(model, some_tokens(1, 9))
    assert (narrow.tril(-3) == 0).all()
    assert (whole.tril(-3) > 0).any()
    apart = attention_maps(model, some_tokens(1, 9), documents)
    assert (apart[:, :, 5:, :5] == 0).all()
    torch.testing.assert_close(apart[:, :, :5], torch.stack((whole, narrow))[:, :, :5])


@VARIANTS
def test_looking_changes_nothing(variant):
    model, tokens = restless(variant | dict(dropout=0.3), attend=BACKENDS["sdpa"].attend), some_tokens(1, 12)
    model.eval()
    before, functions = model(tokens), [block.attn.attend for block in model.blocks]
    state = torch.get_rng_state()
    for training in (True, False):
        model.train(training)
        weights = attention_maps(model, tokens)
        assert all(module.training is training for module in model.modules())
    assert not weights.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert [block.attn.attend for block in model.blocks] == functions
    assert torch.equal(model(tokens), before)


def test_the_model_is_itself_again_after_an_error():
    model = make(GPT2)
    functions = [block.attn.attend for block in model.blocks]
    with pytest.raises(UserError, match="25 tokens do not fit"):
        attention_maps(model.train(), torch.zeros(1, 25, dtype=torch.int64))

    assert [block.attn.attend for block in model.blocks] == functions
    assert model.training


# The entropies


@given(st.integers(1, 300))
def test_the_entropy_of_uniform_weights_is_the_largest_and_of_one_key_nothing(T):
    uniform = torch.ones(T, T, dtype=torch.float64).tril() / torch.arange(1, T + 1)[:, None]
    assert entropy(uniform).item() == pytest.approx(uniform_entropy(T), abs=1e-12)
    assert uniform_entropy(T) == pytest.approx(np.log(np.arange(1, T + 1)).mean(), abs=1e-12)
    assert entropy(torch.full((2, 3, T, T), 1 / T, dtype=torch.float64)).numpy() == pytest.approx(math.log(T))
    assert f"{entropy(torch.eye(T)).item():.2f}" == "0.00"


def test_the_entropy_of_a_layer_is_the_mean_over_its_heads():
    weights = attention_maps(restless(GPT2), some_tokens(1, 9))
    by_layer = layer_entropies(weights)
    assert list(by_layer) == ["entropy/layer-1", "entropy/layer-2"]
    w = weights.double().numpy()
    by_hand = -(w * np.log(np.where(w > 0, w, 1))).sum(-1).mean((1, 2))
    assert list(by_layer.values()) == pytest.approx(by_hand, abs=1e-6)


# Pictures and tables

AWKWARD = ["$x$", r"$\frac{", "\n    ", "\t\r", "\x00", "日本語", "\ud800", "{}", "_^%#", "", "a" * 99, "مرحبا"]


def test_any_token_can_be_drawn_without_a_warning(tmp_path):
    T = len(AWKWARD)
    weights = np.tril(np.ones((1, 5, T, T))) / np.arange(1, T + 1)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paths = plot_maps(weights, np.zeros((1, 5)), AWKWARD, tmp_path / "new")
    assert [path.name for path in paths] == ["layer-01.png", "overview.png"]
    assert all(is_png(path) for path in paths)


@pytest.mark.parametrize(("H", "T"), [(1, 1), (17, 2)])
def test_an_overview_of_any_size(tmp_path, H, T):
    assert is_png(plot_overview(np.tril(np.ones((2, H, T, T))), np.zeros((2, H)), tmp_path / "a.png"))


@settings(max_examples=50)
@given(st.text())
def test_a_label_is_short_and_has_only_what_the_font_can_draw(word):
    drawable = {ord(c) for c in "abc$é"}
    shown = label(word, drawable)
    assert len(shown) <= 12
    assert set(shown) <= set("abc$é·⏎↵⇥�…")
    assert shown == word or not (len(word) <= 12 and set(map(ord, word)) <= drawable)


@pytest.mark.parametrize(("H", "columns"), [(2, "head 1  head 2"), (9, "least  mean  largest"), (8, "head 7  head 8")])
def test_the_table_fits_into_80_columns(H, columns, capsys):
    from rich.console import Console

    entropies = np.linspace(1, 4, 3 * H).reshape(3, H)
    Console(width=80).print(entropy_table(entropies, 2.5))
    printed = capsys.readouterr().out
    assert columns in printed
    numbers = [float(n) for n in re.findall(r"\d\.\d\d", printed)]
    shown = entropies if H <= 8 else np.stack([entropies.min(1), entropies.mean(1), entropies.max(1)], axis=1)
    assert numbers == pytest.approx([*shown.flatten(), *[2.5] * shown.shape[1]], abs=0.006)


def test_the_entropies_file_has_a_row_per_head(tmp_path):
    write_entropies(np.array([[0.5, 1.0], [0.0, 0.25]]), 2.0, tmp_path / "entropies.csv")
    with open(tmp_path / "entropies.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["layer", "head", "entropy_nats", "uniform_nats"]
    assert [[float(cell) for cell in row] for row in rows[1:]] == [
        [1, 1, 0.5, 2], [1, 2, 1, 2], [2, 1, 0, 2], [2, 2, 0.25, 2]
    ]  # fmt: skip


def test_words_of_tokens_are_text_and_bytes_that_are_none_are_said():
    byte = tokenizer.build(tokenizer.Corpus(["é", "b"], several=True), BYTE)
    assert tokenizer.token_strings(byte, [97, 195, 169, 256]) == ["a", "\\xc3", "\\xa9", tokenizer.END_OF_TEXT]


# From the command line


def test_a_run_draws_at_each_evaluation_and_a_sample_of_it_draws_its_prompt(
    train, sample, workdir, capsys, monkeypatch
):
    settings = ["train.steps=4", "eval.every=4"]
    assert train("name=a", "wandb.attention_maps=true", *settings) == 0
    assert train("name=b", *settings) == 0
    folder = workdir / "runs/a/attention"
    pictures = ["step-000000.png", "step-000004.png"]
    assert sorted(path.name for path in folder.iterdir()) == pictures
    assert all(is_png(path) for path in folder.iterdir())
    rows, plain = (read_metrics(workdir / "runs" / name) for name in "ab")
    for row, same in zip(rows, plain, strict=True):
        assert row.get("train/loss") == same.get("train/loss")  # looking changes nothing
        assert row.get("sample") == same.get("sample")
        assert {key for key in row if key in ("attention", "entropy/layer-1", "entropy/layer-2")} == (
            {"attention", "entropy/layer-1", "entropy/layer-2"} if "val/loss" in row else set()
        )
    assert rows[0]["attention"] == "runs/a/attention/step-000000.png"
    assert 0 < rows[0]["entropy/layer-1"] <= uniform_entropy(16) + 1e-6
    assert not (workdir / "runs/b/attention").exists()

    out = sample("run=a", "prompt=The 1st\n", "max_new_tokens=3", "attention_map=true")
    assert out.startswith("The 1st")
    assert "layer" not in out
    assert {path.name for path in folder.iterdir()} == {
        *pictures, "layer-01.png", "layer-02.png", "overview.png", "entropies.csv"
    }  # fmt: skip
    with open(folder / "entropies.csv", newline="") as file:
        told = list(csv.DictReader(file))
    assert len(told) == 4
    assert all(0 < float(row["entropy_nats"]) < float(row["uniform_nats"]) for row in told)
    assert float(told[0]["uniform_nats"]) == pytest.approx(uniform_entropy(len("The 1st\n")), abs=1e-6)

    # What it says, of the first text where there is no prompt, and of the end of what is too long.
    from sample import main

    assert run_main(main, parse_config("sample", "", ["run=a", "attention_map=true", "max_new_tokens=40"])) == 0
    err = capsys.readouterr().err
    assert "the attention map is of the last 16 of 41 tokens, as many as the model sees at once" in err
    assert re.search(r"layer 2 +\d\.\d\d +\d\.\d\d", err)
    assert "written  runs/a/attention/layer-*.png, overview.png, entropies.csv" in err
    for prompt in ("", "T"):  # the newline that a text begins from, or the prompt, and two tokens more
        words = []
        monkeypatch.setattr("sample.plot_maps", lambda w, e, shown, folder, words=words: words.extend(shown))
        chosen = ["run=a", "attention_map=true", "max_new_tokens=2", f"prompt={prompt}"]
        assert run_main(main, parse_config("sample", "", chosen)) == 0
        assert len(words) == 3 and words[0] == (prompt or "\n")
    assert run_main(main, parse_config("sample", "", ["run=a", "attention_map=true", "max_new_tokens=0"])) == 2
    assert "set a longer prompt or max_new_tokens" in capsys.readouterr().err


def test_wandb_is_given_the_picture_and_may_fail(tmp_path, capsys):
    """With its row, under the row's step; what goes wrong in it is said once."""
    import wandb

    picture, told = plot_overview(np.ones((1, 1, 2, 2)), np.zeros((1, 1)), tmp_path / "a.png"), []
    sink = object.__new__(WandbRun)
    sink.run, sink.start = SimpleNamespace(log=told.append), None
    sink.log([{"step": 5, "attention": picture, "entropy/layer-1": 0.5}])
    (row,) = told
    assert isinstance(row.pop("attention"), wandb.Image)
    assert row == {"step": 5, "entropy/layer-1": 0.5}
    picture.unlink()
    sink.log([{"step": 6, "attention": picture}, {"step": 7}])
    assert capsys.readouterr().out.count("the run goes on without it") == 1
    assert len(told) == 1
