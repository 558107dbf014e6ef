"""Plots and tables of attention weights, of a run and of a sample."""

import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import BYTE, metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from common.console import make_console
from configs.cli import parse_config, run_main
from data import tokenizer
from model.attention.attention_maps import uniform_entropy
from model.generation.attention_plots import entropy_table, format_label, plot_maps, plot_overview
from training.config import WandbConfig
from training.wandb_logger import WandbRun

MATH, WHITESPACE, OTHER = ["$x$", r"$\frac{", "{}", "_^%#"], ["\n    ", "\t\r", ""], ["\x00", "\ud800", "a" * 99]
DIFFICULT_TOKENS = [*MATH, *WHITESPACE, *OTHER, "日本語", "مرحبا"]


def is_png(path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_any_token_is_drawn_without_a_warning(tmp_path):
    T = len(DIFFICULT_TOKENS)
    weights = np.tril(np.ones((1, 5, T, T))) / np.arange(1, T + 1)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_maps(weights, np.zeros((1, 5)), DIFFICULT_TOKENS, tmp_path / "new")
    paths = sorted((tmp_path / "new").iterdir())
    assert [path.name for path in paths] == ["layer-01.png", "overview.png"]
    assert all(is_png(path) for path in paths)


@pytest.mark.parametrize(("H", "T"), [(1, 1), (17, 2)])
def test_overview_of_any_size_is_drawn(tmp_path, H, T):
    plot_overview(np.tril(np.ones((2, H, T, T))), np.zeros((2, H)), tmp_path / "a.png")
    assert is_png(tmp_path / "a.png")


@settings(max_examples=50)
@given(st.text())
def test_label_is_short_and_printable(word):
    label = format_label(word)
    assert len(label) <= 12 and label.isprintable() and " " not in label
    assert label == word or len(word) > 12 or " " in word or not word.isprintable()


@pytest.mark.parametrize(
    ("H", "columns"), [(2, "head 1   head 2"), (8, "minimum   mean   maximum"), (7, "head 6   head 7")]
)
def test_entropy_table_fits_into_80_columns(H, columns, capsys):
    entropies = np.linspace(1, 4, 3 * H).reshape(3, H)
    make_console(width=80).print(entropy_table(entropies, 2.5))
    printed = capsys.readouterr().out
    assert columns in printed
    numbers = [float(n) for n in re.findall(r"\d\.\d\d", printed)]
    shown = entropies if H <= 7 else np.stack([entropies.min(1), entropies.mean(1), entropies.max(1)], axis=1)
    assert numbers == pytest.approx([*shown.flatten(), *[2.5] * shown.shape[1]], abs=0.006)


def test_token_strings_show_incomplete_characters_as_bytes():
    byte = tokenizer.build_tokenizer(tokenizer.Corpus(["é", "b"], has_several_documents=True), BYTE)
    assert tokenizer.token_strings(byte, [97, 195, 169, 256]) == ["a", "\\xc3", "\\xa9", tokenizer.END_OF_TEXT]


def test_training_logs_attention_maps_at_evaluations(train, workdir):
    settings = ["train.steps=4", "eval.every=4"]
    assert train("name=a", "wandb.attention_maps=true", *settings) == 0
    assert train("name=b", *settings) == 0
    pictures = sorted((workdir / "runs/a/attention").iterdir())
    assert [path.name for path in pictures] == ["step-000000.png", "step-000004.png"]
    assert all(is_png(path) for path in pictures)
    rows, rows_without_maps = (metrics(name) for name in "ab")
    keys = {"attention", "entropy/layer-1", "entropy/layer-2"}
    for row, row_without_maps in zip(rows, rows_without_maps, strict=True):
        assert row.get("train/loss") == row_without_maps.get("train/loss")
        assert row.get("sample") == row_without_maps.get("sample")
        assert keys & set(row) == (keys if "val/loss" in row else set())
    assert rows[0]["attention"] == "runs/a/attention/step-000000.png"
    assert 0 < rows[0]["entropy/layer-1"] <= uniform_entropy(16) + 1e-6
    assert not (workdir / "runs/b/attention").exists()


def test_attention_map_of_a_prompt_is_saved(trained, sample, workdir):
    out = sample("run=a", "prompt=The 1st\n", "max_new_tokens=3", "attention_map=true")
    assert out.startswith("The 1st")
    assert "layer" not in out, "the table is on stderr"
    folder = workdir / "runs/a/attention"
    assert {path.name for path in folder.iterdir()} == {"layer-01.png", "layer-02.png", "overview.png"}


def run_sample(*overrides):
    from sample import main

    return run_main(main, parse_config("sample", "", ["run=a", "attention_map=true", *overrides]))


def test_attention_map_of_a_long_sample_shows_its_end(trained, capsys):
    assert run_sample("max_new_tokens=40") == 0
    err = capsys.readouterr().err
    assert "the attention map shows the last 16 of 41 tokens (the model's context)" in err
    assert re.search(r"layer 2 +\d\.\d\d +\d\.\d\d", err)
    assert re.search(rf"uniform +{uniform_entropy(16):.2f}", err)
    assert "written  runs/a/attention/layer-*.png, overview.png" in err


@pytest.mark.parametrize("prompt", ["", "T"])
def test_attention_map_of_a_short_prompt_shows_the_sample(trained, monkeypatch, prompt):
    """Without a prompt, the sample begins after a newline."""
    words = []
    monkeypatch.setattr(
        "model.generation.attention_plots.plot_maps", lambda weights, entropies, shown, folder: words.extend(shown)
    )
    assert run_sample("max_new_tokens=2", f"prompt={prompt}") == 0
    assert len(words) == 3 and words[0] == (prompt or "\n")


def test_attention_map_of_one_token_is_refused(trained, capsys):
    assert run_sample("max_new_tokens=0") == 2
    assert "set a longer prompt or a larger max_new_tokens" in capsys.readouterr().err


def start_wandb_run(folder) -> WandbRun:
    return WandbRun(WandbConfig(mode="offline", project="p", entity=None, group=None, tags=[]), folder, {})


def test_wandb_receives_the_picture_and_may_fail(tmp_path, capsys, monkeypatch):
    """The picture is logged with the other metrics. If it is missing, one message is printed."""
    import wandb

    picture, logged = tmp_path / "a.png", []
    plot_overview(np.ones((1, 1, 2, 2)), np.zeros((1, 1)), picture)
    run = SimpleNamespace(log=logged.append, define_metric=lambda *_, **__: None, summary={}, finish=lambda code: None)
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    sink = start_wandb_run(tmp_path)
    sink.log([{"step": 5, "attention": picture, "entropy/layer-1": 0.5}])
    sink.finish(0)
    (row,) = logged
    assert isinstance(row.pop("attention"), wandb.Image)
    assert row == {"step": 5, "entropy/layer-1": 0.5}
    picture.unlink()
    sink = start_wandb_run(tmp_path)
    sink.log([{"step": 6, "attention": picture}, {"step": 7}])
    sink.finish(0)
    assert capsys.readouterr().out.count("continuing without wandb") == 1
    assert len(logged) == 1
