"""Plots of attention weights, of a run and of a prompt."""

import shutil
import warnings
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO

import pytest
import torch
from generation_helpers import BYTES
from helpers import BYTE, TEXT, metrics, run_command, train_here
from model_helpers import GPT2, make_model

from common.plots import make_figure
from data import tokenizer
from generation import attention_plots
from generation.attention_plots import draw_attention_maps, plot_attention

PNG = b"\x89PNG"
MATH = ["$x$", r"$\frac{$", r"$\frac{", "{}", "_^%#"]
ESCAPED = [r"\n    ", r"\x00", ""]
DIFFICULT_TOKENS = [*MATH, *ESCAPED, "\\", "a" * 99, "日本語", "مرحبا"]


def uniform_weights(n_layer, H, T):
    return torch.ones(n_layer, H, T, T).tril() / torch.arange(1, T + 1).unsqueeze(1)


def plot_without_warnings(weights, path, words=None):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_attention(weights, path, words)


@pytest.mark.parametrize("H", [1, 5, 17])
def test_heads_are_drawn_without_a_warning(tmp_path, H):
    plot_without_warnings(uniform_weights(2, H, 1), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("H", [1, 5])
def test_tokens_are_drawn_without_a_warning(tmp_path, H):
    weights = uniform_weights(1, H, len(DIFFICULT_TOKENS))
    plot_without_warnings(weights, tmp_path / "a.png", DIFFICULT_TOKENS)
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_folder_of_a_plot_is_made(tmp_path):
    plot_attention(uniform_weights(1, 1, 2), tmp_path / "new/folder/a.png")
    assert (tmp_path / "new/folder/a.png").exists()


def test_token_strings_show_incomplete_characters_as_bytes():
    byte = tokenizer.build_tokenizer(BYTE, [], has_several_documents=True)
    expected = ["a", r"\xc3", r"\xa9", tokenizer.END_OF_TEXT]
    assert tokenizer.token_strings(byte, [97, 195, 169, 256]) == expected


def test_token_strings_are_one_line_without_control_characters():
    tokens = ["\n ", "\x1b[", "\\", r"\udc4d", "'s", "é"]
    vocabulary = [token.encode() for token in tokens]
    encoding = tokenizer._make_tokenizer("words", r"(?s).", vocabulary, {})
    expected = [r"\n ", r"\x1b[", r"\\", r"\\udc4d", "'s", "é"]
    assert tokenizer.token_strings(encoding, range(6)) == expected


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn, in order."""
    figures = []

    def make_and_keep_figure(*size):
        figures.append(make_figure(*size))
        return figures[-1]

    monkeypatch.setattr(attention_plots, "make_figure", make_and_keep_figure)
    return figures


def test_labels_of_a_plot_escape_bytes_once(tmp_path, figures):
    """é is two tokens of one byte each."""
    draw_attention_maps(make_model(GPT2, 256), BYTES, "é\n", tmp_path)
    labels = [label.get_text() for label in figures[-1].axes[0].get_yticklabels()]
    assert labels == [r"'\xc3'", r"'\xa9'", r"'\n'"]


def test_plots_show_the_end_of_a_long_prompt(tmp_path, figures):
    """The context of the model is 24 tokens."""
    draw_attention_maps(make_model(GPT2, 256), BYTES, 24 * "a" + 24 * "b", tmp_path)
    labels = [label.get_text() for label in figures[-1].axes[0].get_yticklabels()]
    assert labels == ["'b'"] * 24


def test_plot_of_many_tokens_has_no_labels(tmp_path, figures):
    plot_attention(uniform_weights(1, 2, 41), tmp_path / "a.png", ["a"] * 41)
    assert figures[0].axes[0].get_yticklabels() == []


@pytest.fixture(scope="module")
def plotted(folder_with_a_run, tmp_path_factory):
    """Plots for a prompt, with a context of 16 tokens: (folder, stdout, stderr)."""
    folder = tmp_path_factory.mktemp("plotted")
    shutil.copytree(folder_with_a_run, folder, dirs_exist_ok=True)
    out = StringIO()
    err = StringIO()
    with chdir(folder), redirect_stdout(out), redirect_stderr(err):
        assert run_command("sample", "run=a", "attention_map=true", "prompt=" + 9 * "The ") == 0
    return folder / "runs/a/attention", out.getvalue(), err.getvalue()


def test_plots_of_a_prompt_are_an_overview_and_a_plot_per_layer(plotted):
    folder, _, _ = plotted
    names = {path.name for path in folder.iterdir()}
    assert names == {"layer-01.png", "layer-02.png", "overview.png"}


def test_plots_of_a_prompt_print_no_sample(plotted):
    _, out, _ = plotted
    assert out == ""


def test_number_of_tokens_in_the_plots_is_reported(plotted):
    _, _, err = plotted
    assert "overview.png of the last 16 tokens" in err


@pytest.mark.parametrize("prompt", ["", "T"])
def test_prompt_of_fewer_than_two_tokens_is_refused(trained, capsys, prompt):
    assert run_command("sample", "run=a", "attention_map=true", f"prompt={prompt}") == 2
    assert "set a longer prompt" in capsys.readouterr().err


@pytest.fixture(scope="module")
def run_with_maps(tmp_path_factory):
    """The folder of two runs: a plots attention maps at its evaluations, and b does not."""
    folder = tmp_path_factory.mktemp("maps")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    with chdir(folder):
        for words in (["name=a", "eval.attention_maps=true"], ["name=b"]):
            assert train_here(*words, "train.steps=4", "eval.every=4") == 0
    return folder


def test_training_plots_attention_maps_at_evaluations(run_with_maps):
    pictures = sorted((run_with_maps / "runs/a/attention").iterdir())
    assert [path.name for path in pictures] == ["step-000000.png", "step-000004.png"]
    assert all(path.read_bytes().startswith(PNG) for path in pictures)


def test_training_plots_no_attention_maps_by_default(run_with_maps):
    assert not (run_with_maps / "runs/b/attention").exists()


def test_rows_of_evaluations_have_the_path_of_the_attention_maps(run_with_maps, monkeypatch):
    monkeypatch.chdir(run_with_maps)
    paths = [row["attention_maps"] for row in metrics("a") if "val/loss" in row]
    assert paths == [f"attention/step-00000{step}.png" for step in (0, 4)]


@pytest.mark.parametrize("key", ["train/loss", "sample"])
def test_attention_maps_do_not_change_the_training(run_with_maps, monkeypatch, key):
    monkeypatch.chdir(run_with_maps)
    assert [row.get(key) for row in metrics("a")] == [row.get(key) for row in metrics("b")]
