"""experiment=gpt2_124m: nanoGPT's recipe, and a small run of it."""

import math

import pytest
from data_helpers import write_table
from helpers import metrics, run_command, summary

from configs.cli import parse_config


@pytest.fixture
def recipe():
    return parse_config("train", "", ["experiment=gpt2_124m"])


def test_values_are_nanogpts(recipe):
    model, optimizer, schedule = recipe.model, recipe.optimizer, recipe.schedule
    assert (model.n_layer, model.n_head, model.n_embd, model.block_size) == (12, 12, 768, 1024)
    assert (optimizer.name, optimizer.lr) == ("adamw", 6e-4)
    assert (optimizer.betas, optimizer.weight_decay) == ([0.9, 0.95], 0.1)
    assert (schedule.name, schedule.warmup_steps, schedule.final_fraction) == ("cosine", 2000, 0.1)
    assert (recipe.train.steps, recipe.train.grad_clip) == (600_000, 1.0)
    assert (recipe.data.repo, recipe.tokenizer.name) == ("Skylion007/openwebtext", "gpt2")


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_step_has_the_tokens_of_nanogpt_on_any_number_of_devices(recipe, world_size):
    micro_batch_size, num_micro_batches = recipe.train.split_batch(world_size)
    sequences = micro_batch_size * num_micro_batches * world_size
    assert sequences * recipe.model.block_size == 524_288


def test_shrunken_recipe_trains_on_a_local_parquet(workdir):
    write_table("web.parquet", text=[f"Document {n} says {n * n}.\n" * 9 for n in range(60)])
    words = [
        "experiment=gpt2_124m", "data.path=web.parquet", "tokenizer=byte", "name=a", "device=cpu",
        "model.n_layer=2", "model.n_head=2", "model.n_embd=16", "model.block_size=32",
        "train.steps=2", "train.batch_size=4", "train.micro_batch_size=2",
        "eval.sample.max_new_tokens=4", "wandb.mode=disabled",
    ]  # fmt: skip
    assert run_command("train", *words) == 0
    losses = [row[key] for row in metrics("a") for key in ("train/loss", "val/loss") if key in row]
    assert len(losses) == 4
    assert all(abs(loss - math.log(summary("a")["vocab_size"])) < 0.5 for loss in losses)
