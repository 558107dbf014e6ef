"""Models that are loaded for use in Python, and models that are built from weights."""

import sys
from pathlib import Path

import pytest
import torch
from helpers import sampling
from model_helpers import GPT2, make_model, random_tokens

from common.errors import UserError
from generation.config import LoadConfig
from generation.engine import Prompt, generate
from generation.load import load_for_inference, load_pretrained, load_run, model_from_weights
from model import AttentionConfig, GPTConfig
from model.attention import naive


def test_loaded_model_generates_the_sample_of_the_command(trained, sample):
    model, tokenizer = load_run("a")
    prompt = Prompt(tokenizer.encode("The 1"), seed=3)
    settings = sampling(max_new_tokens=30, temperature=0.8)
    chunks = generate(model, tokenizer, [prompt], settings, batch_size=1)
    text = "The 1" + "".join(chunk.text for chunk in chunks) + "\n"
    assert text == sample("run=a", "prompt=The 1", "seed=3", "max_new_tokens=30")


def test_loaded_model_can_be_trained(trained):
    model, tokenizer = load_run("a")
    tokens = torch.tensor([tokenizer.encode("The 1st line")])
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_model_from_weights_computes_the_same_logits(tie_embeddings):
    variant = GPT2 | dict(tie_embeddings=tie_embeddings)
    original = make_model(variant)
    model = model_from_weights(GPTConfig(**variant), 50, naive, original.state_dict())
    assert torch.equal(model(random_tokens()), original(random_tokens()))


def test_only_decoding_in_batches_needs_a_backend_that_supports_positions(
    trained, monkeypatch, capsys
):
    monkeypatch.setenv("CXX", sys.executable)  # any program
    config = LoadConfig(run="a", device="cpu", attention=AttentionConfig("flex"))
    load_for_inference(config, decodes_batches=False)
    assert capsys.readouterr().err.endswith("attention flex -> flex\n")
    with pytest.raises(UserError, match="positions; set batch_size=1"):
        load_for_inference(config, decodes_batches=True)


def test_model_from_weights_does_not_copy_them():
    weights = make_model(GPT2).state_dict()
    model = model_from_weights(GPTConfig(**GPT2), 50, naive, weights)
    for name, p in model.state_dict().items():
        assert p.data_ptr() == weights[name].data_ptr()


def test_model_from_weights_has_a_tied_head():
    weights = make_model(GPT2).state_dict()
    model = model_from_weights(GPTConfig(**GPT2), 50, naive, weights)
    assert model.lm_head.weight is model.wte.weight


@pytest.mark.parametrize("content", [[1], torch.ones(2)], ids=["list", "tensor"])
def test_file_that_is_no_checkpoint_is_refused(content, workdir):
    path = Path("runs/a/checkpoints/best.pt")
    path.parent.mkdir(parents=True)
    torch.save(content, path)
    with pytest.raises(UserError, match=r"best.pt is damaged \(.*; restore it, or set another"):
        load_pretrained("a")
