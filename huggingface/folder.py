"""Folders in the layout of transformers: config.json, model.safetensors, tokenizer.json."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from common.errors import UserError
from common.files import atomic_write, write_json
from common.machine import dtype_name
from data.tokenizer import END_OF_TEXT, from_spec
from huggingface.architectures import (
    MODULE,
    export_weights,
    from_config_json,
    import_weights,
    to_config_json,
)
from huggingface.tokenizer_json import from_tokenizer_json, to_tokenizer_json
from model.config import GPTConfig

FILES = ("config.json", "model.safetensors", "tokenizer.json")


def write_folder(out: Path, checkpoint: dict, model_type: str, dtype: torch.dtype) -> None:
    """Write the files of a model for transformers into a folder.

    out: an empty folder.
    checkpoint: content of a checkpoint.
    model_type: result of find_architecture.
    dtype: of the weights in the file.
    """
    config = GPTConfig.from_saved(checkpoint["model_config"])
    vocab_size = checkpoint["vocab_size"]
    spec = checkpoint["tokenizer"]
    end = spec["special"].get(END_OF_TEXT)
    token_ids = {"bos_token_id": from_spec(spec).start_token, "eos_token_id": end}
    model_config = {
        **to_config_json(config, model_type),
        "vocab_size": vocab_size,
        "dtype": dtype_name(dtype),
    }
    generation_config = {
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 0,  # sample from all tokens, as sample.py; the default of transformers is 50
        # Learned positions end at block_size: prompt and sample must fit.
        "max_new_tokens": max(1, config.block_size // 2),
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.block_size,
        "padding_side": "left",  # generation continues at the end of each row
        "split_special_tokens": True,  # as in training, special tokens in a text are text
    }
    if end is not None:
        tokenizer_config |= dict.fromkeys(
            ("bos_token", "eos_token", "pad_token", "unk_token"), END_OF_TEXT
        )
    weights = export_weights(checkpoint["model"], config, model_type, vocab_size)
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    write_json(out / "config.json", model_config | token_ids)
    write_json(out / "generation_config.json", token_ids | generation_config)
    write_json(out / "tokenizer.json", to_tokenizer_json(spec))
    write_json(out / "tokenizer_config.json", tokenizer_config)
    atomic_write(out / "model.safetensors", save(weights, {"format": "pt"}))
    if model_type == "trilgpt":
        code = Path(__file__).with_name(f"{MODULE}.py")
        atomic_write(out / code.name, code.read_bytes())


def find_folder(name: str) -> Path:
    """Find the folder of a path, or of a model of the Hugging Face hub.

    A model of the hub is downloaded once.
    Raises UserError.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except Exception as error:  # the network raises exceptions of many types
        raise UserError(
            f"hf:{name} is not a folder, and cannot be downloaded ({type(error).__name__}); "
            "check the name and the network, or set hf:FOLDER"
        ) from None


def read_folder(folder: Path) -> dict[str, Any]:
    """Read a folder of transformers as a checkpoint.

    Returns the keys model_config, vocab_size, tokenizer and model.
    Raises UserError.
    """
    try:
        path = folder / "config.json"  # the file that is being read
        content = json.loads(path.read_bytes())
        config = from_config_json(content, str(path))
        path = folder / "tokenizer.json"
        spec = from_tokenizer_json(json.loads(path.read_bytes()), str(path))
        add_end_or_start(spec, content)
        vocab_size = from_spec(spec).n_vocab
        path = folder / "model.safetensors"
        weights = import_weights(load_file(path), config, vocab_size, str(path))
    except UserError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}: {error}); "
            f"set hf:FOLDER with {', '.join(FILES)}"
        ) from None
    return {
        "model_config": asdict(config),
        "vocab_size": vocab_size,
        "tokenizer": spec,
        "model": weights,
    }


def add_end_or_start(spec: dict, model_config: dict) -> None:
    """Add the token after or before a document to a tokenizer spec, unless it has END_OF_TEXT.

    The end-of-text token can have another name, such as </s>. Without one, samples start from the
    token bos_token_id.
    model_config: content of config.json.
    """
    if END_OF_TEXT in spec["special"]:
        return
    end = model_config.get("eos_token_id")
    start = model_config.get("bos_token_id")
    if end in spec["special"].values():
        spec["special"] = {
            END_OF_TEXT if token == end else name: token for name, token in spec["special"].items()
        }
    elif start in range(len(spec["tokens"])):
        spec["start"] = start
