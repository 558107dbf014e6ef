"""Evaluation during training: validation loss, bits per byte, samples, and when it happens."""

import json
import math
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import load, metrics, summary, untimed
from run_helpers import train_in, val_losses

from data import tokenizer
from data.prepare import PreparedData, read_meta
from model import GPTConfig
from model.attention import naive
from model.gpt import GPT

T = 16  # block size
SETTINGS = ["train.batch_size=7", "model.dropout=0.5"]


def test_initial_evaluation_can_be_skipped(train):
    assert train("name=a", "train.steps=4", "eval.every=2", "eval.initial=false") == 0
    assert [row["step"] for row in metrics("a")] == [1, 2, 3, 4]
    assert list(val_losses("a")) == [2, 4]


@pytest.mark.parametrize(("every", "steps"), [(2, [0, 2, 4]), (3, [0, 3, 4]), (100, [0, 4])])
def test_last_step_is_evaluated_also_between_regular_evaluations(train, every, steps):
    assert train("name=a", "train.steps=4", f"eval.every={every}") == 0
    assert list(val_losses("a")) == steps


def test_random_weights_are_never_the_best(train):
    settings = ["optimizer=adamw", "optimizer.lr=1", "schedule.warmup_steps=0"]
    assert train("name=a", "train.steps=2", "eval.every=1", *settings) == 0
    losses = val_losses("a")
    assert min(losses.values()) == losses[0]
    assert summary("a")["best_step"] > 0


# The validation loss. The reference computes each target with the complete context of its window.


@dataclass
class Reference:
    folder: Path
    nats: list[float]  # of each target of the validation split
    num_bytes: int  # of all targets


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    """The run a, which evaluates all windows, and the losses of its last weights."""
    folder = tmp_path_factory.mktemp("reference")
    train_in(folder, "name=a", "eval.windows=null", *SETTINGS)
    with chdir(folder):
        saved = load("a")
        prepared = Path(summary("a")["data"]).absolute()
    model = GPT(GPTConfig(**saved["model_config"]), saved["vocab_size"], naive)
    model.load_state_dict(saved["model"])
    tokens = PreparedData(prepared, read_meta(prepared)).val[:].astype(np.int64)
    nats = compute_losses(model.eval(), torch.from_numpy(tokens))
    assert len(nats) == len(tokens) - 1
    text = tokenizer.from_spec(saved["tokenizer"]).decode(tokens[1:].tolist())
    return Reference(folder, nats, len(text.encode()))


def compute_losses(model: GPT, tokens: torch.Tensor) -> list[float]:
    """The loss of each token after the first. The last window overlaps the one before."""
    nats: list[float] = []
    for start in range(0, len(tokens) - 1, T):
        begin = min(start, len(tokens) - 1 - T)
        window = tokens[begin : begin + T + 1]
        losses = F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none")
        nats += losses[start - begin :].tolist()
    return nats


def read_last(reference: Reference, name: str) -> dict:
    with chdir(reference.folder):
        return metrics(name)[-1]


def test_validation_loss_is_the_mean_over_all_targets_without_dropout(reference):
    expected = np.mean(reference.nats)
    assert read_last(reference, "a")["val/loss"] == pytest.approx(expected, abs=1e-5)


def test_bits_per_byte_are_relative_to_the_bytes_of_the_targets(reference):
    expected = sum(reference.nats) / math.log(2) / reference.num_bytes
    assert read_last(reference, "a")["val/bpb"] == pytest.approx(expected, abs=1e-5)


def test_windows_are_spread_evenly_over_the_validation_split(reference):
    train_in(reference.folder, "name=b", "eval.windows=9", *SETTINGS)
    num_windows = math.ceil(len(reference.nats) / T)
    starts = [int(i * num_windows / 9) * T for i in range(9)]
    expected = np.mean([nat for start in starts for nat in reference.nats[start : start + T]])
    assert read_last(reference, "b")["val/loss"] == pytest.approx(expected, abs=1e-5)


# Samples


@pytest.fixture(scope="module")
def frozen(tmp_path_factory) -> Path:
    """A run whose weights hardly change."""
    folder = tmp_path_factory.mktemp("frozen")
    train_in(folder, "name=a", "optimizer=adamw", "optimizer.lr=1e-9")
    return folder


@pytest.fixture
def samples(frozen) -> dict[int, str]:
    """The samples of the run by step."""
    with chdir(frozen):
        return {row["step"]: row["sample"] for row in metrics("a") if "sample" in row}


def test_evaluations_after_step_0_log_a_sample(samples):
    assert list(samples) == [3, 6]


def test_sample_has_max_new_tokens(samples):
    assert [len(sample) for sample in samples.values()] == [4, 4]


def test_each_evaluation_samples_with_another_seed(samples):
    assert samples[3] != samples[6]


def test_samples_can_be_switched_off(train):
    assert train("name=a", "eval.sample.max_new_tokens=0") == 0
    assert not any(row.get("sample") for row in metrics("a"))
    assert not any(row.get("sample_tokens_per_second") for row in metrics("a"))


def test_sample_ends_at_a_stop_text_with_escapes(train):
    """\\n in eval.sample.stop is a line break."""
    words = ["eval.sample.max_new_tokens=400", r"eval.sample.stop=[\n]", "train.steps=1"]
    assert train("name=a", "eval.initial=false", *words) == 0
    assert "\n" not in metrics("a")[-1]["sample"]


# Attention


def test_attention_of_several_documents_is_measured(train, workdir):
    """In a context that is longer than the maps."""
    rows = [json.dumps({"text": f"The {n}th document."}) for n in range(200)]
    (workdir / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    settings = ["eval.attention_maps=true", "eval.attention_stats=true", "train.steps=1"]
    settings += ["data.path=rows.jsonl", "data.document_mask=true", "model.block_size=100"]
    assert train("name=a", *settings) == 0
    assert metrics("a")[1]["attention/entropy"] > 0
    assert Path("runs/a", metrics("a")[1]["attention_maps"]).exists()


def test_attention_statistics_do_not_change_training(train):
    """Of dropout and of the samples, too."""
    settings = ["dtype=bfloat16", "model.dropout=0.2", "optimizer=adamw"]
    assert train("name=a", "eval.attention_stats=true", *settings) == 0
    assert train("name=b", *settings) == 0
    rows = [
        {key: value for key, value in row.items() if not key.startswith("attention")}
        for row in metrics("a")
    ]
    assert rows != metrics("a")
    assert untimed(rows) == untimed(metrics("b"))
