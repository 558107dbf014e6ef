"""config.json and tensors for transformers: equal logits, exact round trips, and errors."""

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
    ARCHITECTURES,
    export_weights,
    find_architecture,
    from_config_json,
    import_weights,
    to_config_json,
)

ARCEE = MODERN | {"qk_norm": False, "max_ngram": 1}
EXPORTABLE = [
    GPT2,
    GPT2 | {"mlp": "gelu", "bias": False, "pad_vocab_multiple": 64, "mlp_width": 48},
    GPT2 | {"mlp": "relu2", "tie_embeddings": False, "pad_vocab_multiple": 64},
    LLAMA,
    LLAMA | {"bias": True, "tie_embeddings": True, "n_kv_head": None, "mlp_width": 40},
    ARCEE,
    ARCEE | {"mlp": "gelu", "bias": True, "n_kv_head": 1},
]
V = 50  # vocabulary


def random_gpt(settings: dict) -> GPT:
    """A model whose parameters, including biases and norms, are all random and large enough to matter."""
    model = make_model(settings, V)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model.eval()


def load_in_transformers(content: dict, tensors: dict | None) -> torch.nn.Module:
    """The model that transformers builds from a config.json and tensors; without tensors, on the meta device."""
    content = {"vocab_size": V, "bos_token_id": None, "eos_token_id": None} | json.loads(json.dumps(content))
    config = transformers.AutoConfig.for_model(**content)
    with torch.device("cpu" if tensors else "meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    if tensors:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        assert not unexpected and set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("settings", EXPORTABLE)
def test_exported_model_has_the_same_logits_in_transformers_and_returns_unchanged(settings):
    model = random_gpt(settings)
    model_type = find_architecture(model.config, "run")
    content = to_config_json(model.config, model_type)
    tensors = export_weights(model.state_dict(), model.config, model_type, V)
    exported = load_in_transformers(content, tensors)
    assert type(exported).__name__ == ARCHITECTURES[model_type].class_name
    torch.testing.assert_close(exported(random_tokens()).logits, model(random_tokens()), atol=1e-5, rtol=1e-5)

    config = from_config_json(content, "config.json")
    weights = import_weights(tensors, config, V, "model.safetensors")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight[:V] if "wte" in name or "lm_head" in name else weight, weights[name]), name
    same = ("bias", "mlp", "mlp_channels", "kv_heads", "tie_embeddings", "norm", "position", "block_size")
    assert [getattr(config, key) for key in same] == [getattr(model.config, key) for key in same]


NOT_EXPORTABLE = [
    (MODERN, "ArceeForCausalLM, with model.qk_norm=false model.max_ngram=1"),
    (LLAMA | {"window": [4, None]}, "LlamaForCausalLM, with model.window=null"),
    (
        LLAMA | {"mixer": ["linear", "softmax"], "logit_softcap": 30.0},
        "with model.mixer=softmax model.logit_softcap=null",
    ),
    (GPT2 | {"n_kv_head": 2}, "GPT2LMHeadModel, with model.n_kv_head=null"),
    (GPT2 | {"mlp": "swiglu"}, "with model.mlp=gelu_tanh"),
]


@pytest.mark.parametrize(("settings", "message"), NOT_EXPORTABLE, ids=[message for _, message in NOT_EXPORTABLE])
def test_other_architectures_are_refused_with_the_settings_to_change(settings, message):
    with pytest.raises(UserError) as error:
        find_architecture(GPTConfig(**settings), "runs/a")
    assert "runs/a has an architecture that transformers does not have" in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_all_sizes_of_gpt2_are_imported(name):
    sizes = {
        "gpt2": (12, 12, 768),
        "gpt2-medium": (24, 16, 1024),
        "gpt2-large": (36, 20, 1280),
        "gpt2-xl": (48, 25, 1600),
    }
    n_layer, n_head, n_embd = sizes[name]
    # the keys of OpenAI's config.json
    content = {"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
               "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
               "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": n_embd, "n_head": n_head,
               "n_layer": n_layer, "n_positions": 1024, "resid_pdrop": 0.1, "vocab_size": 50257}  # fmt: skip
    config = from_config_json(content, "config.json")
    theirs = load_in_transformers(content, None)
    # OpenAI's files have no prefix, and contain the causal mask
    tensors = {
        name.removeprefix("transformer."): p for name, p in theirs.state_dict().items() if name != "lm_head.weight"
    }
    tensors |= {f"h.{i}.attn.bias": torch.empty(1, 1, 1024, 1024, device="meta") for i in range(n_layer)}
    weights = import_weights(tensors, config, 50257, "model.safetensors")
    model = GPT(config, 50257, naive, device="meta", weights=weights)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in theirs.parameters())


@torch.no_grad()
def test_weights_of_transformers_have_the_same_logits_here():
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=24, vocab_size=V)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    ours = from_config_json(config.to_dict(), "config.json")
    weights = import_weights(theirs.state_dict(), ours, V, "model.safetensors")
    logits = GPT(ours, V, naive, weights=weights).eval()(random_tokens())
    torch.testing.assert_close(logits, theirs(random_tokens()).logits, atol=1e-5, rtol=1e-5)


NOT_IMPORTABLE = [
    ({"model_type": "mistral"}, "model_type=mistral, but only gpt2, llama, arcee can be imported"),
    ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06, but only 1e-05 can be imported"),
    ({"rope_theta": 5e5}, "rope_theta=500000.0, but only 10000.0"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_scaling={rope_type:linear"),
    ({"head_dim": 5}, "head_dim=5, but only 8"),
    ({"hidden_act": "gelu"}, "hidden_act=gelu, but only silu"),
    ({"mlp_bias": True}, "mlp_bias=true, but only false"),
    ({"hidden_size": None}, "does not describe a model: hidden_size=None"),
    ({"num_hidden_layers": 2.0}, "does not describe a model: num_hidden_layers=2.0"),
    ({"tie_word_embeddings": "false"}, "does not describe a model: tie_word_embeddings='false'"),
    ({"rope_scaling": "linear"}, "rope_scaling={rope_type:linear}, but only null"),
    ({"num_attention_heads": 5}, "does not describe a model: model.n_embd=32 must be a multiple"),
]


@pytest.mark.parametrize(("changed", "message"), NOT_IMPORTABLE, ids=[message for _, message in NOT_IMPORTABLE])
def test_other_models_are_not_imported(changed, message):
    content = to_config_json(GPTConfig(**LLAMA), "llama") | changed
    with pytest.raises(UserError, match=r"config\.json") as error:
        from_config_json(content, "config.json")
    assert message in str(error.value)


def test_missing_keys_and_tensors_and_wrong_shapes_are_reported():
    model = make_model(LLAMA, V)
    content, tensors = (
        to_config_json(model.config, "llama"),
        export_weights(model.state_dict(), model.config, "llama", V),
    )
    with pytest.raises(UserError, match=r"c\.json has no key num_hidden_layers; copy"):
        from_config_json({k: v for k, v in content.items() if k != "num_hidden_layers"}, "c.json")
    config, key = from_config_json(content, "c.json"), "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(UserError, match=f"m.safetensors has no tensor {key}; copy"):
        import_weights({k: v for k, v in tensors.items() if k != key}, config, V, "m.safetensors")
    with pytest.raises(
        UserError, match=rf"{key} in m.safetensors has the shape \(2, 3\), which does not fit config.json"
    ):
        import_weights(tensors | {key: torch.zeros(2, 3)}, config, V, "m.safetensors")
