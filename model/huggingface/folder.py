"""Folders in the layout of Hugging Face transformers: config.json, model.safetensors, tokenizer.json."""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common.errors import UserError, format_value
from common.files import write_json
from data.tokenizer import END_OF_TEXT
from model.config import GPTConfig
from model.huggingface.architectures import (
    ARCHITECTURES,
    export_weights,
    from_config_json,
    import_weights,
    to_config_json,
)
from model.huggingface.tokenizer_json import from_tokenizer_json, to_tokenizer_json

FILES = ("config.json", "model.safetensors", "tokenizer.json")


def write_folder(out: Path, checkpoint: dict, model_type: str, dtype: torch.dtype) -> None:
    """Write a model as a folder for transformers. checkpoint: its content. model_type: see find_architecture."""
    config = GPTConfig.from_checkpoint(checkpoint["model_config"])
    vocab_size, spec = checkpoint["vocab_size"], checkpoint["tokenizer"]
    weights = export_weights(checkpoint["model"], config, model_type, vocab_size)
    end = spec["special"].get(END_OF_TEXT)
    token_ids = {"bos_token_id": end, "eos_token_id": end}
    content = {
        "architectures": [ARCHITECTURES[model_type].class_name],
        "vocab_size": vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        **to_config_json(config, model_type),
        **token_ids,
    }
    if model_type == "gpt2":
        content |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    end_of_text = {key: END_OF_TEXT for key in ("bos_token", "eos_token", "pad_token", "unk_token") if end is not None}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.block_size,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # as in training, special tokens in a text are text
        **end_of_text,
    }
    out.mkdir()
    save_file({name: w.to(dtype) for name, w in weights.items()}, out / "model.safetensors", {"format": "pt"})
    write_json(out / "tokenizer.json", to_tokenizer_json(spec))
    write_json(out / "tokenizer_config.json", tokenizer_config)
    # learned positions end at block_size: prompt and sample must fit
    sampling = {"do_sample": True, "temperature": 0.8, "max_new_tokens": max(1, config.block_size // 2)}
    write_json(out / "generation_config.json", token_ids | sampling)
    write_json(out / "config.json", content)
    shutil.copymode(out / "config.json", out / "model.safetensors")  # safetensors makes it readable for its owner only


def find_folder(name: str) -> Path:
    """Find the folder of run=hf:NAME. name: a path, or a model of the Hugging Face hub, which is downloaded once.

    Raises UserError.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir() and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name, allow_patterns=list(FILES)))
        except Exception as error:  # the network raises exceptions of many types
            raise UserError(
                f"hf:{name} is not a folder, and could not be downloaded from the Hugging Face hub "
                f"({type(error).__name__}); check the name and the network, or copy {', '.join(FILES)} into a folder "
                "and set hf:FOLDER"
            ) from None
    if missing := [file for file in FILES if not (folder / file).is_file()]:
        raise UserError(
            f"{folder} has no {missing[0]}; set hf:FOLDER to a folder with {', '.join(FILES)}, as written by "
            "save_pretrained(FOLDER, max_shard_size='100GB') of transformers"
        )
    return folder


def read_folder(folder: Path) -> dict[str, Any]:
    """Read a folder of transformers as the content of a checkpoint: model_config, vocab_size, tokenizer and model.

    Raises UserError if it is damaged, or if the architecture or the tokenizer cannot be imported.
    """
    content = _read_json(folder / "config.json")
    config = from_config_json(content, str(folder / "config.json"))
    spec = from_tokenizer_json(_read_json(folder / "tokenizer.json"), str(folder / "tokenizer.json"))
    if END_OF_TEXT not in spec["special"]:  # the end-of-text token can have another name, such as </s>
        end = content.get("eos_token_id")
        spec["special"] = {END_OF_TEXT if i == end else name: i for name, i in spec["special"].items()}
    vocab_size = 1 + max([len(spec["tokens"]) - 1, *spec["special"].values()])
    rows = content.get("vocab_size")
    if not isinstance(rows, int) or rows < vocab_size:
        raise UserError(
            f"{folder}/config.json has vocab_size={format_value(rows)}, but tokenizer.json has {vocab_size} tokens; "
            "copy both files from the same folder"
        )
    path = folder / "model.safetensors"
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}); copy it again") from None
    # transformers keeps the key "bias" of our GPT-2 folders when it finetunes them, although it trains the biases
    has_bias = any(name.endswith(".bias") and tensor.ndim == 1 and tensor.any() for name, tensor in tensors.items())
    config = replace(config, bias=config.bias or has_bias)
    weights = import_weights(tensors, config, vocab_size, str(path))
    return {"model_config": asdict(config), "vocab_size": vocab_size, "tokenizer": spec, "model": weights}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); copy it again") from None
