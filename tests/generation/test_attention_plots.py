"""Plots of attention weights, of a run and of a sample."""

import warnings

import pytest
import torch
from generation_helpers import BYTES
from helpers import BYTE, metrics, run_command
from model_helpers import GPT2, make_model

from common.plots import make_figure
from data import tokenizer
from generation import attention_plots
from generation.attention_plots import draw_attention_maps, plot_attention
from generation.head_statistics import uniform_entropy

MATH, ESCAPED, OTHER = ["$x$", r"$\frac{", "{}", "_^%#"], [r"\n    ", r"\x00", ""], ["\\", "a" * 99]
MAP, PNG = ["run=a", "attention_map=true"], b"\x89PNG"
DIFFICULT_TOKENS = [*MATH, *ESCAPED, *OTHER, "日本語", "مرحبا"]


@pytest.mark.parametrize("words", [None, DIFFICULT_TOKENS], ids=["overview", "words"])
@pytest.mark.parametrize("H", [1, 5, 17])
def test_heads_and_tokens_are_drawn_without_a_warning(tmp_path, H, words):
    T = 1 if words is None else len(words)
    weights = torch.ones(2, H, T, T).tril() / torch.arange(1, T + 1).unsqueeze(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_attention(weights, tmp_path / "new/a.png", words)
    assert (tmp_path / "new/a.png").read_bytes().startswith(PNG)


def test_token_strings_show_incomplete_characters_as_bytes():
    byte = tokenizer.build_tokenizer(BYTE, [], has_several_documents=True)
    assert tokenizer.token_strings(byte, [97, 195, 169, 256]) == [
        "a",
        r"\xc3",
        r"\xa9",
        tokenizer.END_OF_TEXT,
    ]


def test_token_strings_are_one_line_without_control_characters():
    tokens = ["\n ", "\x1b[", "\\", r"\udc4d", "'s", "é"]
    encoding = tokenizer._make_tokenizer(
        "words", r"(?s).", [token.encode() for token in tokens], {}
    )
    assert tokenizer.token_strings(encoding, range(6)) == [
        r"\n ",
        r"\x1b[",
        r"\\",
        r"\\udc4d",
        "'s",
        "é",
    ]


def test_labels_of_a_plot_escape_bytes_once(tmp_path, monkeypatch):
    """é is two tokens of one byte each."""
    figures = []
    monkeypatch.setattr(
        attention_plots,
        "make_figure",
        lambda *size: figures.append(make_figure(*size)) or figures[-1],
    )
    draw_attention_maps(make_model(GPT2, 256), BYTES, "é\n", tmp_path)
    labels = [label.get_text() for label in figures[-1].axes[0].get_yticklabels()]
    assert labels == [r"'\xc3'", r"'\xa9'", r"'\n'"]


def test_training_logs_attention_maps_at_evaluations(train, workdir):
    for words in (["name=a", "eval.attention_maps=true"], ["name=b"]):
        assert train(*words, "train.steps=4", "eval.every=4") == 0
    pictures = sorted((workdir / "runs/a/attention").iterdir())
    assert [path.name for path in pictures] == ["step-000000.png", "step-000004.png"]
    assert all(path.read_bytes().startswith(PNG) for path in pictures)
    rows, rows_without_maps = (metrics(name) for name in "ab")
    for row, row_without_maps in zip(rows, rows_without_maps, strict=True):
        assert row.get("train/loss") == row_without_maps.get("train/loss")
        assert row.get("sample") == row_without_maps.get("sample")
        assert ("attention" in row) == ("val/loss" in row)
    assert rows[0]["attention"] == "runs/a/attention/step-000000.png"
    assert not (workdir / "runs/b/attention").exists()


def test_attention_map_of_a_long_sample_shows_its_end(trained, workdir, capsys):
    assert run_command("sample", *MAP, "max_new_tokens=40") == 0
    err = capsys.readouterr().err
    assert "written  runs/a/attention/layer-*.png, overview.png of the last 16 tokens" in err
    assert f"entropy of uniform attention: {uniform_entropy(16):.2f} nats" in err
    names = {path.name for path in (workdir / "runs/a/attention").iterdir()}
    assert names == {"layer-01.png", "layer-02.png", "overview.png"}


def test_attention_map_shows_the_sample_or_a_prompt_of_several_tokens(trained, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(
        "generation.attention_plots.plot_attention", lambda *args, **_: shown.append(args[2:])
    )
    assert run_command("sample", *MAP, "max_new_tokens=3") == 0
    _, (words,), _ = shown
    assert len(words) == 3
    capsys.readouterr()
    assert run_command("sample", *MAP, "prompt=The 7") == 0 and len(shown) == 6
    assert capsys.readouterr().out == "", "no sample"
    assert run_command("sample", *MAP, "prompt=T") == 2
    assert "set a longer prompt, or none" in capsys.readouterr().err
