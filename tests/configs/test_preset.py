"""Presets: values for the amount of training text."""

import pytest

from configs.cli import parse_config
from configs.preset import PRESETS, SIZES
from training.config import RunConfig


def compose(*words, script="train"):
    return parse_config(script, "", list(words))


def write_text(folder, size) -> str:
    """A file of this size that takes no space on the disk."""
    path = folder / "long.txt"
    with open(path, "wb") as file:
        file.truncate(size)
    return f"data.path={path}"


# The preset for texts just below and just above each limit, which the documentation lists.
LIMITS = [
    (44_000, "20kB", "100kB"),
    (173_000, "100kB", "300kB"),
    (547_000, "300kB", "1MB"),
    (1_730_000, "1MB", "3MB"),
    (5_470_000, "3MB", "10MB"),
    (10**8, "10MB", "10MB"),
]
SIZES_AND_PRESETS = [(limit, below) for limit, below, _ in LIMITS]
SIZES_AND_PRESETS += [(int(1.02 * limit), above) for limit, _, above in LIMITS]


@pytest.mark.parametrize(("size", "preset"), SIZES_AND_PRESETS)
def test_auto_selects_the_preset_that_the_documentation_lists(size, preset, tmp_path):
    assert compose(write_text(tmp_path, size)).preset == preset


@pytest.mark.parametrize("preset", SIZES)
def test_preset_sets_its_values(preset, tmp_path):
    config = compose(write_text(tmp_path, 10), f"preset={preset}")
    column = list(SIZES).index(preset)
    assert config.train.steps == PRESETS["train.steps"][column]
    assert config.tokenizer.vocab_size == PRESETS["tokenizer.vocab_size"][column]
    assert config.optimizer.ngram_weight_decay == PRESETS["muon.ngram_weight_decay"][column]


def test_largest_preset_has_the_defaults_of_the_dataclasses(tmp_path):
    config = compose(write_text(tmp_path, 10**8))
    assert config == RunConfig(preset="10MB", data=config.data)


@pytest.mark.parametrize(
    ("words", "section", "key", "value"),
    [
        (["train.steps=7"], "train", "steps", 7),
        (["tokenizer.vocab_size=300"], "tokenizer", "vocab_size", 300),
        (["optimizer.weight_decay=0.5"], "optimizer", "weight_decay", 0.5),
        (["experiment=shakespeare_char_cpu"], "train", "steps", 2000),
        (["tokenizer=byte"], "tokenizer", "vocab_size", None),
    ],
)
def test_words_and_recipes_override_a_preset(words, section, key, value, tmp_path):
    config = compose(write_text(tmp_path, 1_000_000), *words)
    assert getattr(getattr(config, section), key) == value


RECIPES = [
    ("shakespeare_char", None),
    ("shakespeare_char_cpu", None),
    ("shakespeare_char_cpu_fast", None),
    ("gpt2_124m", None),
    ("shakespeare_cpu_fast", "1MB"),
    ("larger_model", "1MB"),
]


@pytest.mark.parametrize(("recipe", "preset"), RECIPES)
def test_recipe_does_not_depend_on_the_amount_of_text(recipe, preset, tmp_path):
    words = [f"experiment={recipe}"]
    if preset is None:
        words.append("tokenizer=char")
    short = compose(*words, write_text(tmp_path, 10**4))
    long = compose(*words, write_text(tmp_path, 10**9))
    assert short == long
    assert short.preset == preset


REMOTE = ["data=hub", "data.repo=owner/name"]


@pytest.mark.parametrize(
    ("words", "preset"),
    [
        (REMOTE, "10MB"),
        ([*REMOTE, "data.text_bytes=90000"], "100kB"),
        (["data=shakespeare_char", "tokenizer=char"], "1MB"),
    ],
    ids=["unknown size", "data.text_bytes", "size in a YAML file"],
)
def test_text_that_is_not_on_this_machine_counts_as_long_unless_its_size_is_set(words, preset):
    assert compose(*words).preset == preset


def test_prepare_uses_the_vocabulary_of_train(tmp_path):
    text = write_text(tmp_path, 100_000)
    prepared = compose(text, script="prepare")
    assert prepared.preset == "100kB"
    assert prepared.tokenizer == compose(text).tokenizer


@pytest.mark.parametrize("key", ["weight_decay", "ngram_weight_decay"])
def test_finetuning_does_not_decay_the_weights_of_the_first_run(key, tmp_path):
    words = [write_text(tmp_path, 20_000), "tokenizer=byte", "train.init_from=run:a"]
    assert getattr(compose(*words).optimizer, key) == 0
    assert getattr(compose(*words, f"optimizer.{key}=1").optimizer, key) == 1
