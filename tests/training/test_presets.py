"""Presets for text and FLOPs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.settings import check
from model import GPTConfig
from training.config import MuonConfig, TrainConfig
from training.presets import SIZES, name_preset, parse_preset, preset_values

TEXT_BYTES = st.floats(0, 13).map(lambda exponent: 10**exponent)
FLOPS = st.floats(0, 24).map(lambda exponent: 10**exponent)


def section(preset: str, name: str) -> dict:
    """The values of a preset for a section of the config."""
    values = preset_values(preset).items()
    return {key.partition(".")[2]: value for key, value in values if key.startswith(f"{name}.")}


@given(TEXT_BYTES, FLOPS)
def test_name_says_bytes_and_flops(text_bytes, flops):
    named_bytes, named_flops = parse_preset(name_preset(text_bytes, flops))
    assert named_bytes == pytest.approx(text_bytes, rel=0.051)
    assert named_flops == pytest.approx(flops, rel=0.3)


@given(TEXT_BYTES, FLOPS)
def test_name_of_a_preset_is_stable(text_bytes, flops):
    preset = name_preset(text_bytes, flops)
    assert name_preset(*parse_preset(preset)) == preset


def test_name_can_have_fewer_digits():
    assert preset_values("1e6-1e13") == preset_values("1.0e6-1.0e13")


def test_measurements_that_differ_by_a_tenth_mostly_give_the_same_preset():
    speeds = [10 ** (13 + i / 100) for i in range(100)]
    equal = [name_preset(1e6, speed) == name_preset(1e6, 1.1 * speed) for speed in speeds]
    assert sum(equal) >= 75


@pytest.mark.parametrize(
    "preset", [*SIZES, "auto", "1e6", "1.0e6-", "-1.0e13", "1.0e6-1.0e13-", "0e6-1e13"]
)
def test_other_names_have_no_flops(preset):
    assert parse_preset(preset) is None


@given(TEXT_BYTES, FLOPS)
def test_values_are_valid(text_bytes, flops):
    preset = name_preset(text_bytes, flops)
    check(GPTConfig(**section(preset, "model")), "model")
    check(MuonConfig(**section(preset, "muon")), "optimizer")
    train = section(preset, "train")
    check(TrainConfig(**train), "train")
    assert preset_values(preset)["eval.every"] >= 1
    assert preset_values(preset)["tokenizer.vocab_size"] > 256


@given(TEXT_BYTES, FLOPS)
def test_more_flops_never_give_a_smaller_model(text_bytes, flops):
    smaller, larger = (section(name_preset(text_bytes, n), "model") for n in (flops, 4 * flops))
    assert larger["n_layer"] >= smaller["n_layer"]
    assert larger["n_embd"] >= smaller["n_embd"]


@pytest.mark.parametrize("key", ["lr", "embedding_lr", "norm_lr", "head_lr"])
def test_learning_rates_for_a_long_text_fall_with_the_flops(key):
    rates = [preset_values(f"1.0e7-{flops}")[f"muon.{key}"] for flops in ("2.0e12", "2.0e14")]
    assert rates[1] < 0.5 * rates[0]


@pytest.mark.parametrize("size", ["300kB", "1MB", "3MB", "10MB"])
@pytest.mark.parametrize("flops", [2.5e12, 1e13, 4e13, 1.6e14])
def test_n_gram_table_decays_as_with_the_preset_without_flops(size, flops):
    """The factor for each token at the peak learning rate; both have sequences of 128 tokens."""

    def decay(values, embedding_lr):
        return embedding_lr * values["muon.ngram_weight_decay"] / values["train.batch_size"]

    values = preset_values(name_preset(SIZES[size], flops))
    expected = decay(preset_values(size), MuonConfig.embedding_lr)
    assert decay(values, values["muon.embedding_lr"]) == pytest.approx(expected, rel=0.39)


@pytest.mark.parametrize("size", ["20kB", "100kB"])
@pytest.mark.parametrize("key", ["tokenizer.vocab_size", "train.batch_size", "muon.head_lr"])
def test_short_texts_keep_the_values_of_their_preset_without_flops(size, key):
    preset = name_preset(SIZES[size], 1e13)
    assert preset_values(preset)[key] == preset_values(size)[key]


@pytest.mark.parametrize(("text_bytes", "max_ngram"), [("1.0e6", 3), ("1.0e10", 1)])
def test_n_grams_are_left_out_if_the_text_lasts_for_the_flops(text_bytes, max_ngram):
    assert preset_values(f"{text_bytes}-1.0e18")["model.max_ngram"] == max_ngram


def test_a_long_text_and_the_budget_of_gpt2_give_its_shape():
    config = GPTConfig(**section("4.0e10-1.0e19", "model"))
    shape = config.n_layer, config.n_head, config.n_embd, config.block_size, config.max_ngram
    assert shape == (12, 12, 768, 1024, 1)


def test_more_flops_than_gpt2_give_a_larger_model():
    n_layer, n_embd = (
        preset_values("4.0e10-1.0e21")[f"model.{key}"] for key in ("n_layer", "n_embd")
    )
    assert n_layer > 24
    assert n_embd > 1536
