"""Evaluation during training: validation loss, bits per byte, samples, and when it happens."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import load, metrics, summary, untimed
from run_helpers import val_losses

from data import tokenizer
from data.prepare import PreparedData, read_meta
from model import GPTConfig
from model.attention import naive
from model.gpt import GPT

T = 16  # block size
SETTINGS = ["train.batch_size=7", "model.dropout=0.5", "train.steps=2", "eval.initial=false"]


def test_initial_evaluation_can_be_skipped(train):
    assert train("name=a", "train.steps=4", "eval.every=2", "eval.initial=false") == 0
    assert [row["step"] for row in metrics("a")] == [1, 2, 3, 4]
    assert list(val_losses("a")) == [2, 4]


@pytest.mark.parametrize(("every", "steps"), [(2, [0, 2, 4]), (3, [0, 3, 4])])
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


def compute_losses(model: GPT, tokens: torch.Tensor) -> list[float]:
    """The loss of each token after the first. The last window overlaps the one before."""
    nats: list[float] = []
    for start in range(0, len(tokens) - 1, T):
        begin = min(start, len(tokens) - 1 - T)
        window = tokens[begin : begin + T + 1]
        losses = F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none")
        nats += losses[start - begin :].tolist()
    return nats


def test_validation_loss_and_bits_per_byte_are_of_all_targets_or_of_spread_windows(train):
    """Without dropout."""
    assert train("name=a", "eval.windows=null", *SETTINGS) == 0
    assert train("name=b", "eval.windows=9", *SETTINGS) == 0
    saved = load("a")
    prepared = Path(summary("a")["data"])
    model = GPT(GPTConfig(**saved["model_config"]), saved["vocab_size"], naive)
    model.load_state_dict(saved["model"])
    tokens = PreparedData(prepared, read_meta(prepared), "").val[:].astype(np.int64)
    nats = compute_losses(model.eval(), torch.from_numpy(tokens))
    assert len(nats) == len(tokens) - 1
    last = metrics("a")[-1]
    assert last["val/loss"] == pytest.approx(np.mean(nats), abs=1e-5)
    text = tokenizer.from_spec(saved["tokenizer"]).decode(tokens[1:].tolist())
    bits_per_byte = sum(nats) / math.log(2) / len(text.encode())
    assert last["val/bpb"] == pytest.approx(bits_per_byte, abs=1e-5)
    num_windows = math.ceil(len(nats) / T)
    starts = [int(i * num_windows / 9) * T for i in range(9)]
    expected = np.mean([nat for start in starts for nat in nats[start : start + T]])
    assert metrics("b")[-1]["val/loss"] == pytest.approx(expected, abs=1e-5)


# Samples


def test_each_evaluation_after_step_0_samples_with_another_seed(train):
    """The weights hardly change."""
    assert train("name=a", "optimizer=adamw", "optimizer.lr=1e-9") == 0
    samples = {row["step"]: row["sample"] for row in metrics("a") if "sample" in row}
    assert list(samples) == [3, 6]
    assert [len(sample) for sample in samples.values()] == [4, 4]
    assert samples[3] != samples[6]


def test_samples_can_be_switched_off(train):
    assert train("name=a", "eval.sample.max_new_tokens=0", "train.steps=1") == 0
    assert not any(row.get("sample") for row in metrics("a"))


def test_sample_ends_at_a_stop_text_with_escapes(train):
    """\\n in eval.sample.stop is a line break."""
    words = ["eval.sample.max_new_tokens=400", r"eval.sample.stop=\n", "train.steps=1"]
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
    settings = ["dtype=bfloat16", "model.dropout=0.2", "optimizer=adamw", "train.steps=3"]
    settings += ["eval.every=2"]
    assert train("name=a", "eval.attention_stats=true", *settings) == 0
    assert train("name=b", *settings) == 0
    rows = [
        {key: value for key, value in row.items() if not key.startswith("attention")}
        for row in metrics("a")
    ]
    assert rows != metrics("a")
    assert untimed(rows) == untimed(metrics("b"))
