"""Finetuning: runs that start from the weights and the tokenizer of another run."""

import shutil
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from data_helpers import write_file
from helpers import TINY, load, metrics, run_command
from run_helpers import train_in, val_losses

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


@pytest.fixture(scope="module")
def finetuned_folder(tmp_path_factory) -> tuple[Path, str]:
    """The run a, whose last weights are not the best, and the run b, which starts from it.

    Also what b prints.
    """
    folder = tmp_path_factory.mktemp("finetuned")
    train_in(folder, "name=a", "train.steps=30")
    train_in(folder, "name=a", "train.steps=33", "optimizer.lr=5", "optimizer.weight_decay=0")
    with chdir(folder):
        assert load("a")["best_step"] < 33
        write_other_text()
    return folder, train_in(folder, "name=b", *FROM_A, *FROZEN)


@pytest.fixture
def finetuned(finetuned_folder, monkeypatch) -> str:
    """What the run b has printed. The current folder has both runs."""
    folder, printed = finetuned_folder
    monkeypatch.chdir(folder)
    return printed


def test_finetuning_starts_from_the_best_weights(finetuned):
    before = load("a", "best")["model"]
    torch.testing.assert_close(load("b")["model"], before, atol=1e-5, rtol=0)


def test_finetuning_starts_with_a_new_optimizer_at_step_0(finetuned):
    saved = load("b")
    assert saved["step"] == 1
    assert saved["optimizer"]["wte.weight"]["step"] == 1


def test_finetuning_uses_the_tokenizer_of_the_initial_run(finetuned):
    assert load("b")["tokenizer"] == load("a")["tokenizer"]


def test_finetuning_needs_only_the_best_checkpoint(trained, other, train):
    Path("runs/a/checkpoints/last.pt").unlink()
    assert train("name=b", *FROM_A) == 0


@pytest.fixture
def worsened(trained, other, train, capsys) -> str:
    """What a run b prints that starts from a, and whose losses are higher."""
    settings = ["optimizer=adamw", "optimizer.lr=1", "schedule.warmup_steps=0"]
    assert train("name=b", *FROM_A, *settings) == 0
    losses = val_losses("b")
    assert min(losses.values()) == losses[0]
    return capsys.readouterr().out


def test_initial_weights_stay_the_best_if_training_makes_them_worse(worsened):
    torch.testing.assert_close(
        load("b", "best")["model"], load("a", "best")["model"], atol=0, rtol=0
    )


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
    "new tokenizer": (["tokenizer=char"], "set tokenizer=run tokenizer.run=a"),
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


# A mix of texts

MIX = "mix: {one: {path: text.txt, weight: 3}, two: {path: other.txt}}\n"
DEFAULTS = "defaults: [mix, text@mix.one, text@mix.two, _self_]\nname: both\n"


@pytest.fixture
def train_mix(other):
    """train_mix("train.steps=9") trains the run m on a mix of two texts. Returns the exit code."""
    write_file("own/data/both.yaml", DEFAULTS + MIX)

    def train_with(*words: str) -> int:
        mix = ["--config-dir", "own", *TINY[:-2], "data=both", "name=m"]
        return run_command("train", *mix, *words)

    return train_with


def test_unknown_key_of_a_text_in_a_mix_is_refused(train_mix, capsys):
    assert train_mix("data.mix.two.pth=x") == 2
    assert "data.mix.two.pth: there is no such key" in capsys.readouterr().err
