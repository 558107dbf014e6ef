"""Building the parts of a run: activation checkpointing, and the weights of another run."""

import shutil
from pathlib import Path

import pytest
import torch
from data_helpers import write_file
from helpers import TINY, load, metrics, run_command, tiny_model, train_step
from run_helpers import train_in, val_losses

from configs.cli import parse_config
from training.build import build_model, checkpoint_activations
from training.runtime import resolve_runtime

# Activation checkpointing


def make_model(part: str, dropout: float = 0.0):
    model = tiny_model(dropout=dropout)
    checkpoint_activations(model, part)
    return model


def gradients(part: str, dropout: float) -> dict[str, torch.Tensor]:
    model = make_model(part, dropout)
    torch.manual_seed(1)
    train_step(model, [])
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("part", ["block", "attention"])
def test_checkpointing_does_not_change_gradients(part, dropout):
    torch.testing.assert_close(gradients(part, dropout), gradients("none", dropout), atol=0, rtol=0)


def count_saved_numbers(part: str) -> int:
    """Number of elements of the tensors that the forward pass saves for the backward pass."""
    sizes = []

    def pack(x):
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        make_model(part)(torch.zeros(4, 8, dtype=torch.int64))
    return sum(sizes)


def test_checkpointing_saves_fewer_activations():
    saved = [count_saved_numbers(part) for part in ("block", "attention", "none")]
    assert saved[0] < saved[1] < saved[2]


@pytest.mark.slow
@pytest.mark.compiles
def test_checkpointed_model_compiles_without_graph_breaks():
    model = make_model("block")
    torch.compiler.reset()  # other tests have used up the limit of recompilations
    compiled = torch.compile(model, fullgraph=True)
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    torch.testing.assert_close(compiled(tokens, tokens), model(tokens, tokens))


def test_setting_selects_the_checkpointed_part(workdir, monkeypatch):
    parts = []
    monkeypatch.setattr("training.build.checkpoint_activations", lambda _, part: parts.append(part))
    config = parse_config("train", "", [*TINY, "train.activation_checkpointing=block"])
    build_model(config, resolve_runtime(config), vocab_size=20)
    assert parts == ["block"]


# Finetuning: runs that start from the weights and the tokenizer of another run

FROM_A = ["train.init_from=run:a", "tokenizer=run", "tokenizer.run=a", "data.path=other.txt"]
FROZEN = ["train.steps=1", "optimizer=adamw", "optimizer.lr=1e-12"]  # the weights hardly change


def write_other_text() -> None:
    """Write a document with fewer distinct characters than text.txt.

    Built from it, the vocabulary would be smaller.
    """
    write_file("other.txt", "The 7th line says no more.\n" * 60)


@pytest.fixture
def other(workdir) -> None:
    write_other_text()


def test_finetuning_starts_from_the_best_weights_with_a_new_optimizer(
    trained, workdir, other, train
):
    worse = ["optimizer.lr=5", "optimizer.weight_decay=0"]
    assert train("name=a", "train.steps=9", *worse) == 0
    assert load("a")["best_step"] < 9
    assert "starting from run:a" in train_in(workdir, "name=b", *FROM_A, *FROZEN)
    before, after = load("a", "best"), load("b")
    torch.testing.assert_close(after["model"], before["model"], atol=1e-5, rtol=0)
    assert after["tokenizer"] == before["tokenizer"]
    assert (after["step"], after["optimizer"]["wte.weight"]["step"]) == (1, 1)


def test_initial_weights_stay_the_best_if_training_makes_them_worse(trained, workdir, other):
    Path("runs/a/checkpoints/last.pt").unlink()  # best.pt is enough
    settings = ["optimizer=adamw", "optimizer.lr=1", "schedule.warmup_steps=0"]
    printed = train_in(workdir, "name=b", *FROM_A, *settings)
    losses = val_losses("b")
    assert min(losses.values()) == losses[0]
    assert "the best so far" not in printed
    assert f"best validation loss {losses[0]:.4f}" in printed
    weights = [load(name, "best")["model"] for name in "ab"]
    torch.testing.assert_close(*weights, atol=0, rtol=0)


def test_finetuning_resumes_without_the_initial_run(trained, other, train):
    assert train("name=b", *FROM_A) == 0
    shutil.rmtree("runs/a")
    assert train("name=b", *FROM_A, "train.steps=9") == 0
    assert [row["step"] for row in metrics("b")] == list(range(10))


TOKENIZER_OF_A = ["tokenizer=run", "tokenizer.run=a"]
UNSUITABLE = {
    "other tokenizer": (["tokenizer=byte"], "set tokenizer=run tokenizer.run=a"),
    "other model": ([*TOKENIZER_OF_A, "model.n_layer=1"], "this run; set model.n_layer=2"),
    "two settings": (
        [*TOKENIZER_OF_A, "model.n_layer=1", "model.qk_norm=false"],
        "set model.n_layer=2 model.qk_norm=true",
    ),
    "no run": ([*TOKENIZER_OF_A, "train.init_from=run:none"], "run=none has no checkpoint"),
    "tokenizer of GPT-2": (["tokenizer=bpe", "train.init_from=gpt2"], "set tokenizer=gpt2"),
    "last run": (["tokenizer=byte", "train.init_from=run:last"], "set the name of a run"),
    "tokenizer of the last run": (["tokenizer=run", "tokenizer.run=last"], "set the name of a run"),
}


@pytest.mark.parametrize(("words", "message"), UNSUITABLE.values(), ids=UNSUITABLE)
def test_unsuitable_initial_weights_are_refused(trained, other, capsys, words, message):
    settings = [*TINY, "train.init_from=run:a", "data.path=other.txt", "name=b"]
    assert run_command("train", *settings, *words) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs/b").exists()


def test_rotary_models_can_start_with_a_longer_context(trained, other, train):
    assert train("name=b", *FROM_A, "model.block_size=32") == 0


def test_size_of_the_padded_vocabulary_can_change(trained, other, train):
    assert train("name=b", *FROM_A, *FROZEN, "model.pad_vocab_multiple=50") == 0
    before, after = load("a", "best"), load("b")
    size = before["vocab_size"]
    assert after["model"]["wte.weight"].shape == (50, 16)
    for name in ("wte.weight", "lm_head.weight"):
        weights = [saved["model"][name][:size] for saved in (before, after)]
        torch.testing.assert_close(*weights, atol=1e-5, rtol=0)


def test_shorter_context_uses_the_first_position_embeddings(workdir, train):
    position = "model.position=learned"
    assert train("name=a", position) == 0
    write_other_text()
    assert train("name=b", *FROM_A, *FROZEN, position, "model.block_size=9") == 0
    before, after = (load(name, "best")["model"] for name in "ab")
    torch.testing.assert_close(after["wpe.weight"], before["wpe.weight"][:9], atol=1e-5, rtol=0)
    other_shapes = {name for name in before if before[name].shape != after[name].shape}
    assert other_shapes == {"wpe.weight"}
