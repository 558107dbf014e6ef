"""Architectures of transformers that compute exactly what a GPTConfig describes: their config.json and tensor names.

    gpt2     GPT2LMHeadModel    LayerNorm, learned positions, an MLP of two linear layers
    llama    LlamaForCausalLM   RMSNorm, rotary positions, SwiGLU, grouped-query attention
    arcee    ArceeForCausalLM   as llama, with an MLP of two linear layers

Traps: GPT-2's linear weights have the shape (in, out), because its layers are Conv1D. Its layers always have biases.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError, format_value
from model.config import GPTConfig
from model.gpt import GPT

# Values of GPTConfig that all architectures need.
PLAIN = dict(mixer="softmax", window=None, qk_norm=False, attention_softcap=None, logit_softcap=None, max_ngram=1)
# Values of GPTConfig that config.json does not contain.
UNUSED = PLAIN | dict(n_kv_head=None, dropout=0.0, pad_vocab_multiple=1, ngram_table_size=1)
# Types in config.json of settings that are not int.
INT_OR_NULL = (int, type(None))
SETTING_TYPES = dict(n_kv_head=INT_OR_NULL, mlp_width=INT_OR_NULL, mlp=(str,), bias=(bool,), tie_embeddings=(bool,))
CONV1D = re.compile(r"\.c_(attn|proj|fc)$")  # layers of GPT-2 whose weight has the shape (in, out)
PREFIX = "transformer."  # of the names in GPT-2 folders, but not in those that OpenAI published


@dataclass(frozen=True)
class Architecture:
    """An architecture of transformers.

    needs: values of GPTConfig. mlp: {value of model.mlp: activation in config.json}.
    keys: {setting: key in config.json}. defaults: values of keys that config.json may lack.
    modules: {our module: their modules}. The rows of their weights, one after the other, are our weight. {} stands for
        the number of the layer.
    """

    class_name: str
    needs: dict[str, Any]
    mlp: dict[str, str]
    keys: dict[str, str]
    defaults: dict[str, Any]
    modules: dict[str, list[str]]

    def list_differences(self, config: GPTConfig) -> list[str]:
        """The settings that a model with this architecture would need, as on the command line."""
        different = []
        for key, needed in (PLAIN | self.needs).items():
            value = getattr(config, key)
            if any(item != needed for item in (value if isinstance(value, list) else [value])):
                different.append(f"model.{key}={format_value(needed)}")
        if config.mlp not in self.mlp:
            different.append(f"model.mlp={next(iter(self.mlp))}")
        if "n_kv_head" not in self.keys and config.kv_heads != config.n_head:
            different.append("model.n_kv_head=null")
        return different

    def find_modules(self, module: str) -> list[str]:
        """Their modules for a module of GPT, such as blocks.0.attn.qkv."""
        layer = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
        return [name.format(layer[1]) for name in self.modules[layer[2]]] if layer else self.modules[module]


def _llama(class_name: str, mlp: dict[str, str], mlp_inputs: list[str]) -> Architecture:
    layer = "model.layers.{}"
    return Architecture(
        class_name,
        needs={"norm": "rmsnorm", "position": "rotary"},
        mlp=mlp,
        keys={"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads",
              "n_embd": "hidden_size", "block_size": "max_position_embeddings", "mlp_width": "intermediate_size",
              "mlp": "hidden_act", "bias": "attention_bias", "tie_embeddings": "tie_word_embeddings"},
        defaults={"num_key_value_heads": None, "attention_bias": False, "mlp_bias": False,
                  "hidden_act": next(iter(mlp.values())), "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
                  "tie_word_embeddings": False},
        modules={
            "wte": ["model.embed_tokens"], "norm": ["model.norm"], "lm_head": ["lm_head"],
            "norm_attn": [f"{layer}.input_layernorm"], "norm_mlp": [f"{layer}.post_attention_layernorm"],
            "attn.qkv": [f"{layer}.self_attn.{part}_proj" for part in "qkv"],
            "attn.proj": [f"{layer}.self_attn.o_proj"],
            "mlp.fc": [f"{layer}.mlp.{part}_proj" for part in mlp_inputs],
            "mlp.proj": [f"{layer}.mlp.down_proj"],
        },
    )  # fmt: skip


ARCHITECTURES = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        needs={"norm": "layernorm", "position": "learned"},
        mlp={"gelu_tanh": "gelu_new", "gelu": "gelu", "relu2": "relu2"},
        keys={"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions",
              "mlp_width": "n_inner", "mlp": "activation_function", "tie_embeddings": "tie_word_embeddings",
              "bias": "bias"},  # "bias" is not a key of transformers; false: all biases are zeros
        defaults={"n_inner": None, "activation_function": "gelu_new", "tie_word_embeddings": True, "bias": True},
        modules={
            "wte": [f"{PREFIX}wte"], "wpe": [f"{PREFIX}wpe"], "norm": [f"{PREFIX}ln_f"], "lm_head": ["lm_head"],
            "norm_attn": [f"{PREFIX}h.{{}}.ln_1"], "norm_mlp": [f"{PREFIX}h.{{}}.ln_2"],
            "attn.qkv": [f"{PREFIX}h.{{}}.attn.c_attn"], "attn.proj": [f"{PREFIX}h.{{}}.attn.c_proj"],
            "mlp.fc": [f"{PREFIX}h.{{}}.mlp.c_fc"], "mlp.proj": [f"{PREFIX}h.{{}}.mlp.c_proj"],
        },
    ),
    "llama": _llama("LlamaForCausalLM", {"swiglu": "silu"}, ["gate", "up"]),
    "arcee": _llama("ArceeForCausalLM", {"relu2": "relu2", "gelu": "gelu", "gelu_tanh": "gelu_new"}, ["up"]),
}  # fmt: skip


def find_architecture(config: GPTConfig, run: str) -> str:
    """The model_type of the architecture that is equal to `config`. Raises UserError; run: its name in the message."""
    differences = {model_type: a.list_differences(config) for model_type, a in ARCHITECTURES.items()}
    closest = min(differences, key=lambda model_type: len(differences[model_type]))
    if differences[closest]:
        raise UserError(
            f"{run} has an architecture that transformers does not have; train a model for "
            f"{ARCHITECTURES[closest].class_name}, with {' '.join(differences[closest])}"
        )
    return closest


def to_config_json(config: GPTConfig, model_type: str) -> dict[str, Any]:
    """The keys of config.json that determine what the model computes."""
    architecture = ARCHITECTURES[model_type]
    content = {theirs: getattr(config, ours) for ours, theirs in architecture.keys.items()}
    content |= {
        "model_type": model_type,
        architecture.keys["mlp_width"]: config.mlp_channels,
        architecture.keys["mlp"]: architecture.mlp[config.mlp],
    }
    if model_type == "gpt2":
        flags = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
        return content | flags | {"n_ctx": config.block_size, "layer_norm_epsilon": 1e-5}  # llama.cpp reads n_ctx
    heads = {"num_key_value_heads": config.kv_heads, "head_dim": config.head_dim}
    rope = {"rope_theta": 10_000.0, "rope_scaling": None}
    return content | heads | rope | {"mlp_bias": config.bias, "rms_norm_eps": 1e-5}


def from_config_json(content: dict[str, Any], path: str) -> GPTConfig:
    """The architecture that a config.json describes, without dropout. Raises UserError; path: of the file."""
    content = content if isinstance(content, dict) else {}
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(
            f"{path} has model_type={format_value(model_type)}, but only {known} can be imported; set another folder"
        )
    if content.get("quantization_config") is not None:
        raise UserError(
            f"{path} describes quantized weights; set a folder with weights in float32, bfloat16 or float16"
        )
    architecture = ARCHITECTURES[model_type]
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}  # the latter since transformers 5
    rope = rope if isinstance(rope, dict) else {"rope_type": rope}
    is_scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    content = architecture.defaults | content | rope | {"rope_scaling": rope if is_scaled else None}
    mlps = {theirs: ours for ours, theirs in architecture.mlp.items()}
    try:
        settings = {ours: content[theirs] for ours, theirs in architecture.keys.items()}
        for ours, value in settings.items():
            if type(value) not in SETTING_TYPES.get(ours, (int,)):
                raise TypeError(f"{architecture.keys[ours]}={value!r}")
        settings["mlp"] = mlps.get(settings["mlp"], next(iter(architecture.mlp)))  # others are refused below
        config = GPTConfig(**UNUSED | architecture.needs | settings, name=model_type)
    except KeyError as error:
        raise UserError(f"{path} has no key {error.args[0]}; copy the complete file again") from None
    except (UserError, TypeError) as error:
        raise UserError(f"{path} does not describe a model: {error}") from None
    for key, value in to_config_json(config, model_type).items():
        if content.get(key) not in (None, value):
            raise UserError(
                f"{path} has {key}={format_value(content[key])}, but only {format_value(value)} can be imported; "
                "set another folder"
            )
    return config


def export_weights(
    weights: dict[str, Tensor], config: GPTConfig, model_type: str, vocab_size: int
) -> dict[str, Tensor]:
    """The weights of a GPT with the names and shapes of transformers, without the rows that pad the vocabulary."""
    architecture, exported = ARCHITECTURES[model_type], {}
    for name, weight in weights.items():
        module, _, kind = name.rpartition(".")
        if module == "lm_head" and config.tie_embeddings:
            continue
        theirs = architecture.find_modules(module)
        rows = weight[:vocab_size] if module in ("wte", "lm_head") else weight
        for their_module, part in zip(theirs, rows.split(_split_rows(theirs, len(rows), config)), strict=True):
            is_conv1d = CONV1D.search(their_module) and kind == "weight"
            exported[f"{their_module}.{kind}"] = (part.T if is_conv1d else part).contiguous()
            if model_type == "gpt2" and not config.bias and module not in ("wte", "wpe", "lm_head"):
                exported[f"{their_module}.bias"] = torch.zeros(len(part), dtype=part.dtype)
    return exported


def import_weights(tensors: dict[str, Tensor], config: GPTConfig, vocab_size: int, path: str) -> dict[str, Tensor]:
    """The state dict of a GPT from tensors of transformers. Raises UserError for a missing tensor or a wrong shape.

    path: of the tensors, for messages.
    """
    architecture, weights = ARCHITECTURES[config.name], {}
    prefix = PREFIX if any(name.startswith(PREFIX) for name in tensors) else ""
    for name, expected in GPT(config, vocab_size, attend=None, device="meta").state_dict().items():
        module, _, kind = name.rpartition(".")
        if module == "lm_head" and config.tie_embeddings:
            weights[name] = weights["wte.weight"]
            continue
        parts = []
        theirs = architecture.find_modules(module)
        for their_module, rows in zip(theirs, _split_rows(theirs, len(expected), config), strict=True):
            their_name = f"{their_module}.{kind}".replace(PREFIX, prefix)
            if their_name not in tensors:
                raise UserError(f"{path} has no tensor {their_name}; copy the complete file again")
            tensor = tensors[their_name]
            part = tensor.T if CONV1D.search(their_module) and kind == "weight" else tensor
            if module in ("wte", "lm_head"):
                part = part[:vocab_size]  # the table may have more rows than there are tokens
            if part.shape != (rows, *expected.shape[1:]):
                raise UserError(
                    f"{their_name} in {path} has the shape {tuple(tensor.shape)}, which does not fit config.json; "
                    "copy both files again"
                )
            if part.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise UserError(
                    f"{their_name} in {path} has the type {part.dtype}; set a folder with weights in float32"
                )
            parts.append(part)
        weights[name] = torch.cat(parts).float()
    return weights


def _split_rows(theirs: list[str], rows: int, config: GPTConfig) -> list[int]:
    """How many rows of our weight belong to each of their modules."""
    if len(theirs) == 3:  # queries, keys and values
        return [heads * config.head_dim for heads in (config.n_head, config.kv_heads, config.kv_heads)]
    return [rows // len(theirs)] * len(theirs)
