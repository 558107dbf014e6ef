"""Presets: values for the amount of text, and for the time to train on it."""

import argparse
from pathlib import Path

import pytest
from data_helpers import write_file
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.settings import check, set_values
from configs.cli import parse_config
from training.config import RunConfig
from training.presets import (
    PRESETS,
    SIZES,
    choose_preset,
    measure_speed,
    name_preset,
    parse_preset,
    preset_values,
)
from training.run_folder import write_config

TEXT_BYTES = st.floats(0, 13).map(lambda exponent: 10**exponent)
FLOPS = st.floats(0, 24).map(lambda exponent: 10**exponent)


# The values of a preset for text and FLOPs


@given(TEXT_BYTES, FLOPS)
def test_name_says_bytes_and_flops(text_bytes, flops):
    preset = name_preset(text_bytes, flops)
    named_bytes, named_flops = parse_preset(preset)
    assert named_bytes == pytest.approx(text_bytes, rel=0.051)
    assert named_flops == pytest.approx(flops, rel=0.3)
    assert name_preset(named_bytes, named_flops) == preset


@pytest.mark.parametrize(
    "preset", [*SIZES, "auto", "1e6", "1.0e6-", "-1.0e13", "1.0e6-1.0e13-", "0e6-1e13"]
)
def test_other_names_have_no_flops(preset):
    assert parse_preset(preset) is None


@given(TEXT_BYTES, FLOPS)
def test_values_are_valid(text_bytes, flops):
    check(set_values(RunConfig(), preset_values(name_preset(text_bytes, flops))))


@pytest.mark.parametrize(
    ("preset", "n_layer", "vocab_size", "batch", "block_size", "epochs", "lr", "ngram_decay"),
    [
        ("2e4-1e13", 1, 288, 4, 128, 4, 0.01, 24),
        ("1e5-1e11", 1, 640, 4, 128, 4, 0.01, 24),
        ("1e5-4e13", 3, 640, 8, 128, 4, 0.01, 24),
        ("1e5-1.6e14", 4, 640, 8, 128, 4, 0.01, 24),
        ("1e6-1e13", 2, 1024, 16, 256, 3, 0.01, 10),
        ("1e6-2.5e13", 3, 1024, 4, 1024, 3, 0.01, 10),
        ("1e6-4e13", 2, 1024, 4, 1024, 3, 0.01, 10),
        ("1e6-1.6e14", 4, 1024, 4, 1024, 3, 0.01, 10),
        ("1e7-1e13", 2, 2048, 16, 256, 4, 0.012, 1.2),
        ("1e7-1.6e14", 4, 3072, 16, 512, 4, 0.007, 4),
        ("1e10-1e19", 12, 32768, 512, 1024, 4, 0.005, 100),
    ],
)
def test_values_of_measured_presets(
    preset, n_layer, vocab_size, batch, block_size, epochs, lr, ngram_decay
):
    values = preset_values(preset)
    assert values["model.n_layer"] == n_layer
    assert values["tokenizer.vocab_size"] == vocab_size
    assert values["train.batch_size"] == batch
    assert values["model.block_size"] == block_size
    assert values["train.epochs"] == epochs
    assert values["optimizer.lr"] == lr
    assert values["optimizer.ngram_weight_decay"] == ngram_decay


@pytest.mark.parametrize(
    ("preset", "has_teachers"),
    [
        ("1.0e5-5.0e11", False),
        ("1.0e5-4.0e13", True),
        ("1.0e6-2.5e13", False),
        ("1.0e6-4.0e13", True),
        ("1.0e7-4.0e13", False),
    ],
    ids=["no time", "100 kB", "1 MB, no time", "1 MB", "long text"],
)
def test_short_text_has_teachers_if_there_is_time(preset, has_teachers):
    assert (preset_values(preset)["train.n_teachers"] is not None) == has_teachers


@pytest.mark.parametrize(("text_bytes", "max_ngram"), [("1.0e6", 3), ("1.0e10", 1)])
def test_n_grams_are_left_out_if_the_text_lasts_for_the_flops(text_bytes, max_ngram):
    assert preset_values(f"{text_bytes}-1.0e18")["model.max_ngram"] == max_ngram


@pytest.mark.parametrize("flops", ["1.0e19", "1.0e22"])
def test_a_long_text_and_the_budget_of_gpt2_or_more_give_its_shape(flops):
    values = preset_values(f"4.0e10-{flops}")
    keys = ("n_layer", "n_head", "n_embd", "block_size", "max_ngram")
    assert [values[f"model.{key}"] for key in keys] == [12, 12, 768, 1024, 1]


# The choice


def choose(*words: str, script: str = "train"):
    """The config of a command line, with the values of its preset."""
    return choose_preset(parse_config(script, "", list(words)))


def write_text(folder: Path, size: int) -> str:
    """A file of this size that takes no space on the disk."""
    path = folder / "long.txt"
    with open(path, "wb") as file:
        file.truncate(size)
    return f"data.path={path}"


@pytest.fixture
def text(tmp_path) -> str:
    """A text of 1 MB, as a word."""
    return write_text(tmp_path, 1_000_000)


# texts just below and just above each limit, which the documentation lists
@pytest.mark.parametrize(
    ("size", "preset"),
    [
        *((44_000, "20kB"), (44_900, "100kB"), (173_000, "100kB"), (177_000, "300kB")),
        *((547_000, "300kB"), (558_000, "1MB"), (1_730_000, "1MB"), (1_770_000, "3MB")),
        *((5_470_000, "3MB"), (5_580_000, "10MB"), (10**8, "10MB")),
    ],
)
def test_auto_selects_the_preset_that_the_documentation_lists(size, preset, tmp_path):
    assert choose(write_text(tmp_path, size)).preset == preset


@pytest.mark.parametrize("name", ["code.py", "code.py.gz", "code.py.zst", "code.py.GZ"])
def test_compressed_text_has_the_preset_of_the_text(workdir, name):
    content = Path(argparse.__file__).read_bytes()[:90_000]
    Path(write_file(name.lower(), content)).rename(name)
    assert choose(f"data.path={name}").preset == "100kB"


@pytest.mark.parametrize("preset", SIZES)
def test_preset_sets_its_values(preset, text):
    config = choose(text, f"preset={preset}")
    column = list(SIZES).index(preset)
    assert config.train.steps == PRESETS["train.steps"][column]
    assert config.tokenizer.vocab_size == PRESETS["tokenizer.vocab_size"][column]
    assert config.optimizer.ngram_weight_decay == PRESETS["optimizer.ngram_weight_decay"][column]


def test_largest_preset_has_the_defaults_of_the_dataclasses(tmp_path):
    config = choose(write_text(tmp_path, 10**8))
    assert config == RunConfig(preset="10MB", data=config.data)


@pytest.mark.parametrize(
    ("words", "batch_size", "block_size"),
    [
        (["model.block_size=512"], 4, 512),
        (["model=gpt2"], 2, 1024),
        (["train.batch_size=32"], 32, 128),
        (["train.batch_size=3", "model.block_size=64"], 3, 64),
    ],
)
def test_run_keeps_the_tokens_of_its_preset(words, batch_size, block_size, text):
    config = choose(text, *words)
    assert (config.train.batch_size, config.model.block_size) == (batch_size, block_size)
    step_tokens = batch_size * block_size
    expected = choose(text)
    assert config.train.steps * step_tokens == pytest.approx(
        expected.train.steps * 16 * 128, abs=step_tokens
    )
    assert config.eval.every * step_tokens == pytest.approx(
        expected.eval.every * 16 * 128, abs=step_tokens
    )


@pytest.mark.parametrize("preset", ["2MB", "1.0e6", "none"])
def test_unknown_preset_is_refused(preset, text):
    with pytest.raises(UserError, match=f"preset={preset} is unknown; set auto, 20kB"):
        choose(text, f"preset={preset}")


def test_without_a_preset_the_config_has_the_defaults(text):
    assert choose(text, "preset=null").train == RunConfig().train
    assert choose_preset(RunConfig()) == RunConfig()


def test_values_of_a_preset_that_do_not_fit_the_config_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"optimizer\.ngram_weight_decay=24.*embedding_lr"):
        choose(write_text(tmp_path, 100), "optimizer.embedding_lr=0.05")


@pytest.mark.parametrize(
    ("words", "section", "key", "value"),
    [
        (["train.steps=7"], "train", "steps", 7),
        (["train.steps=1000"], "train", "steps", 1000),  # also the default
        (["tokenizer.vocab_size=300"], "tokenizer", "vocab_size", 300),
        (["optimizer.weight_decay=0.5"], "optimizer", "weight_decay", 0.5),
        (["optimizer=adamw"], "optimizer", "weight_decay", 0.1),
        (["experiment=shakespeare_char_cpu"], "train", "steps", 2000),
        (["tokenizer=byte"], "tokenizer", "vocab_size", None),
        (["train.epochs=9"], "train", "steps", None),
        (["train.epochs=null"], "train", "steps", 350),
    ],
)
def test_words_and_recipes_override_a_preset(words, section, key, value, tmp_path):
    config = choose(write_text(tmp_path, 300_000), *words)
    assert getattr(getattr(config, section), key) == value


@pytest.mark.parametrize(
    ("recipe", "preset"),
    [
        ("shakespeare_char", None),
        ("shakespeare_char_cpu", None),
        ("shakespeare_char_cpu_fast", None),
        ("gpt2_124m", None),
        ("shakespeare_cpu_fast", "1MB"),
    ],
)
def test_recipe_does_not_depend_on_the_amount_of_text(recipe, preset, tmp_path):
    words = [f"experiment={recipe}"]
    if preset is None:
        words.append("tokenizer=char")
    short = choose(*words, write_text(tmp_path, 10**4))
    long = choose(*words, write_text(tmp_path, 10**9))
    assert short == long
    assert short.preset == preset


REMOTE = ["data=hub", "data.repo=owner/name"]
# 2e11 x 60 s = 1.2e13 FLOPs
ONE_MINUTE = ["train.minutes=1", "plan=true", "flops_per_second=2e11"]


@pytest.mark.parametrize(
    ("words", "preset"),
    [
        (REMOTE, "10MB"),
        ([*REMOTE, "data.text_bytes=90000"], "100kB"),
        (["data=shakespeare_char", "tokenizer=char"], "1MB"),
        ([*REMOTE, *ONE_MINUTE], "1.0e10-1.0e13"),
    ],
    ids=["unknown size", "data.text_bytes", "size in a YAML file", "with minutes"],
)
def test_text_that_is_not_on_this_machine_counts_as_long_unless_its_size_is_set(words, preset):
    assert choose(*words).preset == preset


def test_prepare_uses_the_vocabulary_of_train(tmp_path):
    text = write_text(tmp_path, 100_000)
    prepared = choose(text, script="prepare")
    assert prepared.tokenizer == choose(text).tokenizer


@pytest.mark.parametrize("key", ["weight_decay", "ngram_weight_decay"])
def test_finetuning_does_not_decay_the_weights_of_the_first_run(key, tmp_path):
    words = [write_text(tmp_path, 20_000), "tokenizer=byte", "train.init_from=run:a"]
    assert getattr(choose(*words).optimizer, key) == 0
    assert getattr(choose(*words, f"optimizer.{key}=1").optimizer, key) == 1


# train.minutes


def test_minutes_without_steps_select_the_preset_for_text_and_time(text):
    config = choose(text, *ONE_MINUTE)
    values = preset_values("1.0e6-1.0e13")
    assert config.preset == "1.0e6-1.0e13"
    assert config.model.n_layer == values["model.n_layer"]
    assert (config.train.steps, config.train.minutes) == (None, 1)
    assert config.train.epochs == values["train.epochs"]


@pytest.mark.parametrize(
    "words",
    [["train.steps=9"], ["train.steps=null"], ["preset=1MB"], ["train.init_from=run:a"]],
    ids=str,
)
def test_minutes_are_only_a_limit_if_something_else_sets_the_length_or_the_model(words, text):
    config = choose(text, "tokenizer=byte", *ONE_MINUTE, *words)
    assert config.preset == "1MB"
    assert config.model == RunConfig().model


@pytest.mark.parametrize(
    "word",
    [
        "train.patience=3",
        "train.init_from=run:a",
        "train.n_teachers=null",
        "train.epochs=null",
        "train.minutes=null",
    ],
)
def test_preset_has_no_teachers_if_the_user_sets_what_excludes_them(word, text):
    words = [text, "preset=1.0e5-4.0e13", "tokenizer=byte", "train.minutes=5"]
    assert choose(*words).train.n_teachers >= 2
    assert choose(*words, word).train.n_teachers is None


def test_steps_replace_the_epochs_of_a_preset(text):
    train = choose(text, "preset=1.0e6-1.0e13", "train.steps=9").train
    assert (train.steps, train.epochs) == (9, None)


@pytest.mark.parametrize(
    ("word", "section", "key", "value"),
    [
        ("model.n_layer=7", "model", "n_layer", 7),
        ("model=gpt2", "model", "n_embd", 768),
        ("model.n_head=4", "model", "n_head", 4),
        ("model.n_embd=256", "model", "n_embd", 256),
        ("model.n_embd=256", "model", "n_head", 4),
        ("model.n_embd=200", "model", "n_head", 2),  # 3 heads do not divide it
        ("model.n_embd=260", "model", "n_head", 2),  # 4 heads would have 65 channels
        ("train.epochs=0.5", "train", "epochs", 0.5),
    ],
)
def test_keys_that_are_set_win_over_the_preset_one_by_one(word, section, key, value, text):
    config = choose(text, *ONE_MINUTE, word)
    assert getattr(getattr(config, section), key) == value
    assert config.eval == choose(text, *ONE_MINUTE).eval


@pytest.mark.parametrize("block_size", [32, 1024, 10**5])
def test_step_keeps_its_tokens_with_another_context_length(block_size, text):
    expected = choose(text, *ONE_MINUTE)
    config = choose(text, *ONE_MINUTE, f"model.block_size={block_size}")
    tokens = config.train.batch_size * block_size
    assert tokens == max(block_size, expected.train.batch_size * expected.model.block_size)
    assert config.train.micro_batch_size == max(1, 16384 // block_size)
    tokens_per_evaluation = expected.eval.every * 4096
    assert config.eval.every * tokens == pytest.approx(tokens_per_evaluation, abs=tokens)


def test_evaluations_keep_their_tokens_with_another_batch(text):
    expected = choose(text, *ONE_MINUTE)
    config = choose(text, *ONE_MINUTE, f"train.batch_size={expected.train.batch_size * 2}")
    assert config.eval.every == pytest.approx(expected.eval.every / 2, abs=1)


# The speed


@pytest.fixture
def new_measurement():
    measure_speed.cache_clear()
    yield
    measure_speed.cache_clear()


def test_speed_is_measured(text, new_measurement):
    _, flops = parse_preset(choose(text, "train.minutes=1", "device=cpu").preset)
    assert flops > 1e9


def test_speed_of_a_cpu_is_a_share_of_the_speed_of_passes(text, monkeypatch, new_measurement):
    monkeypatch.setattr("training.speed.measure_flops_per_second", lambda *_: 1e11)
    preset = choose(text, "train.minutes=1", "plan=true", "device=cpu", "world_size=2").preset
    assert preset == "1.0e6-6.3e12"  # 60 s x 8.5e10, rounded; two processes share the cores


def test_processes_of_torchrun_do_not_measure_different_speeds(text, monkeypatch, new_measurement):
    for name, value in [("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 2), ("LOCAL_WORLD_SIZE", 2)]:
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="set preset=NAME"):
        choose(text, "train.minutes=1", "device=cpu")


# Recorded presets


@pytest.fixture
def record_run(tmp_path, monkeypatch):
    """Writes the config of a run `a` with this preset, and a checkpoint."""
    monkeypatch.chdir(tmp_path)

    def record(preset: str, checkpoint: str = "last.pt"):
        write_file(f"runs/a/checkpoints/{checkpoint}", "")
        write_config(Path("runs/a"), {"preset": preset})

    return record


@pytest.mark.parametrize("words", [ONE_MINUTE, ["train.steps=2000"]], ids=["minutes", "steps"])
@pytest.mark.parametrize("preset", ["1.0e6-2.5e14", "300kB"])
def test_resumed_run_keeps_its_preset(preset, words, record_run, text):
    record_run(preset)
    assert choose(text, *words, "name=a").preset == preset


@pytest.mark.parametrize(("name", "checkpoint"), [("b", "last.pt"), ("a", "last.tmp")])
def test_new_run_and_run_without_a_checkpoint_keep_no_preset(name, checkpoint, record_run, text):
    record_run("1.0e6-2.5e14", checkpoint)
    assert choose(text, *ONE_MINUTE, f"name={name}").preset == "1.0e6-1.0e13"
