"""experiment=gpt2_124m: nanoGPT's recipe, and a small run of it."""

import math

from data_helpers import write_table
from helpers import metrics, run_command, summary

from configs.cli import parse_config


def test_gpt2_124m_is_nanogpts_recipe_for_any_number_of_devices(workdir):
    config = parse_config("train", "", ["experiment=gpt2_124m"])
    model, tuned, schedule = config.model, config.optimizer, config.schedule
    assert (model.n_layer, model.n_head, model.n_embd, model.block_size) == (12, 12, 768, 1024)
    assert (tuned.name, tuned.lr, tuned.betas, tuned.weight_decay) == (
        "adamw",
        6e-4,
        [0.9, 0.95],
        0.1,
    )
    assert (schedule.name, schedule.warmup_steps, schedule.final_fraction) == ("cosine", 2000, 0.1)
    assert (config.train.steps, config.train.grad_clip, config.eval.every) == (600_000, 1.0, 1000)
    assert (config.data.repo, config.tokenizer.name) == ("Skylion007/openwebtext", "gpt2")
    for world_size in (1, 2, 4, 8):
        micro, accumulation = config.train.split_batch(world_size)
        assert micro * accumulation * world_size * model.block_size == 524_288


def test_shrunken_gpt2_124m_trains_on_a_local_parquet(workdir):
    write_table("web.parquet", text=[f"Document {n} says {n * n}.\n" * 9 for n in range(60)])
    words = [
        "experiment=gpt2_124m",
        "data.path=web.parquet",
        "tokenizer=byte",
        "name=a",
        "device=cpu",
    ]
    words += [
        "model.n_layer=2",
        "model.n_head=2",
        "model.n_embd=16",
        "model.block_size=32",
        "train.steps=2",
    ]
    words += [
        "train.batch_size=4",
        "train.micro_batch_size=2",
        "eval.sample.max_new_tokens=4",
        "wandb.mode=disabled",
    ]
    assert run_command("train", *words) == 0
    losses = [row[key] for row in metrics("a") for key in ("train/loss", "val/loss") if key in row]
    assert len(losses) == 4
    assert all(abs(loss - math.log(summary("a")["vocab_size"])) < 0.5 for loss in losses)
