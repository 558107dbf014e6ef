"""Rules of the model settings, and their messages."""

import math

import pytest
from model_helpers import GPT2, GROUPED, MODERN

from common.errors import UserError
from model import GPTConfig


@pytest.mark.parametrize("window", [0, -1, True, 2.5, "short", [], [4, 0], [4, "all"]], ids=str)
def test_window_rejects_invalid_values(window):
    with pytest.raises(UserError, match=r"model\.window=.* must "):
        GPTConfig(**MODERN | dict(window=window))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_layer": 0}, "at least 1"),
        ({"n_kv_head": 0}, "at least 1"),
        ({"max_ngram": 0}, "at least 1"),
        ({"ngram_table_size": 0}, "at least 1"),
        ({"attention_softcap": 0.0}, "above 0"),
        ({"rotary_fraction": 0.0}, "above 0"),
        ({"rotary_fraction": 1.5}, "at most 1"),
        ({"dropout": 1.0}, "below 1"),
        ({"dropout": -0.1}, "at least 0"),
        ({"dropout": math.nan}, "at least 0"),
        ({"norm": "batchnorm"}, "set one of layernorm, rmsnorm"),
        ({"mlp": "swish"}, "set one of gelu, gelu_tanh, "),
        ({"position": "alibi"}, "set one of learned, rotary"),
        ({"attention_type": ["a"]}, "set one of softmax, linear"),
        ({"attention_type": []}, "list 1 to 2 layers"),
        ({"attention_type": ["linear"] * 3}, "list 1 to 2 layers"),
        ({"window": [4] * 3}, "list 1 to 2 layers"),
        ({"n_kv_head": 3}, "must divide model.n_head=4"),
        ({"n_embd": 45}, "must be a multiple of model.n_head=4"),
    ],
    ids=str,
)
def test_value_out_of_range_is_refused(changed, message):
    (key,) = changed
    with pytest.raises(UserError, match=f"^model.{key}=.* {message}"):
        GPTConfig(**MODERN | changed)


def test_rotary_positions_with_an_odd_head_dim_are_refused():
    message = r"^model.position=rotary needs an even number .* set model.n_embd=8, or"
    with pytest.raises(UserError, match=message):
        GPTConfig(**MODERN | dict(n_embd=4))


def test_learned_positions_allow_an_odd_head_dim():
    assert GPTConfig(**GPT2 | dict(n_embd=4)).head_dim == 1


@pytest.mark.parametrize(("head_dim", "rotated"), [(16, 8), (8, 4), (6, 4), (4, 2), (2, 2)])
def test_key_offset_rotates_an_even_number_of_channels(head_dim, rotated):
    config = GPTConfig(**MODERN | dict(n_embd=4 * head_dim))
    assert config.rotary_channels == rotated


@pytest.mark.parametrize("key_offset", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "fraction", "rotated"),
    [(16, 1.0, 16), (16, 0.5, 8), (6, 0.5, 4), (2, 0.5, 2), (16, 0.1, 2), (16, 1e-9, 2)],
)
def test_rotary_fraction_rounds_up_to_an_even_number(head_dim, fraction, rotated, key_offset):
    changed = dict(n_embd=4 * head_dim, rotary_fraction=fraction, key_offset=key_offset)
    assert GPTConfig(**MODERN | changed).rotary_channels == rotated


def test_rotary_fraction_with_learned_positions_is_refused():
    message = r"^model.rotary_fraction=1\.0 has no effect with model.position=learned; set null, or"
    with pytest.raises(UserError, match=message):
        GPTConfig(**GPT2 | dict(rotary_fraction=1.0))


def test_attention_softcap_without_softmax_layers_is_refused():
    with pytest.raises(UserError, match=r"attention_softcap=9\.0 has no effect without softmax"):
        GPTConfig(**MODERN | dict(attention_type="linear", attention_softcap=9.0))


def test_attention_softcap_is_allowed_if_one_layer_is_softmax():
    changed = dict(attention_type=["linear", "softmax"], attention_softcap=9.0)
    assert GPTConfig(**MODERN | changed).attention_types == ("linear", "softmax")


# Saved models


def test_saved_config_without_a_key_has_the_value_of_older_versions():
    assert GPTConfig.from_saved({"n_layer": 3}) == GPTConfig(n_layer=3, key_offset=False)


def test_saved_config_with_an_unknown_key_is_refused():
    with pytest.raises(UserError, match="the model has n_expert; use the version"):
        GPTConfig.from_saved({"n_layer": 3, "n_expert": 8})


# Derived values


@pytest.mark.parametrize(("variant", "expected"), [(GROUPED, 2), (MODERN, 4)])
def test_kv_heads_default_to_n_head(variant, expected):
    assert GPTConfig(**variant).kv_heads == expected


@pytest.mark.parametrize(
    ("changed", "windows"),
    [
        ({"window": None}, (None, None, None)),
        ({"window": 4}, (4, 4, 4)),
        ({"window": [4, None]}, (4, None, 4)),
        ({"window": [23, 24, 100]}, (23, None, None)),
    ],
    ids=["none", "one value", "list", "as long as the context"],
)
def test_window_pattern_repeats_over_the_layers(changed, windows):
    assert GPTConfig(**MODERN | dict(n_layer=3) | changed).windows == windows


@pytest.mark.parametrize(
    ("pattern", "types"),
    [
        ("linear", ("linear", "linear", "linear")),
        (["softmax", "linear"], ("softmax", "linear", "softmax")),
    ],
    ids=["one value", "list"],
)
def test_attention_type_pattern_repeats_over_the_layers(pattern, types):
    assert GPTConfig(**MODERN | dict(n_layer=3, attention_type=pattern)).attention_types == types


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"mlp": "gelu", "n_embd": 100}, 400),
        ({"mlp": "swiglu", "n_embd": 96}, 256),
        ({"mlp": "swiglu", "n_embd": 100}, 288),
        ({"mlp": "swiglu", "n_embd": 108}, 288),
        ({"mlp": "swiglu", "n_embd": 100, "mlp_width": 7}, 7),
    ],
    ids=["4 n_embd", "8/3 n_embd", "rounded up", "multiple of 32", "mlp_width"],
)
def test_mlp_channels(changed, expected):
    assert GPTConfig(**GPT2 | changed).mlp_channels == expected
