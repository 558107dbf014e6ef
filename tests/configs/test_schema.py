"""Values outside of their limits, and values that do not fit together, are refused."""

from math import nan

import pytest
from config_helpers import name_case, refuse

from common.errors import UserError
from common.settings import check, list_keys, set_values
from configs.schema import SCRIPTS, SYNONYMS
from training.config import OPTIMIZER_CONFIGS, RunConfig

CONFIGS = [config_type() for config_type in SCRIPTS.values()]
CONFIGS += [RunConfig(optimizer=config_type()) for config_type in OPTIMIZER_CONFIGS.values()]
INVALID = {int: 10**30, int | None: 10**30, float: nan, float | None: nan}
NUMBERS = [
    (config, key, INVALID[kind])
    for config in CONFIGS
    for key, kind in list_keys(config)
    if kind in INVALID
]


@pytest.mark.parametrize(
    ("script", "words", "parts"),
    [
        ("train", ["parallel=zero"], ("parallel=zero", "set one of ddp, fsdp")),
        (
            "train",
            ["train.activation_checkpointing=all"],
            ("train.activation_checkpointing=all", "set one of none, block, attention"),
        ),
        (
            "train",
            ["schedule=cosine", "schedule.name=cosin"],
            ("schedule.name=cosin", "set one of cosine, linear, wsd"),
        ),
        ("train", ["train.init_from=a"], ("train.init_from=a", "run:NAME, hf:NAME, gpt2")),
        ("train", ["optimizer.name=sgd"], ("optimizer.name=sgd", "set optimizer=adamw")),
        (
            "train",
            ["model.n_head=6", "model.n_embd=96", "model.n_kv_head=4"],
            ("model.n_kv_head=4", "set null"),
        ),
        ("train", ["model.n_layer=0"], ("model.n_layer=0", "at least 1 and at most 10,000")),
        ("train", ["train.steps=null"], ("train.steps=null", "needs train.epochs")),
        ("train", ["data=text"], ("data.path=null", "set data.path")),
        ("train", ["data.repo=a/b", "data.stream=true"], ("data.repo=a/b", "data=hub")),
        ("train", ["data.val_fraction=1"], ("data.val_fraction=1.0", "above 0 and below 1")),
        (
            "train",
            ["tokenizer=char", "tokenizer.vocab_size=500"],
            ("tokenizer.vocab_size=500", "set null"),
        ),
        ("train", ["name=a/b"], ("name='a/b'", "use up to 100 letters")),
        ("train", ["name=" + 300 * "a"], ("name=", "use up to 100 letters")),
        ("train", ["name=sweeps"], ("name=sweeps", "reserved")),
        ("train", ["seed=-1"], ("seed=-1", "at least 0")),
        ("train", ["optimizer.weight_decay=100"], ("optimizer.weight_decay", "1 / optimizer.lr")),
        (
            "train",
            ["optimizer.ngram_weight_decay=2", "optimizer.embedding_lr=0.5"],
            ("optimizer.ngram_weight_decay=2.0", "less than 1 / optimizer.embedding_lr"),
        ),
        ("train", ["optimizer.betas=[0.9]"], ("optimizer.betas=[0.9]", "two numbers")),
        ("train", ["optimizer.lr=inf"], ("optimizer.lr=inf", "finite")),
        ("train", ["plan=true", "flops_per_second=-1e9"], ("flops_per_second", "above 0")),
        ("train", ["flops_per_second=1e12"], ("flops_per_second", "needs plan=true")),
        ("train", ["world_size=4"], ("world_size=4", "needs plan=true")),
        ("train", ["wandb.project=my/project"], ("wandb.project=my/project", "without /")),
        ("bench", [f"wandb.tags=[{65 * 't'}]"], ("wandb.tags=[ttt", "set shorter tags")),
        ("bench", ["block_sizes=[1000000000]"], ("block_sizes=1000000000", "at most")),
        ("sample", ["stop=[]"], ("stop=[]", "a string that is not empty, or a list of them")),
        (
            "sample",
            ["interactive=true", "num_samples=5"],
            ("num_samples=5", "interactive=false"),
        ),
        ("sample", ["max_new_tokens=0"], ("max_new_tokens=0", "set a larger number")),
        ("sample", ["checkpoint=first"], ("checkpoint=first", "set one of best, last, step-N")),
        ("sample", ["prompt=a", "prompt_file=b"], ("prompt and prompt_file", "set one of them")),
        ("sample", ["out=a.jsonl"], ("out=a.jsonl", "needs prompts=FILE")),
        (
            "sample",
            ["prompts=a", "attention_map=true"],
            ("attention_map=true", "remove prompts and interactive"),
        ),
        ("eval", [], ("data.path=null", "set a file, a folder or a pattern")),
    ],
    ids=name_case,
)
def test_value_outside_of_its_limits_is_refused(script, words, parts, workdir, capsys):
    message = refuse(capsys, script, *words)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("device", "gpu", "cuda"),
        ("device", "cuda:0", "cuda"),
        ("dtype", "fp16", "float16"),
        ("dtype", "bf16", "bfloat16"),
        ("dtype", "half", "float16"),
        ("model.norm", "rms_norm", "rmsnorm"),
        ("wandb.mode", "offlin", "offline"),
    ],
)
def test_unknown_value_gets_a_suggestion(key, value, hint):
    with pytest.raises(UserError, match=rf"{key}={value} .*did you mean {hint}\?.* set one of"):
        check(set_values(RunConfig(), {key: value}))


@pytest.mark.parametrize(("config", "key", "value"), NUMBERS, ids=lambda case: str(case)[:30])
def test_every_number_has_limits(config, key, value):
    """Otherwise a huge value hangs, or fails with an error of PyTorch's C++ code."""
    with pytest.raises(UserError, match=f"{key.rpartition('.')[2]}={value}"):
        check(set_values(config, {key: value}))


def test_suggested_settings_exist():
    keys = {key for config_type in SCRIPTS.values() for key, _ in list_keys(config_type())}
    assert {suggestion.split("=")[0] for suggestion in SYNONYMS} <= keys
