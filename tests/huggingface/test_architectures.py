"""config.json and weights for transformers: equal logits, exact round trips, and models that cannot be converted."""

import json

import pytest
import torch
import transformers
from model_helpers import GPT2, LLAMA, MODERN, make_model, random_tokens
from safetensors.torch import save_file

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

EXPORTABLE = [
    GPT2,
    GPT2 | {"mlp": "gelu", "bias": False, "pad_vocab_multiple": 64, "mlp_width": 48},
    GPT2 | {"mlp": "relu2", "tie_embeddings": False, "pad_vocab_multiple": 64},
    LLAMA,
    LLAMA | {"tie_embeddings": True, "n_kv_head": None, "mlp_width": 40},
]
V = 50  # vocabulary


def load_in_transformers(content: dict, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    content = {"vocab_size": V, "bos_token_id": None, "eos_token_id": None} | json.loads(
        json.dumps(content)
    )
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**content)
    )
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= (
        {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    )
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
    gradients = export_weights(
        {name: p.grad for name, p in model.named_parameters()}, model.config, model_type, V
    )
    for name, p in exported.named_parameters():
        if model.config.bias or not name.endswith(
            "bias"
        ):  # GPT-2 of transformers always has biases
            torch.testing.assert_close(gradients[name], p.grad, atol=1e-5, rtol=1e-3)

    config = from_config_json(content, "config.json")
    weights = import_weights(tensors, config, V, "file")
    for name, weight in model.state_dict().items():
        assert torch.equal(
            weight[:V] if "wte" in name or "lm_head" in name else weight, weights[name]
        ), name
    same = ("mlp", "mlp_channels", "kv_heads", "tie_embeddings", "norm", "position", "block_size")
    assert [getattr(config, key) for key in same] == [getattr(model.config, key) for key in same]


THEIR_GPT2 = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=24, vocab_size=V)
THEIR_LLAMA = transformers.LlamaConfig(
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=40,
    max_position_embeddings=24, vocab_size=V, rms_norm_eps=1e-5,
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(
    ("config", "prefix"), [(THEIR_GPT2, "transformer."), (THEIR_GPT2, ""), (THEIR_LLAMA, "")]
)
def test_model_of_transformers_has_the_same_logits_here(config, prefix):
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    tensors = {
        name.replace("transformer.", prefix): tensor for name, tensor in theirs.state_dict().items()
    }
    # Buffers of older files, such as the causal mask. OpenAI's files have no prefix.
    tensors[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    tensors[f"{prefix}h.0.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    ours = from_config_json(config.to_dict(), "config.json")
    model = model_from_weights(ours, V, naive, import_weights(tensors, ours, V, "file")).eval()
    torch.testing.assert_close(
        model(random_tokens()), theirs(random_tokens()).logits, atol=1e-5, rtol=1e-5
    )


@torch.no_grad()
def test_head_that_differs_from_the_embedding_is_refused_or_imported_untied(tmp_path):
    """transformers unties such a head. The message names the setting that gives its logits."""
    tied = transformers.AutoModelForCausalLM.from_config(THEIR_GPT2)
    tensors = tied.state_dict() | {"lm_head.weight": torch.randn(V, 32)}
    content = THEIR_GPT2.to_dict()
    ours = from_config_json(content, "config.json")
    with pytest.raises(
        UserError, match=r"a/file has .*lm_head.weight.*set tie_word_embeddings to false"
    ):
        import_weights(tensors, ours, V, "a/file")
    untied = from_config_json(content | {"tie_word_embeddings": False}, "config.json")
    model = model_from_weights(
        untied, V, naive, import_weights(tensors, untied, V, "a/file")
    ).eval()
    THEIR_GPT2.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(
        model(random_tokens()), theirs(random_tokens()).logits, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (THEIR_LLAMA, "model.layers.1.self_attn.q_proj.bias"),
        (THEIR_LLAMA, "model.layers.2.mlp.up_proj.weight"),  # a third layer
        (THEIR_GPT2, "transformer.h.0.attn.c_attn.lora_A.weight"),
    ],
)
def test_weights_that_the_model_does_not_use_are_refused(config, name):
    tensors = transformers.AutoModelForCausalLM.from_config(config).state_dict() | {
        name: torch.ones(32)
    }
    with pytest.raises(UserError, match=f"a/file has .*: {name}; set"):
        import_weights(tensors, from_config_json(config.to_dict(), "config.json"), V, "a/file")


def test_llama_without_rms_norm_eps_has_the_default_of_transformers_and_is_refused():
    content = {key: value for key, value in THEIR_LLAMA.to_dict().items() if key != "rms_norm_eps"}
    with pytest.raises(
        UserError, match=r"config.json has rms_norm_eps=1e-06, but only 1e-05 can be imported"
    ):
        from_config_json(content, "config.json")


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (
            MODERN,
            "model=llama or model=gpt2, or with model.qk_norm=false model.max_ngram=1 model.mlp=swiglu",
        ),
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
