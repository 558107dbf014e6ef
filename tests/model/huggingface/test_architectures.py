"""config.json and weights for transformers: equal logits, exact round trips, and models that cannot be converted."""

import json

import pytest
import torch
import transformers
from model_helpers import GPT2, LLAMA, MODERN, make_model, random_tokens

from common.errors import UserError
from model import GPTConfig
from model.attention import naive
from model.gpt import GPT
from model.huggingface.architectures import (
    export_weights,
    find_architecture,
    from_config_json,
    import_weights,
    to_config_json,
)

EXPORTABLE = [
    GPT2,
    GPT2 | {"mlp": "gelu", "bias": False, "pad_vocab_multiple": 64, "mlp_width": 48},
    GPT2 | {"mlp": "relu2", "tie_embeddings": False, "pad_vocab_multiple": 64},
    LLAMA,
    LLAMA | {"tie_embeddings": True, "n_kv_head": None, "mlp_width": 40},
]
V = 50  # vocabulary


def load_in_transformers(content: dict, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    content = {"vocab_size": V, "bos_token_id": None, "eos_token_id": None} | json.loads(json.dumps(content))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**content))
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    return model.eval()


def load_here(config: transformers.PretrainedConfig, tensors: dict[str, torch.Tensor]) -> GPT:
    ours = from_config_json(config.to_dict(), "config.json")
    return GPT(ours, V, naive, weights=import_weights(tensors, ours, V)).eval()


@torch.no_grad()
@pytest.mark.parametrize("settings", EXPORTABLE)
def test_exported_model_has_the_same_logits_in_transformers_and_returns_unchanged(settings):
    model = make_model(settings, V).eval()
    for p in model.parameters():  # also biases and norms
        torch.nn.init.normal_(p, std=0.3)
    model_type = find_architecture(model.config, "run")
    content = to_config_json(model.config, model_type)
    tensors = export_weights(model.state_dict(), model.config, model_type, V)
    exported = load_in_transformers(content, tensors)
    assert [type(exported).__name__] == content["architectures"]
    torch.testing.assert_close(exported(random_tokens()).logits, model(random_tokens()), atol=1e-5, rtol=1e-5)

    config = from_config_json(content, "config.json")
    weights = import_weights(tensors, config, V)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight[:V] if "wte" in name or "lm_head" in name else weight, weights[name]), name
    same = ("mlp", "mlp_channels", "kv_heads", "tie_embeddings", "norm", "position", "block_size")
    assert [getattr(config, key) for key in same] == [getattr(model.config, key) for key in same]


@torch.no_grad()
@pytest.mark.parametrize("prefix", ["transformer.", ""])  # OpenAI's files have no prefix, and contain the causal mask
def test_gpt2_of_transformers_has_the_same_logits_here(prefix):
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=24, vocab_size=V)
    ).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    tensors = {name.replace("transformer.", prefix): tensor for name, tensor in theirs.state_dict().items()}
    tensors[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    logits = load_here(theirs.config, tensors)(random_tokens())
    torch.testing.assert_close(logits, theirs(random_tokens()).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_llama_of_transformers_has_the_same_logits_here():
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=40,
        max_position_embeddings=24, vocab_size=V, rms_norm_eps=1e-5,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    logits = load_here(config, theirs.state_dict())(random_tokens())
    torch.testing.assert_close(logits, theirs(random_tokens()).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (MODERN, "model=llama or model=gpt2, or set model.qk_norm=false model.max_ngram=1 model.mlp=swiglu"),
        (LLAMA | {"window": [4, None]}, "model.window=null"),
        (LLAMA | {"bias": True}, "model.bias=false"),
        (GPT2 | {"n_kv_head": 2}, "model.n_kv_head=null"),
        (GPT2 | {"mlp": "swiglu"}, "model.mlp=gelu_tanh"),
    ],
)
def test_other_architectures_are_refused_with_the_settings_to_change(settings, advice):
    with pytest.raises(UserError, match="runs/a") as error:
        find_architecture(GPTConfig(**settings), "runs/a")
    assert str(error.value).endswith(advice)
