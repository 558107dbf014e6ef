"""GGUF files, the format of llama.cpp, written with its Python package `gguf`.

The tensors are those of model/huggingface/architectures.py under llama.cpp's names, with two differences: all linear
weights have the shape (out, in), and rotary positions rotate the channels 2i and 2i + 1 instead of i and i + D/2.
"""

import base64
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError, format_value
from data.tokenizer import END_OF_TEXT
from model.config import GPTConfig
from model.huggingface.architectures import CONV1D, export_weights
from model.huggingface.tokenizer_json import GPT2_PATTERN, list_merges, to_printable

MLPS = {"gpt2": "gelu_tanh", "llama": "swiglu", "arcee": "relu2"}  # the activations that llama.cpp implements


def check_gguf(config: GPTConfig, model_type: str, spec: dict, run: str) -> None:
    """Raises UserError for a model or a tokenizer that llama.cpp does not have; run: its name in the message."""
    needs = {"mlp": MLPS[model_type]} | ({"bias": False} if model_type == "arcee" else {})
    different = [f"model.{key}={format_value(value)}" for key, value in needs.items() if getattr(config, key) != value]
    if different:
        raise UserError(f"{run} cannot run in llama.cpp; train a model with {' '.join(different)}")
    if spec["name"] != "byte" and spec["pattern"] != GPT2_PATTERN:
        raise UserError(
            f"{run} has the tokenizer {spec['name']}, whose rule for splitting text into words llama.cpp does not "
            "have; train a model with tokenizer=gpt2 or byte"
        )


def write_gguf(out: Path, checkpoint: dict, model_type: str, name: str, dtype: torch.dtype) -> None:
    """Write a model, which check_gguf accepts, as a GGUF file. Vectors and positions stay float32.

    checkpoint: its content. model_type: see find_architecture. name: of the model. Raises UserError if the package gguf
    is missing.
    """
    try:
        import gguf
    except ImportError:
        raise UserError("format=gguf needs the package gguf; install it with: pip install gguf") from None
    config, spec = GPTConfig.from_checkpoint(checkpoint["model_config"]), checkpoint["tokenizer"]

    writer = gguf.GGUFWriter(out, model_type)
    file_types = {torch.float32: "ALL_F32", torch.float16: "MOSTLY_F16", torch.bfloat16: "MOSTLY_BF16"}
    writer.add_file_type(gguf.LlamaFileType[file_types[dtype]])
    writer.add_name(name)
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.mlp_channels)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.kv_heads)
    if model_type == "gpt2":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(10_000.0)
        writer.add_vocab_size(checkpoint["vocab_size"])
    _add_tokenizer(writer, spec, checkpoint["vocab_size"])

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[model_type.upper()], config.n_layer)
    weights = export_weights(checkpoint["model"], config, model_type, checkpoint["vocab_size"])
    for tensor_name, weight in weights.items():
        module, _, kind = tensor_name.rpartition(".")
        weight = weight.float().T if CONV1D.search(module) and kind == "weight" else weight.float()
        if module.endswith(("q_proj", "k_proj")):
            weight = _interleave(weight, config.head_dim)
        stored = torch.float32 if weight.ndim == 1 or module.endswith("wpe") else dtype
        kind_of_data = gguf.GGMLQuantizationType[{torch.float32: "F32", torch.float16: "F16"}.get(stored, "BF16")]
        data = gguf.quants.quantize(weight.contiguous().numpy(), kind_of_data)
        writer.add_tensor(f"{names.get_name(module)}.{kind}", data, raw_dtype=kind_of_data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, spec: dict, vocab_size: int) -> None:
    from gguf import TokenType

    tokens = [base64.b64decode(token) for token in spec["tokens"]]
    strings = [to_printable(token) for token in tokens] + [f"<|unused{i}|>" for i in range(len(tokens), vocab_size)]
    types = [TokenType.NORMAL] * len(tokens) + [TokenType.UNUSED] * (vocab_size - len(tokens))
    for content, i in spec["special"].items():
        strings[i], types[i] = content, TokenType.CONTROL
    merges = [] if spec["name"] == "byte" else list_merges(tokens)
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(strings)
    writer.add_token_types(types)
    lines = [f"{to_printable(left)} {to_printable(right)}" for left, right in merges]
    writer.add_token_merges(lines or ["<|unused|> <|unused|>"])  # llama.cpp needs at least one
    writer.add_add_bos_token(False)
    if END_OF_TEXT in spec["special"]:
        writer.add_bos_token_id(spec["special"][END_OF_TEXT])
        writer.add_eos_token_id(spec["special"][END_OF_TEXT])


def _interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head: channel i and i + D/2 become 2i and 2i + 1."""
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)
