"""Rules of the model settings, and their messages."""

import pytest
from model_helpers import GPT2, GROUPED, MODERN

from common.errors import UserError
from model import GPTConfig


@pytest.mark.parametrize("window", [0, -1, True, 2.5, "short", [], [4, 0], [4, "all"]], ids=str)
def test_window_rejects_invalid_values(window):
    with pytest.raises(UserError, match=r"model\.window=.* must "):
        GPTConfig(**MODERN | dict(window=window))


def test_saved_config_with_an_unknown_key_is_refused():
    assert GPTConfig.from_saved({"n_layer": 3}) == GPTConfig(n_layer=3)
    with pytest.raises(UserError, match="the model has n_expert; use the version"):
        GPTConfig.from_saved({"n_layer": 3, "n_expert": 8})


@pytest.mark.parametrize(("changed", "message"), [
    ({"n_layer": 0}, r"^model.n_layer=0 must be at least 1 and at most [0-9,]+$"),
    ({"max_ngram": 0}, r"^model.max_ngram=0 must be at least 1 and at most [0-9,]+$"),
    ({"ngram_table_size": 0}, r"^model.ngram_table_size=0 must be at least 1 and at most [0-9,]+$"),
    ({"norm": "batchnorm"}, r"^model.norm=batchnorm is unknown; set one of layernorm, rmsnorm$"),
    ({"mlp": "swish"}, r"^model.mlp=swish is unknown; set one of gelu, gelu_tanh, "),
    ({"position": "alibi"}, r"^model.position=alibi is unknown; set one of learned, rotary$"),
    ({"attention_type": ["a"]}, r"^model.attention_type=a is unknown; set one of softmax, "),
    ({"attention_type": []}, r"^model.attention_type=\[\] must list 1 to 2 layers"),
    ({"attention_type": ["linear"] * 3}, r"^model.attention_type=\[linear,linear,linear\] must list 1 to 2 layers"),
    ({"attention_type": "linear", "attention_softcap": 9.0}, r"attention_softcap=9.0 has no effect without softmax"),
    ({"attention_softcap": 0.0}, r"^model.attention_softcap=0.0 must be above 0"),
    ({"dropout": 1.0}, r"^model.dropout=1.0 must be at least 0 and below 1$"),
    ({"dropout": -0.1}, r"^model.dropout=-0.1 must be at least 0"),
    ({"dropout": float("nan")}, r"^model.dropout=nan must be at least 0"),
    ({"n_head": 5}, r"^model.n_embd=32 must be a multiple of model.n_head=5; set model.n_embd=30, for example$"),
    ({"n_embd": 1}, r"^model.n_embd=1 must be a multiple of model.n_head=4; set model.n_embd=8, for example$"),
    ({"n_kv_head": 3}, r"^model.n_kv_head=3 must divide model.n_head=4; set one of 1, 2, 4, or null$"),
    ({"n_kv_head": 0}, r"^model.n_kv_head=0 must be at least 1"),
    ({"n_embd": 4}, r"^model.position=rotary needs an even number of channels per head .* set model.n_embd=8, or"),
])  # fmt: skip
def test_invalid_settings_are_refused_with_a_value_that_fits(changed, message):
    with pytest.raises(UserError, match=message):
        GPTConfig(**MODERN | changed)


def test_valid_settings_are_accepted():
    GPTConfig(**GPT2 | dict(n_embd=4))  # one channel per head, with learned positions
    assert GPTConfig(**GROUPED).kv_heads == 2 and GPTConfig(**MODERN).kv_heads == 4


def test_window_pattern_repeats_over_the_layers():
    config = GPTConfig(**MODERN | dict(n_layer=6, window=[4, 4, None]))
    assert config.windows == (4, 4, None, 4, 4, None)
    assert GPTConfig(**MODERN | dict(window=[24, 100])).windows == (None, None), (
        "as long as the context: no window"
    )
