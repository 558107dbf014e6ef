"""Sliding windows and documents that share a sequence, from the text on disk to the loss."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers import BYTE, TEXT_SOURCE, TRAINS_ON_CPU
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import GPT2, GROUPED, MODERN, VARIANTS, make, some_tokens

from data.loader import Loader
from data.prepare import prepare
from model import GPTConfig
from model.attention import BACKENDS
from model.gpt import positions_in_document


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_places_count_from_each_beginning(lengths):
    doc_ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    expected = torch.cat([torch.arange(n) for n in lengths])
    assert torch.equal(positions_in_document(torch.stack((doc_ids, doc_ids + 7))), torch.stack((expected, expected)))


@VARIANTS
@pytest.mark.parametrize("name", TRAINS_ON_CPU)
def test_documents_in_one_sequence_are_what_they_are_alone(variant, name):
    """Logits and gradients, with learned positions and rotary ones."""
    model, tokens, cuts = make(variant, attend=BACKENDS[name].attend), some_tokens(B=1), [0, 5, 6, 17, 24]
    doc_ids = torch.zeros(1, 24, dtype=torch.int64)
    for cut in cuts[1:-1]:
        doc_ids[:, cut:] += 1
    together = model(tokens, doc_ids=doc_ids)
    alone = torch.cat([model(tokens[:, a:b]) for a, b in pairwise(cuts)], dim=1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    parameters = list(model.parameters())
    weights = torch.randn(together.shape, generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad((alone * weights).sum(), parameters, allow_unused=True)
    for a, e in zip(torch.autograd.grad((together * weights).sum(), parameters), expected, strict=True):
        torch.testing.assert_close(a, e, atol=2e-4, rtol=1e-3)
    assert not torch.allclose(model(tokens), alone, atol=1e-3)  # and without the mask they are not


@pytest.mark.parametrize("variant", [GPT2, GROUPED], ids=["gpt2", "grouped"])
def test_windows_over_layers_add_up_to_how_far_a_token_sees(variant):
    """Windows 3 and 2: the last of 12 tokens hears of itself and (3 - 1) + (2 - 1) before it."""
    model, tokens = make(variant | dict(window=[3, 2], block_size=12)), some_tokens(B=1, T=12)
    found = []
    model.wte.register_forward_hook(lambda module, inputs, x: found.append(x) or x.retain_grad())
    model(tokens)[0, -1].pow(2).sum().backward()
    heard = found[0].grad[0].abs().sum(-1) > 0
    assert heard.tolist() == [False] * 8 + [True] * 4


@pytest.mark.parametrize("name", TRAINS_ON_CPU)
def test_a_window_as_long_as_the_context_is_none(name):
    plain, windowed = (make(MODERN | dict(window=w), attend=BACKENDS[name].attend) for w in (None, [24, 100]))
    assert windowed.config.windows == (None, None)
    assert torch.equal(plain(some_tokens()), windowed(some_tokens()))


def test_a_pattern_of_windows_repeats_over_the_layers():
    config = GPTConfig(**MODERN | dict(n_layer=6, window=[4, 4, None]))
    assert config.windows == (4, 4, None, 4, 4, None)
    assert [block.attn.window for block in make(MODERN | dict(n_layer=3, window=[4, None])).blocks] == [4, None, 4]


# From the text on


def table(documents: list[str]) -> Path:
    with open("table.jsonl", "w") as f:
        f.writelines(json.dumps({"text": text}) + "\n" for text in documents)
    return Path("table.jsonl")


def load(path: Path, T: int, document_mask: bool) -> Loader:
    config = replace(TEXT_SOURCE, path=str(path), val_fraction=0.3, document_mask=document_mask)
    prepared = prepare(config, BYTE, T, print_line=lambda line: None)
    return Loader(prepared, T, seed=0, document_mask=document_mask)


def test_an_end_of_text_begins_the_next_document(workdir):
    """256 is the end of text. In each window the ids rise by one at each, and the tokens read back are the texts."""
    path = table([f"document {n}" * (1 + n % 3) for n in range(30)])
    loader, plain = load(path, 40, True), load(path, 40, False)
    for split, count in (("train", loader.epoch_windows), ("val", loader.val_windows)):
        x, y, doc_ids = loader.batch(split, 0, count)
        assert doc_ids.shape == x.shape
        assert torch.equal(doc_ids.diff(dim=1), (x[:, 1:] == 256).long())
        assert doc_ids.max() > 1
        without = plain.batch(split, 0, count)
        assert torch.equal(without[0], x) and torch.equal(without[1], y) and without[2] is None


def test_a_text_of_one_document_cannot_be_masked(train, capsys):
    assert train("data.document_mask=true") == 2
    assert "which the tokenizer of a single document lacks; set data.document_mask=false" in capsys.readouterr().err


@pytest.mark.parametrize("position", ["rotary", "learned"])
def test_training_with_windows_and_documents_is_the_same_on_every_backend(train, workdir, position):
    path = table([f"the {n}th document says {n * n} and ends" for n in range(60)])
    settings = [f"data.path={path}", "data.document_mask=true", "model.window=[5,null]", "tokenizer=byte",
                f"model.position={position}", "model.n_kv_head=1"]  # fmt: skip
    losses, first = {}, {}
    for name in TRAINS_ON_CPU:
        assert train(*settings, f"attention={name}", f"name={name}") == 0
        rows = [json.loads(line) for line in (workdir / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
        losses[name] = [row[key] for row in rows for key in ("train/loss", "val/loss") if key in row]
        first[name] = rows[0]["val/loss"], rows[1]["train/loss"]
    for name in TRAINS_ON_CPU:
        assert losses[name] == pytest.approx(losses["naive"], abs=1e-5)
    assert train(*settings, "data.document_mask=false", "name=plain") == 0
    plain = [json.loads(line) for line in (workdir / "runs/plain/metrics.jsonl").read_text().splitlines()[:2]]
    assert plain[0]["val/loss"] != first["naive"][0]  # of the same weights: masked in validation
    assert plain[1]["train/loss"] != first["naive"][1]  # and in training


def test_what_a_run_masks_cannot_change_when_it_continues(train, workdir, capsys):
    path = table([f"the {n}th document says {n * n} and ends" for n in range(60)])
    settings = [f"data.path={path}", "tokenizer=byte", "name=a"]
    assert train(*settings) == 0
    assert train(*settings, "data.document_mask=true", "train.steps=8") == 2
    assert "data.document_mask=false (now true)" in capsys.readouterr().err
    assert train(*settings, "model.window=4", "train.steps=8") == 2
    assert "model.window=null (now 4)" in capsys.readouterr().err


def test_sampling_keeps_the_windows_of_the_checkpoint(train, sample, workdir):
    assert train("model.window=[4,null]", "name=a") == 0
    texts = {sample("run=a", f"attention={name}", "temperature=0", "max_new_tokens=20") for name in TRAINS_ON_CPU}
    assert len(texts) == 1
