"""Presets: values for the amount of training text, and for the time to train on it."""

from pathlib import Path

import pytest
from data_helpers import write_file

from configs.cli import parse_config
from configs.preset import measure_speed
from training.config import RunConfig
from training.presets import PRESETS, SIZES, parse_preset, preset_values
from training.run_folder import write_config


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


# train.minutes

# 2e11 x 60 s = 1.2e13 FLOPs
ONE_MINUTE = ["train.minutes=1", "plan=true", "flops_per_second=2e11"]


def test_minutes_without_steps_select_the_preset_for_text_and_time(tmp_path):
    config = compose(write_text(tmp_path, 1_100_000), *ONE_MINUTE)
    assert config.preset == "1.1e6-1.0e13"
    assert config.model.n_layer == preset_values(config.preset)["model.n_layer"]


def test_speed_is_measured(tmp_path):
    config = compose(write_text(tmp_path, 1_100_000), "train.minutes=1", "device=cpu")
    _, flops = parse_preset(config.preset)
    assert flops > 1e9


@pytest.mark.parametrize(
    "words",
    [["train.steps=9"], ["train.steps=null"], ["preset=1MB"], ["train.init_from=run:a"]],
    ids=str,
)
def test_minutes_are_only_a_limit_if_something_else_sets_the_length_or_the_model(words, tmp_path):
    config = compose(write_text(tmp_path, 10**6), "tokenizer=byte", *ONE_MINUTE, *words)
    assert config.preset == "1MB"
    assert config.model == RunConfig().model


def test_run_ends_after_the_minutes_or_when_the_text_has_been_read_often_enough(tmp_path):
    config = compose(write_text(tmp_path, 10**6), *ONE_MINUTE)
    assert config.train.minutes == 1
    assert config.train.epochs == preset_values(config.preset)["train.epochs"]
    assert config.train.steps is None


@pytest.mark.parametrize("preset", ["1MB", "1.0e6-1.0e13"])
def test_epochs_replace_the_steps_of_a_preset(preset, tmp_path):
    config = compose(write_text(tmp_path, 10**6), f"preset={preset}", "train.epochs=9")
    assert (config.train.steps, config.train.epochs) == (None, 9)


def test_steps_replace_the_epochs_of_a_preset(tmp_path):
    config = compose(write_text(tmp_path, 10**6), "preset=1.0e6-1.0e13", "train.steps=9")
    assert (config.train.steps, config.train.epochs) == (9, None)


def test_recorded_preset_gives_the_same_run_without_a_measurement(tmp_path):
    text = write_text(tmp_path, 10**6)
    config = compose(text, *ONE_MINUTE)
    same = compose(text, "train.minutes=1", f"preset={config.preset}", "plan=true")
    same.flops_per_second = config.flops_per_second
    assert same == config


@pytest.mark.parametrize(
    ("word", "section", "key", "value"),
    [
        ("model.n_layer=7", "model", "n_layer", 7),
        ("model=gpt2", "model", "n_embd", 768),
        ("tokenizer.vocab_size=300", "tokenizer", "vocab_size", 300),
        ("train.batch_size=6", "train", "batch_size", 6),
        ("model.n_head=4", "model", "n_head", 4),
        ("model.n_embd=256", "model", "n_embd", 256),
        ("train.epochs=0.5", "train", "epochs", 0.5),
        ("optimizer.weight_decay=0.5", "optimizer", "weight_decay", 0.5),
    ],
)
def test_keys_that_are_set_win_over_the_preset_one_by_one(word, section, key, value, tmp_path):
    text = write_text(tmp_path, 10**6)
    config = compose(text, *ONE_MINUTE, word)
    assert getattr(getattr(config, section), key) == value
    assert config.eval == compose(text, *ONE_MINUTE).eval


@pytest.mark.parametrize("world_size", [1, 2, 8, 64])
def test_micro_batches_of_a_preset_fit_the_number_of_devices(world_size, tmp_path):
    words = ["preset=1.0e9-1.6e18", "plan=true", f"world_size={world_size}"]
    config = compose(write_text(tmp_path, 10**6), *words)
    micro_batch_size, accumulation = config.train.split_batch(world_size)
    assert micro_batch_size * accumulation * world_size == config.train.batch_size == 128


def test_keys_that_suit_the_chosen_model_are_valid(tmp_path):
    words = ["train.minutes=3", "plan=true", "flops_per_second=2e11", "model.n_head=6"]
    assert compose(write_text(tmp_path, 10**6), *words).model.head_dim == 64


@pytest.mark.parametrize(
    "word", ["dtype=bf16", "device=gpu", "train.minutes=0", "train.minutes=inf", "world_size=0"]
)
def test_invalid_values_are_refused_before_the_speed_is_measured(
    word, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("configs.preset.measure_speed", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit):
        compose(write_text(tmp_path, 10**6), "train.minutes=1", "plan=true", word)
    assert word.partition("=")[0] in capsys.readouterr().err


def test_speed_of_a_cpu_is_a_share_of_the_speed_of_passes(tmp_path, monkeypatch):
    measure_speed.cache_clear()
    monkeypatch.setattr("training.plan.measure_flops_per_second", lambda *_: 1e11)
    words = ["train.minutes=1", "plan=true", "device=cpu", "world_size=2"]
    preset = compose(write_text(tmp_path, 10**6), *words).preset
    assert preset == "1.0e6-6.3e12"  # 60 s x 8.5e10, rounded; two processes share the cores
    measure_speed.cache_clear()


def test_processes_of_torchrun_do_not_measure_different_speeds(tmp_path, monkeypatch, capsys):
    measure_speed.cache_clear()
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    with pytest.raises(SystemExit):
        compose(write_text(tmp_path, 10**6), "train.minutes=1", "device=cpu")
    assert "set preset=NAME" in capsys.readouterr().err


@pytest.fixture
def record_run(tmp_path, monkeypatch):
    """Writes the config of a run `a` with this preset, and a checkpoint."""
    monkeypatch.chdir(tmp_path)

    def record(preset: str, checkpoint: str = "last.pt"):
        folder = Path("runs/a")
        write_file(folder / "checkpoints" / checkpoint, "")
        write_config(folder, {"preset": preset})

    return record


@pytest.mark.parametrize("words", [ONE_MINUTE, ["train.steps=2000"]], ids=["minutes", "steps"])
@pytest.mark.parametrize("preset", ["1.0e6-2.5e14", "300kB"])
def test_resumed_run_keeps_its_preset(preset, words, record_run, tmp_path):
    record_run(preset)
    assert compose(write_text(tmp_path, 10**6), *words, "name=a").preset == preset


def test_other_runs_do_not_have_the_preset_of_a_run(record_run, tmp_path):
    record_run("1.0e6-2.5e14")
    assert compose(write_text(tmp_path, 10**6), *ONE_MINUTE, "name=b").preset == "1.0e6-1.0e13"


def test_run_without_a_checkpoint_does_not_keep_its_preset(record_run, tmp_path):
    record_run("1.0e6-2.5e14", checkpoint="last.tmp")
    assert compose(write_text(tmp_path, 10**6), *ONE_MINUTE, "name=a").preset == "1.0e6-1.0e13"


def test_resumed_run_does_not_have_the_preset_of_a_sweep_with_its_name(record_run, tmp_path):
    record_run("1.0e6-2.5e14")
    job = {"preset": "1.0e6-1.0e13", "train": {"minutes": 1}, "device": "auto", "dtype": "auto"}
    folder = Path("runs/sweeps/a/seed=1")
    folder.mkdir(parents=True)
    write_config(folder, job)
    assert compose(write_text(tmp_path, 10**6), *ONE_MINUTE, "name=a").preset == "1.0e6-2.5e14"


def test_text_that_is_not_on_this_machine_counts_as_long_with_minutes(tmp_path):
    assert compose(*REMOTE, *ONE_MINUTE).preset == "1.0e10-1.0e13"
