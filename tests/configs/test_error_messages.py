"""Errors of words and of YAML files: each is one sentence with the key or file and the advice."""

from dataclasses import replace
from math import nan
from operator import attrgetter

import pytest
from data_helpers import write_file

from common.errors import UserError
from common.settings import check, list_keys
from configs.cli import parse_config
from configs.schema import SCRIPTS
from training.config import RunConfig

SWEEP = ["-m", "seed=1,2"]


def refuse(capsys, script: str, *words: str) -> str:
    """The one sentence that an invalid command line prints."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        parse_config(script, "", list(words))
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1), err
    return err


def check_refusal(capsys, workdir, script: str, words: list[str], parts: tuple[str, ...]) -> None:
    """The command is refused with a sentence that has all parts, and writes nothing."""
    before = sorted(workdir.rglob("*"))
    message = refuse(capsys, script, *words)
    for part in parts:
        assert part in message
    assert sorted(workdir.rglob("*")) == before


def name_case(value) -> str:
    """The id of a case: the script and its words, without the parts of the message."""
    if isinstance(value, tuple):
        return ""
    return " ".join(value)[:60] if isinstance(value, list) else value


# Words that Hydra or OmegaConf refuses: the key, and what to set


@pytest.mark.parametrize(
    ("script", "words", "parts"),
    [
        # choices of groups
        ("train", ["model=gpt3"], ("model/gpt3", "gpt2 llama", "(did you mean gpt2?)")),
        ("train", ["model=[gpt2]"], ("model/[gpt2]", "llama")),
        ("train", ["experiment=null"], ("experiment/null", "finetune_gpt2 gpt2_124m")),
        ("train", ["-m", "attention=naive,falsh"], ("attention/falsh", "(did you mean flash?)")),
        # keys
        ("train", ["optimizer=adamw", "optimizer.momentum=0.9"], ("optimizer.momentum", "AdamW")),
        # types
        ("train", ["train.steps=many"], ("train.steps", "many", "int | None")),
        ("train", ["train.steps=1:30"], ("train.steps", "1:30", "int | None")),
        ("train", ["train.steps=f(2)"], ("train.steps=f(2)", "two pairs of quotes")),
        ("train", ["model.n_layer=null"], ("model.n_layer", "not Optional", "int")),
        ("train", ["compile=perhaps"], ("compile", "perhaps", "bool | None")),
        ("train", ["optimizer=adamw", "optimizer.lr=fast"], ("optimizer.lr", "fast", "float")),
        ("train", ["optimizer.betas=0.9"], ("optimizer.betas", "list[float]")),
        ("train", ["wandb.tags=5"], ("wandb.tags", "list[str]")),
        ("bench", ["block_sizes=64"], ("block_sizes", "list[int]")),
        ("bench", ["block_sizes=[64,a]"], ("block_sizes[1]", "Integer")),
        ("train", ["train=5"], ("train:", "set its keys, such as train.steps")),
        ("train", ["wandb=false"], ("wandb:", "set its keys, such as wandb.mode")),
        ("train", ["data.mix=[a]"], ("data.mix:", "dict")),
        # words that cannot be parsed, and several values
        ("train", ["seed='1\n"], ("seed='1", "put its value in two pairs of quotes")),
        ("train", ["train.steps=1,000"], ("train.steps=1,000 has several values", "-m")),
        ("train", ["attention=naive,flash"], ("attention=naive,flash has several", "-m")),
        ("train", ["optimizer=glob(*)"], ("optimizer=glob(*)", "-m")),
        ("bench", ["backends=naive,flash"], ("backends=naive,flash has several", "[a,b]")),
    ],
    ids=name_case,
)
def test_word_that_does_not_compose_is_refused(script, words, parts, workdir, capsys):
    check_refusal(capsys, workdir, script, words, parts)


# Values outside of their limits, which check() refuses


@pytest.mark.parametrize(
    ("script", "words", "parts"),
    [
        ("train", ["preset=2MB"], ("preset=2MB", "set auto, 20kB")),
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
        ("train", ["optimizer.name=adamw"], ("optimizer.name=adamw", "set optimizer=adamw")),
        ("train", ["train.micro_batch_size=large"], ("train.micro_batch_size", "large", "int")),
        ("train", ["model.window=0064"], ("model.window=0064", "number of tokens")),
        (
            "train",
            ["model.n_head=6", "model.n_embd=96", "model.n_kv_head=4"],
            ("model.n_kv_head=4", "set 1, 2, 3, 6"),
        ),
        ("train", ["model.n_layer=0"], ("model.n_layer=0", "at least 1 and at most 10,000")),
        ("train", ["train.steps=null"], ("train.steps=null", "needs train.epochs")),
        ("train", ["data=text"], ("data.path=null", "set data.path")),
        ("train", ["data.path=[]"], ("data.path=[]", "set a file")),
        ("train", ["data=mix"], ("data.mix={}", "list them in a YAML file")),
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
        ("bench", ["block_sizes=[1000000000]"], ("block_sizes=1000000000", "at most")),
        ("sample", ["stop=[]"], ("stop=[]", "a string that is not empty, or a list of them")),
        ("sample", ['stop=["a", null]'], ("stop=[a,null]", "a list of them")),
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
        ("eval", ["limit=5", "data.path=text.txt"], ("limit=5", "needs tasks=NAME")),
        ("eval", [], ("tasks=null", "set data.path, or tasks")),
    ],
    ids=name_case,
)
def test_value_outside_of_its_limits_is_refused(script, words, parts, workdir, capsys):
    check_refusal(capsys, workdir, script, words, parts)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["-m", "seed=1"], ("several values", "set seed=1,2,3")),
        (["-m", "data.path=a,b"], ("several values", "data.path=[A],[B]")),
        ([*SWEEP, "model.n_embd=96,97"], ("model.n_embd=97", "model.n_head=2")),
        ([*SWEEP, "name=a/b"], ("name='a/b'", "use up to 100 letters")),
        ([*SWEEP, "name=a,b"], ("name='a,b'", "use up to 100 letters")),
        ([*SWEEP, "data.path=[text.txt],[missing.txt]"], ("data.path=missing.txt", "set a file")),
        (["-m", "seed=1,2,1"], ("seed=1", "list it once")),
        (
            [*SWEEP, *(f"{key}={'a' * 99},{'b' * 99}" for key in ("model.name", "data.name"))],
            ("is too long", "sweep fewer keys"),
        ),
        ([*SWEEP, "--cfg", "job"], ("--cfg", "remove -m")),
        ([*SWEEP, "plan=true"], ("plan=true", "remove -m")),
        ([*SWEEP, "hydra.launcher.partition=gpu"], ("hydra.launcher.partition: ", "no such key")),
        (["-m", "optimizer.lr=interval(0,1)"], ("optimizer.lr", "list its values")),
    ],
    ids=name_case,
)
def test_invalid_sweep_is_refused(words, parts, workdir, capsys):
    check_refusal(capsys, workdir, "train", words, parts)


def with_value(config, key, value):
    """The config with another value of `key`, which may be in a section."""
    section, _, leaf = key.rpartition(".")
    if not section:
        return replace(config, **{leaf: value})
    return with_value(config, section, replace(attrgetter(section)(config), **{leaf: value}))


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
        check(with_value(RunConfig(), key, value))


def number_keys(script: str) -> list[tuple[str, float]]:
    """The keys of a script that are numbers, each with a value that is no valid number of it."""
    keys = []
    for key, kind in list_keys(SCRIPTS[script]):
        if kind in (int, int | None):
            keys.append((key, 10**30))
        if kind in (float, float | None):
            keys.append((key, nan))
    return keys


VALID = {
    "train": ["data.path=text.txt"],
    "prepare": ["data.path=text.txt"],
    "eval": ["data.path=text.txt"],
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_has_limits(script, workdir):
    """Otherwise a huge value hangs, or fails with an error of PyTorch's C++ code."""
    config = parse_config(script, "", VALID.get(script, []))
    for key, value in number_keys(script):
        with pytest.raises(UserError, match=f"{key}={value}"):
            check(with_value(config, key, value))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_number_of_an_optimizer_has_limits(optimizer, workdir):
    config = parse_config("train", "", ["data.path=text.txt", f"optimizer={optimizer}"]).optimizer
    for key, kind in list_keys(type(config)):
        if kind in (int, float):
            value = 10**30 if kind is int else nan
            with pytest.raises(UserError, match=f"{key}={value}"):
                check(replace(config, **{key: value}), "optimizer")


# YAML files of the user


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("train: {stesp: 3}", ("train.stesp:", "(did you mean train.steps?)")),
        ("trian: {steps: 3}", ("trian:", "(did you mean train?)")),
        ("eval-every: 5", ("eval-every:", "(did you mean eval.every?)")),
        ("train: {batch-size: 4}", ("train.batch-size:", "(did you mean train.batch_size?)")),
        ("train.steps: 5", ("train.steps:",)),
        ("model: {_target_: os.system}", ("model._target_: there is no such key",)),
        ("train: {steps: many}", ("train.steps:", "many", "int | None")),
        ("train: {steps: 1:30}", ("train.steps:", "1:30", "int | None")),
        ("optimizer: {betas: [a]}", ("optimizer.betas[0]:", "Float")),
        ("wandb: {project: [a]}", ("wandb.project:", "str")),
        ("train: 5", ("TrainConfig",)),
        ("eval: {sample: [1]}", ("SamplingConfig",)),
        ("train: null", ("train:", "set its keys, such as train.steps")),
        ("defaults: [model: gpt2]", ("experiment/model/gpt2",)),
    ],
)
def test_yaml_file_with_a_wrong_key_or_type_is_refused(content, parts, workdir, capsys):
    write_file("own/experiment/mine.yaml", content)
    message = refuse(capsys, "train", "--config-dir", "own", "experiment=mine")
    for part in ("'experiment/mine'", *parts):
        assert part in message


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("model: {window: {_target_: os.system}}", ("model.window={_target_:os.system}",)),
        ("model: {window: [064]}", ("model.window=[064]", "number of tokens")),
        ("train: {micro_batch_size: 1:30}", ("train.micro_batch_size", "1:30", "int")),
        ("train: {steps: '${'}", ("train.steps:", "'${'")),
        ("train: {steps: '${missing}'}", ("train.steps:", "missing")),
        ("defaults: [mine]", ("a YAML file contains itself",)),
        ("train: &a {steps: *a}", ("a YAML file contains itself",)),
    ],
)
def test_yaml_file_with_a_wrong_value_is_refused(content, parts, workdir, capsys):
    write_file("own/experiment/mine.yaml", content)
    message = refuse(capsys, "train", "--config-dir", "own", "experiment=mine")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"train: [", id="syntax"),
        pytest.param(b"seed: 1\nseed: 2", id="duplicate key"),
        pytest.param(b"# caf\xe9", id="Latin-1"),
        pytest.param(b"5", id="number"),
        pytest.param(b"[1]", id="list"),
    ],
)
def test_damaged_yaml_file_is_refused(content, workdir, capsys):
    write_file("own/experiment/mine.yaml", content)
    message = refuse(capsys, "train", "--config-dir", "own", "experiment=mine")
    assert "own/experiment/mine.yaml cannot be read" in message
    assert "write valid YAML in UTF-8" in message


@pytest.mark.parametrize(
    "content",
    [
        "hydra: {launcher: {_target_: os.system}}",
        "# @package hydra.launcher\n_target_: os.system",
        "defaults: [override /hydra/launcher: basic]",
        "defaults: [/model@hydra.launcher: gpt2]",
    ],
)
def test_yaml_file_cannot_change_hydra_itself(content, workdir, capsys):
    write_file("own/experiment/mine.yaml", content)
    message = refuse(capsys, "train", "--config-dir", "own", "experiment=mine")
    assert "experiment/mine.yaml sets hydra" in message
