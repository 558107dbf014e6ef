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


@pytest.mark.parametrize("settings", EXPORTABLE)
def test_exported_model_computes_the_same_in_transformers_and_returns_unchanged(settings):
    """Compares logits, loss and gradients."""
    model = make_model(settings, V)
    for p in model.parameters():  # also biases and norms
        torch.nn.init.normal_(p, std=0.3)
    model_type = find_architecture(model.config, "run")
    content = to_config_json(model.config, model_type)
    tensors = export_weights(model.state_dict(), model.config, model_type, V)
    exported, tokens = load_in_transformers(content, tensors), random_tokens()
    assert [type(exported).__name__] == content["architectures"]
    expected = exported(tokens, labels=tokens)
    torch.testing.assert_close(model(tokens), expected.logits, atol=1e-5, rtol=1e-5)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, expected.loss, atol=1e-5, rtol=1e-5)
    loss.backward()
    expected.loss.backward()
    gradients = export_weights({name: p.grad for name, p in model.named_parameters()}, model.config, model_type, V)
    for name, p in exported.named_parameters():
        if model.config.bias or not name.endswith("bias"):  # GPT-2 of transformers always has biases
            torch.testing.assert_close(gradients[name], p.grad, atol=1e-5, rtol=1e-3)

    config = from_config_json(content, "config.json")
    weights = import_weights(tensors, config, V)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight[:V] if "wte" in name or "lm_head" in name else weight, weights[name]), name
    same = ("mlp", "mlp_channels", "kv_heads", "tie_embeddings", "norm", "position", "block_size")
    assert [getattr(config, key) for key in same] == [getattr(model.config, key) for key in same]


THEIR_GPT2 = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=24, vocab_size=V)
THEIR_LLAMA = transformers.LlamaConfig(
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=40,
    max_position_embeddings=24, vocab_size=V, rms_norm_eps=1e-5,
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(("config", "prefix"), [(THEIR_GPT2, "transformer."), (THEIR_GPT2, ""), (THEIR_LLAMA, "")])
def test_model_of_transformers_has_the_same_logits_here(config, prefix):
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    tensors = {name.replace("transformer.", prefix): tensor for name, tensor in theirs.state_dict().items()}
    tensors[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 24, 24)  # OpenAI's files have the causal mask, and no prefix
    ours = from_config_json(config.to_dict(), "config.json")
    model = GPT(ours, V, naive, weights=import_weights(tensors, ours, V)).eval()
    torch.testing.assert_close(model(random_tokens()), theirs(random_tokens()).logits, atol=1e-5, rtol=1e-5)


def test_llama_without_rms_norm_eps_has_the_default_of_transformers_and_is_refused():
    content = {key: value for key, value in THEIR_LLAMA.to_dict().items() if key != "rms_norm_eps"}
    with pytest.raises(UserError, match=r"config.json has rms_norm_eps=1e-06, but only 1e-05 can be imported"):
        from_config_json(content, "config.json")


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (MODERN, "model=llama or model=gpt2, or with model.qk_norm=false model.max_ngram=1 model.mlp=swiglu"),
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
