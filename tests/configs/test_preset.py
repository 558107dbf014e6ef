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


BOUNDARIES = {
    "20kB": 44_000,
    "100kB": 173_000,
    "300kB": 547_000,
    "1MB": 1_730_000,
    "3MB": 5_470_000,
    "10MB": 10**8,
}


@pytest.mark.parametrize(("name", "largest"), BOUNDARIES.items())
def test_auto_selects_and_applies_the_preset_that_the_documentation_lists(name, largest, tmp_path):
    names = list(BOUNDARIES)
    following = names[min(names.index(name) + 1, len(names) - 1)]
    for size, expected in ((largest, name), (largest * 1.02, following)):
        config = compose("data=text", write_text(tmp_path, int(size)))
        column = list(SIZES).index(expected)
        assert config.preset == expected
        assert config.train.steps == PRESETS["train.steps"][column]
        assert config.tokenizer.vocab_size == PRESETS["tokenizer.vocab_size"][column]
        assert config.optimizer.ngram_weight_decay == PRESETS["muon.ngram_weight_decay"][column]


def test_default_run_has_the_defaults_of_the_dataclasses(tmp_path):
    config = compose("data=text", write_text(tmp_path, 10**8), "preset=10MB")
    assert config == RunConfig(preset="10MB", data=config.data)


def test_settings_of_the_user_and_of_recipes_replace_those_of_the_preset(tmp_path):
    text = write_text(tmp_path, 1_000_000)
    config = compose(
        "data=text", text, "train.steps=7", "model.n_layer=5", "tokenizer.vocab_size=300"
    )
    assert (config.train.steps, config.model.n_layer, config.tokenizer.vocab_size) == (7, 5, 300)
    assert config.preset == "1MB"
    assert compose("data=text", text, "model=gpt2").model.n_layer == 12
    assert compose("data=text", text, "preset=20kB").tokenizer.vocab_size == 288
    assert compose("data=text", text, "experiment=shakespeare_char_cpu").train.steps == 2000


def test_recipes_do_not_depend_on_the_amount_of_text(tmp_path):
    with_preset = ("shakespeare_cpu_fast", "larger_model")
    for recipe in (
        "shakespeare_char",
        "shakespeare_char_cpu",
        "shakespeare_char_cpu_fast",
        "gpt2_124m",
        *with_preset,
    ):
        words = [f"experiment={recipe}", *([] if recipe in with_preset else ["tokenizer=char"])]
        short, long = (compose(*words, write_text(tmp_path, size)) for size in (10**4, 10**9))
        assert short == long and (short.preset is not None) == (recipe in with_preset)


def test_text_that_is_not_on_this_machine_counts_as_long_unless_its_size_is_set(tmp_path):
    remote = ["data=hub", "data.repo=owner/name"]
    assert compose(*remote).preset == "10MB"
    assert compose(*remote, "data.text_bytes=90000").preset == "100kB"
    assert compose("data=shakespeare_char", "tokenizer=char").preset == "1MB"


def test_prepare_uses_the_vocabulary_of_train(tmp_path):
    words = ["data=text", write_text(tmp_path, 100_000)]
    assert compose(*words, script="prepare").tokenizer == compose(*words).tokenizer


def test_finetuning_does_not_decay_the_weights_of_the_first_run(tmp_path):
    words = ["data=text", write_text(tmp_path, 20_000), "tokenizer=byte", "train.init_from=run:a"]
    optimizer = compose(*words).optimizer
    assert (optimizer.weight_decay, optimizer.ngram_weight_decay) == (0, 0)
    assert compose(*words, "optimizer.weight_decay=1").optimizer.weight_decay == 1
