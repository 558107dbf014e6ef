"""Architectures of transformers that compute the same as a GPT: keys of config.json, and names of weights.

    gpt2     GPT2LMHeadModel    LayerNorm, learned positions, an MLP of two linear layers
    llama    LlamaForCausalLM   RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases

GPT-2's linear layers are Conv1D layers: they always have a bias, and their weights have the shape (in, out).
"""

import re
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from common.settings import format_value
from model.config import GPTConfig
from model.gpt import GPT

CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
# Values of GPTConfig that all architectures need, and that one needs.
PLAIN = {"attention_type": "softmax", "window": None, "qk_norm": False, "max_ngram": 1}
PLAIN |= {"attention_softcap": None, "logit_softcap": None}
SETTINGS = {
    "gpt2": {"norm": "layernorm", "position": "learned"},
    "llama": {"norm": "rmsnorm", "position": "rotary", "bias": False},
}
# {value of model.mlp: activation in config.json}
MLPS = {
    "gpt2": {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu2": "relu2"},
    "llama": {"swiglu": "silu"},
}
# {setting of GPTConfig: key of config.json}
KEYS = {
    "gpt2": {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions",
             "mlp_width": "n_inner", "mlp": "activation_function", "tie_embeddings": "tie_word_embeddings"},
    "llama": {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads",
              "n_embd": "hidden_size", "block_size": "max_position_embeddings", "mlp_width": "intermediate_size",
              "mlp": "hidden_act", "tie_embeddings": "tie_word_embeddings"},
}  # fmt: skip
# Keys of config.json without a setting, and the only values that GPT computes. UNUSED: need not be in config.json.
CONSTANTS = {
    "gpt2": {
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    "llama": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
}
UNUSED = {"quantization_config": None, "rope_type": "default", "type": "default"}
# {our module: their modules}. {} is the layer. Our weight is the concatenation of their weights.
MODULES = {
    "gpt2": {
        "wte": ["transformer.wte"], "wpe": ["transformer.wpe"], "norm": ["transformer.ln_f"], "lm_head": ["lm_head"],
        "norm_attn": ["transformer.h.{}.ln_1"], "norm_mlp": ["transformer.h.{}.ln_2"],
        "attn.qkv": ["transformer.h.{}.attn.c_attn"], "attn.proj": ["transformer.h.{}.attn.c_proj"],
        "mlp.fc": ["transformer.h.{}.mlp.c_fc"], "mlp.proj": ["transformer.h.{}.mlp.c_proj"],
    },
    "llama": {
        "wte": ["model.embed_tokens"], "norm": ["model.norm"], "lm_head": ["lm_head"],
        "norm_attn": ["model.layers.{}.input_layernorm"], "norm_mlp": ["model.layers.{}.post_attention_layernorm"],
        "attn.qkv": [f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"],
        "attn.proj": ["model.layers.{}.self_attn.o_proj"],
        "mlp.fc": ["model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"],
        "mlp.proj": ["model.layers.{}.mlp.down_proj"],
    },
}  # fmt: skip
HEAD = "lm_head.weight"  # has the same name in transformers
VOCAB_WEIGHTS = ("wte.weight", HEAD)  # have one row per token, and rows that pad the vocabulary
BUFFER = re.compile(
    r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$"
)  # of older files: not a weight


def find_architecture(config: GPTConfig, run: str) -> str:
    """The model_type of the architecture that is equal to `config`. Raises UserError; run: its name in the message."""
    missing = {}
    for model_type in CLASSES:
        needed = PLAIN | SETTINGS[model_type]
        if config.mlp not in MLPS[model_type]:
            needed["mlp"] = next(iter(MLPS[model_type]))
        if model_type == "gpt2" and config.kv_heads != config.n_head:
            needed["n_kv_head"] = None
        missing[model_type] = [
            (key, value) for key, value in needed.items() if getattr(config, key) != value
        ]
    closest = min(missing, key=lambda model_type: len(missing[model_type]))
    if missing[closest]:
        settings = " ".join(f"model.{key}={format_value(value)}" for key, value in missing[closest])
        reason = f"{run} has an architecture that transformers does not have"
        raise UserError(f"{reason}; train with model=llama or model=gpt2, or with {settings}")
    return closest


def to_config_json(config: GPTConfig, model_type: str) -> dict[str, Any]:
    """The keys of config.json that determine what the model computes."""
    settings = asdict(config) | {"n_kv_head": config.kv_heads, "mlp_width": config.mlp_channels}
    settings["mlp"] = MLPS[model_type][config.mlp]
    content = {
        "model_type": model_type,
        "architectures": [CLASSES[model_type]],
        **CONSTANTS[model_type],
    }
    content |= {theirs: settings[ours] for ours, theirs in KEYS[model_type].items()}
    return content | (
        {"n_ctx": config.block_size} if model_type == "gpt2" else {}
    )  # llama.cpp reads n_ctx


def from_config_json(content: dict[str, Any], path: str) -> GPTConfig:
    """The architecture that a config.json describes, without dropout. Its name is the model_type.

    Raises UserError if GPT computes something else. path: of the file, for messages.
    """
    model_type = content.get("model_type")
    if model_type not in CLASSES:
        raise UserError(
            f"{path} has model_type={format_value(model_type)}, but only gpt2 and llama can be imported"
        )
    rope = (
        content.get("rope_scaling") or content.get("rope_parameters") or {}
    )  # the latter since transformers 5
    content = {"tie_word_embeddings": model_type == "gpt2", "rms_norm_eps": 1e-6} | content | rope
    mlps, keys = {theirs: ours for ours, theirs in MLPS[model_type].items()}, KEYS[model_type]
    allowed = {key: [value] for key, value in (CONSTANTS[model_type] | UNUSED).items()} | {
        keys["mlp"]: list(mlps)
    }
    for key, values in allowed.items():
        if content.setdefault(key, values[0]) not in values:
            only = " or ".join(map(format_value, values))
            raise UserError(
                f"{path} has {key}={format_value(content[key])}, but only {only} can be imported"
            )
    settings = {ours: content.get(theirs) for ours, theirs in keys.items()}
    settings["mlp"] = mlps[settings["mlp"]]
    return GPTConfig(**{"bias": True} | PLAIN | SETTINGS[model_type] | settings, name=model_type)


def list_names(name: str, model_type: str) -> list[str]:
    """List the names in transformers: blocks.0.attn.proj.bias is [transformer.h.0.attn.c_proj.bias]."""
    _, layer, module, parameter = re.fullmatch(r"(blocks\.(\d+)\.)?(.+)\.(\w+)", name).groups()
    return [f"{theirs.format(layer)}.{parameter}" for theirs in MODULES[model_type][module]]


def export_weights(
    weights: dict[str, Tensor], config: GPTConfig, model_type: str, vocab_size: int
) -> dict[str, Tensor]:
    """Convert a GPT's weights to the names and shapes of transformers, without padding rows."""
    exported = {}
    for name, weight in weights.items():
        if name == HEAD and config.tie_embeddings:
            continue
        weight = weight[:vocab_size] if name in VOCAB_WEIGHTS else weight
        theirs = list_names(name, model_type)
        rows = [len(weight) // len(theirs)] * len(theirs)
        if len(theirs) == 3:  # queries, keys and values
            rows = [
                heads * config.head_dim
                for heads in (config.n_head, config.kv_heads, config.kv_heads)
            ]
        for their_name, part in zip(theirs, weight.split(rows), strict=True):
            exported[their_name] = (
                part.T if _is_conv1d(name, part, model_type) else part
            ).contiguous()
            if model_type == "gpt2" and not config.bias and name.startswith(("blocks.", "norm.")):
                exported[their_name.removesuffix("weight") + "bias"] = torch.zeros(len(part))
    return exported


def import_weights(
    tensors: dict[str, Tensor], config: GPTConfig, vocab_size: int, path: str
) -> dict[str, Tensor]:
    """Convert weights of transformers to the state_dict of a GPT, in float32. config: from from_config_json.

    Raises an error if weights are missing, or if the GPT would not use all of them. path: of the file, for messages.
    """
    if "wte.weight" in tensors:  # OpenAI's own files lack the prefix
        tensors = {
            name if name == HEAD else f"transformer.{name}": tensor
            for name, tensor in tensors.items()
        }
    if config.n_layer > len(tensors):  # building a model of 9,999 layers takes minutes
        raise ValueError(f"it has {len(tensors)} tensors, too few for {config.n_layer:,} layers")
    with torch.device("meta"):
        state = GPT(config, vocab_size).state_dict()
    used = {their_name for name in state for their_name in list_names(name, config.name)}
    unused = [name for name in tensors if name not in used and not BUFFER.search(name)]
    if unused:
        raise UserError(
            f"{path} has weights that the model does not use: {', '.join(unused[:3])}; set another folder"
        )
    embedding = tensors[list_names("wte.weight", config.name)[0]]
    if config.tie_embeddings and not torch.equal(tensors.get(HEAD, embedding), embedding):
        reason = f"{path} has an {HEAD} that differs from the embedding, but config.json ties them"
        raise UserError(f"{reason}; set tie_word_embeddings to false in config.json")
    weights = {}
    for name, expected in state.items():
        source = "wte.weight" if name == HEAD and config.tie_embeddings else name
        parts = [tensors[their_name] for their_name in list_names(source, config.name)]
        weight = torch.cat(
            [part.T if _is_conv1d(name, part, config.name) else part for part in parts]
        ).float()
        weights[name] = weight[:vocab_size] if name in VOCAB_WEIGHTS else weight
        if weights[name].shape != expected.shape:
            raise ValueError(
                f"{name} has the shape {tuple(weight.shape)} instead of {tuple(expected.shape)}"
            )
    return weights


def _is_conv1d(name: str, weight: Tensor, model_type: str) -> bool:
    """Whether the weight has the shape (in, out) in transformers."""
    return model_type == "gpt2" and name.startswith("blocks.") and weight.ndim == 2
