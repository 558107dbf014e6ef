"""Architectures of transformers that compute the same as a GPT: config.json and the weights.

    gpt2     LayerNorm, learned positions, an MLP of two linear layers
    llama    RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases
    trilgpt  all others: the class of modeling_trilgpt.py, a copy of which is in the folder

GPT-2's linear layers are Conv1D layers: they always have a bias, and the shape of their weights
is (in, out). The name of an imported GPTConfig is its model_type.
"""

import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from common.settings import format_value
from model.config import GPTConfig
from model.gpt import GPT


@dataclass(frozen=True)
class Architecture:
    """A class of transformers, and how it differs from GPT.

    settings: settings of GPTConfig that it needs, beside PLAIN.
    mlps: {model.mlp: activation in config.json}. The first one is the default of transformers.
    keys: {setting of GPTConfig: key of config.json}.
    constants: keys of config.json without a setting, with the only value that GPT computes.
    modules: {our module: their modules}. {} is the layer. Our weight is the concatenation of
        their weights.
    """

    class_name: str
    settings: dict[str, Any]
    mlps: dict[str, str]
    keys: dict[str, str]
    constants: dict[str, Any]
    modules: dict[str, list[str]]


ARCHITECTURES = {
    "gpt2": Architecture(
        class_name="GPT2LMHeadModel",
        settings={"norm": "layernorm", "position": "learned"},
        mlps={"gelu_tanh": "gelu_new", "gelu": "gelu", "relu2": "relu2"},
        keys={
            "n_layer": "n_layer",
            "n_head": "n_head",
            "n_embd": "n_embd",
            "block_size": "n_positions",
            "mlp_width": "n_inner",
            "mlp": "activation_function",
            "tie_embeddings": "tie_word_embeddings",
        },
        constants={
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
        modules={
            "wte": ["transformer.wte"],
            "wpe": ["transformer.wpe"],
            "norm_attn": ["transformer.h.{}.ln_1"],
            "attn.qkv": ["transformer.h.{}.attn.c_attn"],
            "attn.proj": ["transformer.h.{}.attn.c_proj"],
            "norm_mlp": ["transformer.h.{}.ln_2"],
            "mlp.fc": ["transformer.h.{}.mlp.c_fc"],
            "mlp.proj": ["transformer.h.{}.mlp.c_proj"],
            "norm": ["transformer.ln_f"],
            "lm_head": ["lm_head"],
        },
    ),
    "llama": Architecture(
        class_name="LlamaForCausalLM",
        settings={"norm": "rmsnorm", "position": "rotary", "bias": False},
        mlps={"swiglu": "silu"},
        keys={
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_kv_head": "num_key_value_heads",
            "n_embd": "hidden_size",
            "block_size": "max_position_embeddings",
            "mlp_width": "intermediate_size",
            "mlp": "hidden_act",
            "tie_embeddings": "tie_word_embeddings",
        },
        constants={
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "attention_bias": False,
            "mlp_bias": False,
        },
        modules={
            "wte": ["model.embed_tokens"],
            "norm_attn": ["model.layers.{}.input_layernorm"],
            "attn.qkv": [
                "model.layers.{}.self_attn.q_proj",
                "model.layers.{}.self_attn.k_proj",
                "model.layers.{}.self_attn.v_proj",
            ],
            "attn.proj": ["model.layers.{}.self_attn.o_proj"],
            "norm_mlp": ["model.layers.{}.post_attention_layernorm"],
            "mlp.fc": ["model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"],
            "mlp.proj": ["model.layers.{}.mlp.down_proj"],
            "norm": ["model.norm"],
            "lm_head": ["lm_head"],
        },
    ),
}
# Settings of GPTConfig that gpt2 and llama need.
PLAIN = {
    "attention_type": "softmax",
    "window": None,
    "qk_norm": False,
    "key_offset": False,
    "max_ngram": 1,
    "attention_softcap": None,
    "logit_softcap": None,
}
# More keys of exported config.json files, and the settings of GPTConfig that they have.
EXPORTED_KEYS = {
    "gpt2": {
        "n_ctx": "block_size",  # for llama.cpp
        # for training in transformers, whose default is 0.1
        "attn_pdrop": "dropout",
        "embd_pdrop": "dropout",
        "resid_pdrop": "dropout",
    },
    "llama": {"attention_dropout": "dropout"},
}
MODULE = "modeling_trilgpt"
TRILGPT = {
    "model_type": "trilgpt",
    "architectures": ["TrilGPTForCausalLM"],
    "auto_map": {
        "AutoConfig": f"{MODULE}.TrilGPTConfig",
        "AutoModelForCausalLM": f"{MODULE}.TrilGPTForCausalLM",
    },
}
# The kind of rotary positions, which config.json need not contain. GPT computes no other kind.
ROPE_TYPE = {"rope_type": "default", "type": "default"}
HEAD = "lm_head.weight"  # has the same name in transformers
VOCAB_WEIGHTS = ("wte.weight", HEAD)  # one row per token, and rows that pad the vocabulary
# Buffers in older files, which are not weights.
BUFFER = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")


def find_architecture(config: GPTConfig) -> str:
    """Find the architecture that computes the same as `config`. Returns its model_type."""
    model_type = "gpt2" if config.position == "learned" else "llama"
    architecture = ARCHITECTURES[model_type]
    needed = PLAIN | architecture.settings
    is_equal = all(getattr(config, key) == value for key, value in needed.items())
    # GPT-2 has no grouped-query attention
    has_heads = model_type == "llama" or config.kv_heads == config.n_head
    # Llama rotates all channels
    has_positions = model_type == "gpt2" or config.rotary_channels == config.head_dim
    if is_equal and has_heads and has_positions and config.mlp in architecture.mlps:
        return model_type
    return "trilgpt"


def to_config_json(config: GPTConfig, model_type: str) -> dict[str, Any]:
    """The keys of config.json that determine what the model computes."""
    settings = asdict(config) | {"n_kv_head": config.kv_heads, "mlp_width": config.mlp_channels}
    if model_type == "trilgpt":
        del settings["name"], settings["pad_vocab_multiple"]  # the weights have no padding rows
        derived = {"settings": list(settings), "rotary_channels": config.rotary_channels}
        return settings | TRILGPT | derived
    architecture = ARCHITECTURES[model_type]
    settings["mlp"] = architecture.mlps[config.mlp]
    return {
        "model_type": model_type,
        "architectures": [architecture.class_name],
        **architecture.constants,
        **{theirs: settings[ours] for ours, theirs in architecture.keys.items()},
        **{theirs: settings[ours] for theirs, ours in EXPORTED_KEYS[model_type].items()},
    }


def from_config_json(content: dict[str, Any], path: str) -> GPTConfig:
    """The architecture that a config.json describes. Only trilgpt keeps its dropout.

    path: of the file, for messages.
    Raises UserError or KeyError if GPT computes something else.
    """
    model_type = content.get("model_type")
    if model_type == "trilgpt":
        settings = {key: content[key] for key in content["settings"]}
        return GPTConfig.from_saved(settings | {"name": model_type})
    if model_type not in ARCHITECTURES:
        raise UserError(
            f"{path} has model_type={format_value(model_type)}, "
            "but only gpt2, llama and trilgpt can be imported"
        )
    architecture = ARCHITECTURES[model_type]
    mlps = {theirs: ours for ours, theirs in architecture.mlps.items()}
    # rope_parameters: since transformers 5.
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    # transformers leaves out keys with its default values. Most of them are equal to ours.
    defaults = {"tie_word_embeddings": model_type == "gpt2", "rms_norm_eps": 1e-6}
    constants = architecture.constants | ROPE_TYPE
    content = constants | defaults | content | rope
    for key, value in constants.items():
        if content[key] != value:
            raise UserError(
                f"{path} has {key}={format_value(content[key])}, "
                f"but only {format_value(value)} can be imported"
            )
    activation = content.get(architecture.keys["mlp"], next(iter(mlps)))
    settings = {ours: content.get(theirs) for ours, theirs in architecture.keys.items()}
    settings |= {"name": model_type, "mlp": mlps[activation]}
    return GPTConfig(**({"bias": True} | PLAIN | architecture.settings | settings))


def list_names(name: str, model_type: str) -> list[str]:
    """The names of a weight in transformers.

    blocks.0.attn.proj.bias of a GPT-2 is [transformer.h.0.attn.c_proj.bias].
    """
    if model_type == "trilgpt":
        return [name]
    _, layer, module, parameter = re.fullmatch(r"(blocks\.(\d+)\.)?(.+)\.(\w+)", name).groups()
    modules = ARCHITECTURES[model_type].modules[module]
    return [f"{theirs.format(layer)}.{parameter}" for theirs in modules]


def export_weights(
    weights: dict[str, Tensor], config: GPTConfig, model_type: str, vocab_size: int
) -> dict[str, Tensor]:
    """Convert a GPT's weights to the names and shapes of transformers, without padding rows."""
    needs_bias = model_type == "gpt2" and not config.bias
    kv_rows = config.kv_heads * config.head_dim
    exported = {}
    for name, weight in weights.items():
        if name == HEAD and config.tie_embeddings:
            continue
        if name in VOCAB_WEIGHTS:
            weight = weight[:vocab_size]
        their_names = list_names(name, model_type)
        parts = weight.chunk(len(their_names))
        if len(their_names) == 3:  # queries, keys and values
            parts = weight.split([config.n_embd, kv_rows, kv_rows])
        for their_name, part in zip(their_names, parts, strict=True):
            exported[their_name] = _transpose_conv1d(name, part, model_type).contiguous()
            if needs_bias and name.startswith(("blocks.", "norm.")):
                exported[their_name.removesuffix("weight") + "bias"] = torch.zeros(len(part))
    return exported


def import_weights(
    tensors: dict[str, Tensor], config: GPTConfig, vocab_size: int, path: str
) -> dict[str, Tensor]:
    """Convert weights of transformers to the state_dict of a GPT, in float32.

    config: result of from_config_json.
    path: of the file, for messages.
    Raises an error if weights are missing, or if the GPT would not use all of them.
    """
    # OpenAI's own files lack the prefix
    prefix = "transformer." if config.name == "gpt2" and "wte.weight" in tensors else ""
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    if config.tie_embeddings:
        (embedding,) = list_names("wte.weight", config.name)
        tensors[HEAD] = tensors[embedding]  # as in transformers, the file's head has no effect
    with torch.device("meta"):
        state = GPT(config, vocab_size).state_dict()
    weights = {}
    for name, expected in state.items():
        parts = [tensors.pop(their_name) for their_name in list_names(name, config.name)]
        weight = torch.cat([_transpose_conv1d(name, part, config.name) for part in parts]).float()
        if name in VOCAB_WEIGHTS:
            weight = weight[:vocab_size]
        if weight.shape != expected.shape:
            raise ValueError(
                f"{name} has the shape {tuple(weight.shape)} instead of {tuple(expected.shape)}"
            )
        weights[name] = weight
    unused = [name for name in tensors if not BUFFER.search(name)]
    if unused:
        raise UserError(
            f"{path} has weights that the model does not use: {', '.join(unused[:3])}; "
            "set another folder"
        )
    return weights


def _transpose_conv1d(name: str, weight: Tensor, model_type: str) -> Tensor:
    """Convert a weight between (out, in) and the (in, out) of Conv1D. Others are unchanged."""
    is_conv1d = model_type == "gpt2" and name.startswith("blocks.") and weight.ndim == 2
    return weight.T if is_conv1d else weight
