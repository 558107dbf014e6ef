"""Composing configs: every choice, the default data, text as typed, YAML files, and errors."""

from typing import Any

import pytest
from config_helpers import MINE, name_case, parse, refuse, write_recipe
from data_helpers import write_file
from yaml import YAMLError

from configs.cli import parse_config
from configs.compose import CONFIGS, compose_config, list_choices, list_groups, parse_value
from data import DataConfig

CHOICES = [
    (group, choice) for group in list_groups("train") for choice in list_choices(group, [CONFIGS])
]
DEFAULT = DataConfig(name="python_stdlib", source="python_stdlib")
TEXT = DataConfig(name="text", source="text", path="text.txt")


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes(group, choice):
    words = ["data.path=a", f"{group}={choice}"]
    if choice == "run":
        words.append("tokenizer.run=a")
    config = parse_config("train", "", words)
    if group not in ("experiment", "data"):
        key = "backend" if group == "attention" else "name"
        assert getattr(getattr(config, group), key) == choice


@pytest.mark.parametrize("script", ["train", "prepare", "eval"])
def test_data_path_replaces_the_default_data(script):
    assert parse(script, "data.path=text.txt", key="data") == TEXT


def test_data_path_reads_a_local_copy_of_a_data_set():
    data = parse("train", "data=openwebtext", "data.path=text.txt", key="data")
    assert (data.name, data.source) == ("openwebtext", "hub")


def test_config_knows_which_keys_are_set(workdir):
    write_recipe("defaults: [override /tokenizer: byte]\ntrain: {steps: 5}")
    config = parse_config("train", "", [*MINE, "model=gpt2", "seed=3"])
    keys = {"train.steps", "tokenizer.vocab_size", "model.n_layer", "seed"}
    assert keys <= config.set_keys
    assert not {"train.batch_size", "model.dropout", "optimizer.lr"} & config.set_keys


# Text

CHARACTERS = [
    *("???", "${x}", "${", "null", "true", "1e5", "007", "[1]", "[END]", "{a: b}", "\\${seed}", ""),
    *("été", "def f(x):", "it's", 'say "hi"', '"quoted"', "a=b", "Hello, world", "#no comment"),
    *("~a", "back\\slash\\", "\\'", "two\nlines", "\\n", "\t", " x "),
]


@pytest.mark.parametrize("text", CHARACTERS)
def test_prompt_is_used_as_typed(text):
    assert parse("sample", f"prompt={text}", key="prompt") == text


@pytest.mark.parametrize("text", [text for text in CHARACTERS if text not in ("null", "")])
@pytest.mark.parametrize("key", ["data.separator", "wandb.entity"])
def test_text_of_a_key_is_used_as_typed(key, text):
    assert parse("train", "data.path=a", f"{key}={text}", key=key) == text


@pytest.mark.parametrize("path", ["[2024]", "a, (b)=1e5.txt", "a.txt,b.txt", "$HOME/*.txt", "2024"])
def test_path_is_used_as_typed(path):
    assert parse("train", f"data.path={path}", key="data.path") == path


# YAML files of the user


@pytest.mark.parametrize("header", ["", "# @package _global_\n", "# mine\n# @package _global_\n"])
def test_words_override_a_recipe_of_the_user(header, workdir):
    write_recipe(f"{header}train: {{steps: 7, batch_size: 3}}\n")
    train = parse("train", *MINE, "train.batch_size=5", key="train")
    assert (train.steps, train.batch_size) == (7, 5)


def test_recipe_extends_another_one_and_chooses_groups(workdir):
    write_recipe("defaults: [shakespeare_char_cpu, override /optimizer: muon]\ntrain: {steps: 7}")
    config = parse_config("train", "", MINE)
    assert (config.model.n_embd, config.train.batch_size, config.train.steps) == (128, 12, 7)
    assert (config.optimizer.name, config.schedule.name) == ("muon", "cosine")


def test_yaml_file_without_a_backend_has_the_default_backend(workdir):
    write_file("own/attention/mine.yaml", "kernels: [math]")
    attention = compose_config("sample", ["attention=mine"], "own").attention
    assert (attention.backend, attention.kernels) == ("auto", ["math"])


@pytest.mark.parametrize(
    ("content", "key", "expected"),
    [
        ("name: 1e3", "name", "1e3"),
        ("wandb: {project: no}", "wandb.project", "no"),
        ("wandb: {project: 2020-01-01}", "wandb.project", "2020-01-01"),
        ("wandb: {tags: [1.10, 007]}", "wandb.tags", ["1.10", "007"]),
        ("eval: {sample: {stop: '???'}}", "eval.sample.stop", "???"),
        ("eval: {sample: {stop: '${x}'}}", "eval.sample.stop", "${x}"),
        ("eval: {sample: {stop: '[END]'}}", "eval.sample.stop", "[END]"),
        ("eval: {sample: {stop: [a, 'b, c']}}", "eval.sample.stop", ["a", "b, c"]),
        ("data: {path: 1e3.csv, text_column: 12e45}", "data.text_column", "12e45"),
        ("optimizer: {lr: 1e-3}", "optimizer.lr", 1e-3),
        ("train: {minutes: null, steps: 1_000}", "train.steps", 1000),
        ("eval: {initial: no}", "eval.initial", False),
        ("model: {window: [64, null]}", "model.window", [64, None]),
        ("", "seed", 1337),
    ],
)
def test_values_of_a_yaml_file_have_the_types_of_their_keys(content, key, expected, workdir):
    write_recipe(content)
    assert parse("train", *MINE, key=key) == expected


# Errors: one sentence with the key, and what to set


@pytest.mark.parametrize(
    ("script", "words", "parts"),
    [
        ("train", ["model=gpt3"], ("model=gpt3", "(did you mean gpt2?)", "llama")),
        ("train", ["data=opt.txt"], ("data=opt.txt", "(did you mean data.path=opt.txt?)")),
        ("train", ["config/train_shakespeare_char.py"], ("mean experiment=shakespeare_char?)",)),
        ("sample", ["mine"], ("mine: there is no such key", "(did you mean run=mine?)")),
        ("sample", ["--out_dir=a"], ("out_dir: there is no such key (did you mean run or out?)",)),
        (
            "train",
            ["book.txt"],
            ("book.txt: there is no such key (did you mean data.path=book.txt?)",),
        ),
        ("train", ["experiment=null"], ("experiment=null", "finetune_gpt2, gpt2_124m")),
        ("train", ["-m", "attention=naive,falsh"], ("attention=falsh", "(did you mean flash?)")),
        ("train", ["optimizer=adamw", "optimizer.momentum=0.9"], ("optimizer.momentum:",)),
        ("train", ["train.steps=many"], ("train.steps=many", "int | null")),
        ("train", ["model.n_layer=null"], ("model.n_layer=null", "type int")),
        ("train", ["optimizer.betas=0.9"], ("optimizer.betas=0.9", "list[float]")),
        ("bench", ["block_sizes=[64,a]"], ("block_sizes=[64,a]", "list[int]")),
        ("train", ["train=5"], ("train=5", "set its keys, such as train.steps")),
        ("train", ["train.steps=1,000"], ("train.steps=1,000", "several values need -m")),
        ("train", ["attention=naive,flash"], ("attention=naive,flash", "several values need -m")),
        ("train", ["dtype=float32,bfloat16"], ("dtype=float32,bfloat16", "several values need -m")),
        ("bench", ["backends=naive,flash"], ("backends=naive,flash", "[a,b]")),
        ("compare", ["out="], ("out=", "str | null")),
        ("train", ["train.steps"], ("train.steps=", "int | null")),
    ],
    ids=name_case,
)
def test_word_that_does_not_compose_is_refused(script, words, parts, workdir, capsys):
    message = refuse(capsys, script, *words)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("train: {stesp: 3}", ("train.stesp:", "(did you mean train.steps?)")),
        ("eval-every: 5", ("eval-every:", "(did you mean eval.every?)")),
        ("model: {_target_: os.system}", ("model._target_: there is no such key",)),
        ("train: {steps: many}", ("train.steps=many", "int | null")),
        ("wandb: {project: [a]}", ("wandb.project=[a]", "str | null")),
        ("train: null", ("train=null", "set its keys, such as train.steps")),
        ("defaults: [model: gpt2]", ("experiment/model/gpt2",)),
        ("defaults: [override /model: gpt3]", ("model/gpt3", "llama")),
        ("defaults: [mine]", ("recursion",)),
        ("train: &a {steps: *a}", ("recursion",)),
        ("train: [", ("own/experiment/mine.yaml", "line 1")),
        ("seed: 1\nseed: 2", ("own/experiment/mine.yaml", "duplicate key")),
        ("[1]", ("not a mapping",)),
        ("5", ("int",)),
        (b"# caf\xe9", ("utf-8",)),
        # Hydra itself cannot be changed, because its settings could run code
        ("hydra: {launcher: {_target_: os.system}}", ("hydra.launcher._target_",)),
        ("# @package hydra.launcher\n_target_: os.system", ("_target_: there is no such key",)),
        ("defaults: [override /hydra/launcher: basic]", ("mine.yaml sets hydra",)),
        ("defaults: [/model@hydra.launcher: gpt2]", ("mine.yaml sets hydra",)),
    ],
)
def test_wrong_yaml_file_is_refused(content, parts, workdir, capsys):
    write_recipe(content)
    message = refuse(capsys, "train", *MINE)
    assert all(part in message for part in parts), message


def test_yaml_file_with_the_name_of_a_built_in_one_is_refused(workdir, capsys):
    write_recipe("train: {steps: 7}")
    (workdir / "own/experiment/mine.yaml").rename("own/experiment/gpt2_124m.yaml")
    message = refuse(capsys, "train", *MINE[:-1], "experiment=gpt2_124m")
    assert "own/experiment/gpt2_124m.yaml has the name of a built-in file; rename it" in message


# Texts become values of the types of their keys


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "0400", 400),  # decimal; in YAML 1.1, a leading zero means octal
        (int | None, "1_000", 1000),
        (int | None, "null", None),
        (float, "1e-3", 0.001),
        (float, ".9", 0.9),
        (bool, "True", True),
        (bool | None, "no", False),
        (str, "null", "null"),
        (str | None, "null", None),
        (str | None, "1.10", "1.10"),
        (str | None, '"a, b"', '"a, b"'),
        (list[float], "[0.9, 1e-3]", [0.9, 0.001]),
        (list[float], [".9", "0.950"], [0.9, 0.95]),  # from a YAML file
        (list[str] | None, "[a, b ,'1,2,3']", ["a", "b", "1,2,3"]),
        (list[str] | None, "[1.10, no]", ["1.10", "no"]),
        (list[str] | str, "[linear,softmax]", ["linear", "softmax"]),
        (list[str] | str, "linear", "linear"),
        (list[str] | str, "null", "null"),
        (int | list[int | None] | None, "[64,null]", [64, None]),
        (Any, "[END]", "[END]"),
        (Any, "[2024]", "[2024]"),
        (Any, '["a, b", "\\n"]', ["a, b", "\n"]),
        (Any, '["a", 1]', '["a", 1]'),
        (Any, "2024", "2024"),
        (Any, "null", None),
    ],
)
def test_text_becomes_a_value_of_the_type(kind, text, value):
    assert parse_value(kind, text) == value
    assert type(parse_value(kind, text)) is type(value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int | None, "1e3"),
        (int | None, "1:30"),
        (int, "null"),
        (int, ""),
        (str | None, ""),
        (bool, "perhaps"),
        (list[float], "0.9"),
        (list[int], "[64,a]"),
        (list[int], "[64"),
        (str, ["a"]),
        (dict[str, int], "1"),
    ],
)
def test_text_of_another_type_is_refused(kind, text):
    with pytest.raises((ValueError, LookupError, YAMLError)):
        parse_value(kind, text)
