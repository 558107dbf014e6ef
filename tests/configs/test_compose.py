"""Composing configs: every choice, the default data, text as typed, and YAML files of the user."""

import pytest
from data_helpers import write_file, write_table
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from common.errors import UserError
from configs.cli import parse_config
from configs.compose import (
    UserFolder,
    compose_config,
    hydra_initialized,
    list_choices,
    parse_word,
)
from data import DataConfig
from training.config import RunConfig

CHOICES = list_choices("train")
RECIPES = CHOICES.pop("experiment")
CHOICES["data"].remove("mix")  # it needs sources
# Words that a choice needs, and words with which a data set needs no download.
REQUIRED = {"run": ["tokenizer.run=a"]}
LOCAL = ["data.path=text.txt"]


@pytest.mark.parametrize(
    ("group", "choice"), [(group, choice) for group in CHOICES for choice in CHOICES[group]]
)
def test_every_choice_composes(group, choice, workdir):
    config = parse_config("train", "", [f"{group}={choice}", *LOCAL, *REQUIRED.get(choice, [])])
    section = getattr(config, group)
    name = section.backend if group == "attention" else section.name
    assert name == ("text" if choice == "python_stdlib" else choice)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes(recipe, workdir):
    parse_config("train", "", [f"experiment={recipe}", *LOCAL])


# The data


@pytest.mark.parametrize("script", ["train", "prepare", "eval"])
def test_data_path_replaces_the_default_data(script, workdir):
    config = parse_config(script, "", ["data.path=text.txt"])
    assert config.data == DataConfig(name="text", source="text", path="text.txt")


def test_data_path_of_a_recipe_replaces_the_default_data(workdir):
    write_file("own/experiment/mine.yaml", "data: {path: text.txt}")
    config = parse_config("train", "", ["--config-dir", "own", "experiment=mine"])
    assert config.data == DataConfig(name="text", source="text", path="text.txt")


def test_data_path_reads_a_local_copy_of_a_data_set(workdir):
    config = parse_config("train", "", ["data=openwebtext", "data.path=text.txt"])
    assert (config.data.name, config.data.source) == ("openwebtext", "hub")


def test_path_replaces_the_default_data_in_a_mix(workdir):
    write_file("own/data/mine.yaml", "defaults: [mix, python_stdlib@mix.a, python_stdlib@mix.b]")
    words = ["--config-dir", "own", "data=mine", "data.mix.a.path=text.txt"]
    mix = parse_config("train", "", words).data.mix
    assert (mix["a"].name, mix["a"].source) == ("text", "text")
    assert (mix["b"].name, mix["b"].source) == ("python_stdlib", "python_stdlib")


@pytest.mark.parametrize("script", ["train", "prepare"])
@pytest.mark.parametrize("preset", ["auto", "1MB"])
def test_missing_file_is_refused_when_the_config_is_composed(script, preset, workdir):
    words = ["data.path=missing.txt", f"preset={preset}"]
    with pytest.raises(UserError, match=r"data\.path=missing\.txt has no file to read"):
        compose_config(script, words)


# Text of the command line


OTHER_TYPES = ["null", "true", "1e5", "007", "[1]", "{a: b}", "${seed}", "\\${seed}", ""]
SPECIAL_CHARACTERS = [
    "été",
    "def f(x):",
    "it's",
    'say "hi"',
    "a=b",
    "Hello, world",
    "#no comment",
    "~a",
    "back\\slash\\",
    "\\'",
    "two\nlines",
    "\t",
    " x ",
]


@pytest.mark.parametrize("text", OTHER_TYPES + SPECIAL_CHARACTERS)
def test_prompt_is_used_as_typed(text):
    assert parse_config("sample", "", [f"prompt={text}"]).prompt == text


@settings(max_examples=15, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
    | st.text(alphabet="\\'\"${}()[], =", max_size=12)
)
def test_random_prompt_is_used_as_typed(text):
    assert parse_config("sample", "", [f"prompt={text}"]).prompt == text


@pytest.mark.parametrize(
    "separator", ["[SEP]", "[a, b]", "#", "\"'", r"\n", "1e3", "a,b", "{x}", "${seed}"]
)
def test_separator_is_used_as_typed(workdir, separator):
    config = parse_config("train", "", ["data.path=text.txt", f"data.separator={separator}"])
    assert config.data.separator == separator


def test_path_is_used_as_typed(workdir):
    name = write_file("a, (b)=1e5.txt", "text " * 300)
    assert parse_config("train", "", [f"data.path={name}"]).data.path == name


@pytest.mark.parametrize(("typed", "name"), [("1e5", "1e5"), ("null", None)])
def test_name_is_used_as_typed_except_null(typed, name, workdir):
    config = parse_config("train", "", [f"name={typed}", "data.path=text.txt"])
    assert config.name == name


TEXT_KEYS = ["name", "wandb.project", "data.revision", "data.mix.a.revision"]
LIKE_OTHER_TYPES = [
    *("no", "on", "true", "False", "007", "1e3", "1.10", "-.5", "0x1F", "1:30", "12e45", "1_000"),
    *("+1", "inf", "NaN", "2020-01-01", "08", "1 2", "[a]", "{a: b}", "a'b"),
]
short_texts = st.text(alphabet="0123456789abefinotruxy._+", min_size=1, max_size=5)
plain_texts = st.sampled_from(LIKE_OTHER_TYPES) | short_texts.filter(
    lambda text: text.lower() != "null"
)


def parse_value(key: str, value: str):
    """The value of key=value in a config of train.py."""
    with hydra_initialized("train", None):
        return parse_word("train", f"{key}={value}").value()


@settings(max_examples=30, deadline=None)
@given(key=st.sampled_from(TEXT_KEYS), text=plain_texts)
@example("wandb.project", "1e3")
@example("data.revision", "12e45")
@example("data.mix.a.revision", "1.10")
def test_text_key_gets_the_typed_characters(key, text):
    assert parse_value(key, text) == text


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("wandb.tags", "[a, b ,'1,2,3']", ["a", "b", "1,2,3"]),
        ("wandb.tags", r"""['it\'s, 1', "1.10"]""", ["it's, 1", "1.10"]),
        ("data.path", "[a.txt, texts/*.txt]", ["a.txt", "texts/*.txt"]),
        ("eval.sample.stop", '["a, b", "."]', ["a, b", "."]),
        ("wandb.project", "'1e3'", "1e3"),
        ("wandb.project", '"a, b"', "a, b"),
        ("wandb.project", "null", None),
        ("optimizer.betas", "[0.9,1e-3]", [0.9, 1e-3]),
        ("model.window", "[64,null]", [64, None]),
    ],
)
def test_values_have_the_types_of_their_keys(key, value, expected):
    assert parse_value(key, value) == expected


def test_numbers_are_decimal(workdir):
    """In YAML 1.1, a leading zero means octal."""
    write_file("own/experiment/mine.yaml", "train: {batch_size: 0400}")
    words = ["--config-dir", "own", "experiment=mine", "data.path=text.txt", "train.steps=010"]
    config = parse_config("train", "", words)
    assert (config.train.batch_size, config.train.steps) == (400, 10)


# YAML files of the user


@pytest.mark.parametrize(
    "header", ["", "# @package _global_\n", "# mine\n# @package _global_\n", "\n# mine\n"]
)
def test_words_override_a_recipe_of_the_user(header, workdir):
    write_file("own/experiment/mine.yaml", f"{header}train: {{steps: 7, batch_size: 3}}\n")
    words = ["--config-dir", "own", "experiment=mine", "train.batch_size=5"]
    config = parse_config("train", "", words)
    assert (config.train.steps, config.train.batch_size) == (7, 5)


def test_yaml_file_without_a_backend_has_the_default_backend(workdir):
    write_file("own/attention/mine.yaml", "kernels: [math]")
    attention = compose_config("sample", ["attention=mine"], "own").attention
    assert (attention.backend, attention.kernels) == ("auto", ["math"])


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(short_texts.filter(lambda text: text != "null"), min_size=4, max_size=4))
@example(texts=["no", "1e3", "007", "1.10"])
@example(texts=["1:30", "true", "2020-01-01", "08"])
def test_text_keys_of_a_yaml_file_get_the_typed_characters(texts, workdir):
    name, project, first, second = texts
    content = f"name: {name}\nwandb: {{project: {project}, tags: [{first}, {second}]}}"
    write_file("own/experiment/mine.yaml", content)
    values = UserFolder("user", "user://own").load_config("experiment/mine").config
    config = OmegaConf.merge(OmegaConf.structured(RunConfig), values)
    assert [config.name, config.wandb.project, *config.wandb.tags] == texts


@pytest.mark.parametrize(
    ("content", "section", "key", "expected"),
    [
        ("optimizer: {lr: 1e-3}", "optimizer", "lr", 1e-3),
        ("optimizer: {betas: [.9, 0.950]}", "optimizer", "betas", [0.9, 0.95]),
        ("train: {steps: 1_000}", "train", "steps", 1000),
        ("train: {micro_batch_size: 4}", "train", "micro_batch_size", 4),
        ("train: {minutes: null, steps: 1}", "train", "minutes", None),
        ("eval: {initial: no}", "eval", "initial", False),
        ("model: {window: [64, null]}", "model", "window", [64, None]),
    ],
)
def test_numbers_and_switches_of_a_yaml_file_are_converted(
    content, section, key, expected, workdir
):
    write_file("own/experiment/mine.yaml", content)
    config = parse_config("train", "", ["--config-dir", "own", "experiment=mine", *LOCAL])
    assert getattr(getattr(config, section), key) == expected


def test_text_of_a_mix_is_used_as_typed(workdir):
    content = "defaults: [mix, text@mix.a, _self_]\nmix: {a: {path: 1e3.csv, name: 1.10}}"
    write_file("own/data/mine.yaml", content)
    write_table("1e3.csv", text=["a"])
    words = ["data=mine", "data.mix.a.prompt_column=007", "data.mix.a.text_column=12e45"]
    source = compose_config("prepare", words, "own").data.mix["a"]
    assert (source.path, source.name) == ("1e3.csv", "1.10")
    assert (source.prompt_column, source.text_column) == ("007", "12e45")
