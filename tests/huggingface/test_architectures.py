"""config.json and weights for transformers: equal models, and models that cannot be imported."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from model_helpers import GPT2, LLAMA, MODERN, make_model, random_tokens

from common.errors import UserError
from generation.load import model_from_weights
from huggingface.architectures import (
    export_weights,
    find_architecture,
    from_config_json,
    import_weights,
    to_config_json,
)
from model import GPTConfig
from model.attention import naive
from model.gpt import GPT

PADDED = {"pad_vocab_multiple": 64}
EXPORTABLE = {
    "gpt2": GPT2,
    "gpt2, no bias, narrow": GPT2 | PADDED | {"mlp": "gelu", "bias": False, "mlp_width": 48},
    "gpt2, relu2, untied": GPT2 | PADDED | {"mlp": "relu2", "tie_embeddings": False},
    "llama": LLAMA,
    "llama, fraction": LLAMA | {"rotary_fraction": 1.0},
    "llama, tied, one head per query": LLAMA
    | {"tie_embeddings": True, "n_kv_head": None, "mlp_width": 40},
}
V = 50  # vocabulary


def load_in_transformers(content: dict, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    content = json.loads(json.dumps(content))
    config = transformers.AutoConfig.for_model(
        **content, vocab_size=V, bos_token_id=None, eos_token_id=None
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert not unexpected
    assert set(missing) <= tied
    return model.eval()


@pytest.fixture(params=EXPORTABLE.values(), ids=EXPORTABLE)
def exported(request) -> SimpleNamespace:
    """A model with random weights, and its model_type, config.json and tensors in transformers."""
    model = make_model(request.param, V)
    for p in model.parameters():  # also biases and norms
        torch.nn.init.normal_(p, std=0.3)
    model_type = find_architecture(model.config)
    return SimpleNamespace(
        model=model,
        model_type=model_type,
        content=to_config_json(model.config, model_type),
        tensors=export_weights(model.state_dict(), model.config, model_type, V),
    )


def test_exported_model_has_the_same_logits_loss_and_gradients(exported):
    theirs = load_in_transformers(exported.content, exported.tensors)
    assert exported.content["architectures"] == [type(theirs).__name__]
    tokens = random_tokens()
    torch.testing.assert_close(exported.model(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    expected = theirs(tokens, labels=tokens).loss
    loss = exported.model(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    loss.backward()
    expected.backward()
    ours = {name: p.grad for name, p in exported.model.named_parameters()}
    config = exported.model.config
    gradients = export_weights(ours, config, exported.model_type, V)
    for name, p in theirs.named_parameters():
        # GPT-2 of transformers always has biases.
        if config.bias or not name.endswith("bias"):
            torch.testing.assert_close(gradients[name], p.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(("model_type", "variant"), [("gpt2", GPT2), ("llama", LLAMA)])
def test_dropout_is_not_the_default_of_transformers(model_type, variant, dropout):
    content = to_config_json(GPTConfig(**variant | {"dropout": dropout}), model_type)
    config = transformers.AutoConfig.for_model(**content).to_dict()
    rates = {config[key] for key in config if key.endswith(("_pdrop", "attention_dropout"))}
    assert rates == {dropout}


def test_imported_config_is_the_exported_one(exported):
    config = from_config_json(exported.content, "config.json")
    before = exported.model.config
    assert exported.content.get("n_ctx") in (None, before.block_size)  # for llama.cpp
    for key in ("mlp", "mlp_channels", "kv_heads", "tie_embeddings", "norm", "position"):
        assert getattr(config, key) == getattr(before, key), key


def test_config_from_before_rotary_fraction_is_imported():
    content = to_config_json(GPTConfig(**MODERN), "trilgpt")
    del content["rotary_fraction"], content["rotary_channels"]
    content["settings"].remove("rotary_fraction")
    config = from_config_json(content, "config.json")
    assert config.rotary_channels == GPTConfig(**MODERN).rotary_channels == 4


def test_imported_weights_are_the_exported_ones(exported):
    config = from_config_json(exported.content, "config.json")
    weights = import_weights(exported.tensors, config, V, "file")
    for name, weight in exported.model.state_dict().items():
        without_padding = weight[:V] if name in ("wte.weight", "lm_head.weight") else weight
        assert torch.equal(without_padding, weights[name]), name


THEIR_GPT2 = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=24, vocab_size=V)
THEIR_LLAMA = transformers.LlamaConfig(
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_size=32,
    intermediate_size=40,
    max_position_embeddings=24,
    vocab_size=V,
    rms_norm_eps=1e-5,
)


def make_their_model(config: transformers.PretrainedConfig) -> torch.nn.Module:
    """A model of transformers with random weights."""
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def import_model(content: dict, tensors: dict[str, torch.Tensor]) -> GPT:
    config = from_config_json(content, "config.json")
    weights = import_weights(tensors, config, V, "a/file")
    return model_from_weights(config, V, naive, weights).eval()


@torch.no_grad()
@pytest.mark.parametrize("config", [THEIR_GPT2, THEIR_LLAMA], ids=["gpt2", "llama"])
def test_model_of_transformers_has_the_same_logits_here(config):
    theirs = make_their_model(config)
    ours = import_model(config.to_dict(), theirs.state_dict())
    expected = theirs(random_tokens()).logits
    torch.testing.assert_close(ours(random_tokens()), expected, atol=1e-5, rtol=1e-5)


def test_file_of_openai_without_prefix_and_head_is_imported():
    tensors = make_their_model(THEIR_GPT2).state_dict()
    expected = import_model(THEIR_GPT2.to_dict(), dict(tensors)).state_dict()
    del tensors["lm_head.weight"]
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    found = import_model(THEIR_GPT2.to_dict(), tensors).state_dict()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (THEIR_GPT2, "transformer.h.0.attn.bias"),
        (THEIR_GPT2, "transformer.h.0.attn.masked_bias"),
        (THEIR_LLAMA, "model.layers.0.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_buffer_of_an_older_file_is_ignored(config, name):
    tensors = make_their_model(config).state_dict()
    import_model(config.to_dict(), tensors | {name: torch.ones(4)})


@pytest.fixture
def other_head() -> dict[str, torch.Tensor]:
    """Tensors of a GPT-2 whose head differs from the embedding."""
    return make_their_model(THEIR_GPT2).state_dict() | {"lm_head.weight": torch.randn(V, 32)}


def test_head_of_a_tied_model_has_no_effect(other_head):
    ours = import_model(THEIR_GPT2.to_dict(), other_head)
    assert torch.equal(ours.lm_head.weight, other_head["transformer.wte.weight"])


@torch.no_grad()
def test_head_that_differs_from_the_embedding_is_imported_untied(other_head):
    ours = import_model(THEIR_GPT2.to_dict() | {"tie_word_embeddings": False}, other_head)
    assert torch.equal(ours.lm_head.weight[:V], other_head["lm_head.weight"])


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (THEIR_LLAMA, "model.layers.1.self_attn.q_proj.bias"),
        (THEIR_LLAMA, "model.layers.2.mlp.up_proj.weight"),  # a third layer
        (THEIR_GPT2, "transformer.h.0.attn.c_attn.lora_A.weight"),
    ],
)
def test_weights_that_the_model_does_not_use_are_refused(config, name):
    tensors = make_their_model(config).state_dict() | {name: torch.ones(32)}
    with pytest.raises(UserError, match=f"a/file has .*: {name}; set"):
        import_model(config.to_dict(), tensors)


@pytest.mark.parametrize(
    ("config", "changed", "message"),
    [
        (THEIR_GPT2, {"model_type": "bert"}, "model_type=bert, but only gpt2, llama and trilgpt"),
        (THEIR_GPT2, {"model_type": None}, "model_type=null, but only"),
        (THEIR_GPT2, {"scale_attn_weights": False}, "scale_attn_weights=false, but only true"),
        (THEIR_LLAMA, {"attention_bias": True}, "attention_bias=true, but only false"),
        (THEIR_LLAMA, {"rope_scaling": {"type": "yarn"}}, "type=yarn, but only default"),
        (THEIR_LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "rope_type=llama3, but only"),
        (THEIR_LLAMA, {"rope_parameters": {"rope_theta": 5e5}}, "rope_theta=500000.0, but only"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_config_that_gpt_does_not_compute_is_refused(config, changed, message):
    with pytest.raises(UserError, match=r"config.json has") as error:
        from_config_json(config.to_dict() | changed, "config.json")
    assert message in str(error.value)


def test_llama_without_rms_norm_eps_has_another_default_and_is_refused():
    content = THEIR_LLAMA.to_dict()
    del content["rms_norm_eps"]
    with pytest.raises(UserError, match="rms_norm_eps=1e-06, but only 1e-05 can be imported"):
        from_config_json(content, "config.json")


@pytest.mark.parametrize(
    "settings",
    [
        MODERN,
        LLAMA | {"window": [4, None]},
        LLAMA | {"attention_type": "linear"},
        LLAMA | {"logit_softcap": 30.0},
        LLAMA | {"bias": True},
        LLAMA | {"rotary_fraction": 0.5},
        LLAMA | {"rotary_fraction": 1.0, "key_offset": True},
        LLAMA | {"mlp": "relu2"},
        GPT2 | {"n_kv_head": 2},
        GPT2 | {"mlp": "swiglu"},
        GPT2 | {"norm": "rmsnorm"},
    ],
    ids=range(11),
)
def test_other_architecture_has_its_own_class(settings):
    assert find_architecture(GPTConfig(**settings)) == "trilgpt"


@pytest.mark.parametrize(("model_type", "settings"), [("gpt2", GPT2), ("llama", LLAMA)])
def test_architecture_of_transformers_has_its_class_there(model_type, settings):
    """Other programs read it, also with a padded vocabulary."""
    assert find_architecture(GPTConfig(**settings | PADDED)) == model_type
