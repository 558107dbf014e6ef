"""Folders in the layout of Hugging Face transformers: config.json, model.safetensors, tokenizer.json."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from common.console import pluralize
from common.errors import UserError
from common.files import atomic_write, read_json, write_json
from data.tokenizer import END_OF_TEXT, from_spec
from huggingface.architectures import (
    export_weights,
    from_config_json,
    import_weights,
    to_config_json,
)
from huggingface.tokenizer_json import from_tokenizer_json, to_tokenizer_json
from model.config import GPTConfig

FILES = ("config.json", "model.safetensors", "tokenizer.json")


def write_folder(
    out: Path, checkpoint: dict, model_type: str, dtype: torch.dtype, run: Path
) -> None:
    """Write a model as a folder for transformers.

    checkpoint: content of a checkpoint.
    model_type: result of find_architecture.
    """
    config = GPTConfig.from_saved(checkpoint["model_config"])
    vocab_size, spec = checkpoint["vocab_size"], checkpoint["tokenizer"]
    end = spec["special"].get(END_OF_TEXT)
    token_ids = {"bos_token_id": from_spec(spec).start_token, "eos_token_id": end}
    end_tokens = ("bos_token", "eos_token", "pad_token", "unk_token") if end is not None else ()
    tokenizer_config = dict.fromkeys(end_tokens, END_OF_TEXT) | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.block_size,
        "split_special_tokens": True,  # as in training, special tokens in a text are text
    }
    # learned positions end at block_size: prompt and sample must fit
    sampling = {
        "do_sample": True,
        "temperature": 0.8,
        "max_new_tokens": max(1, config.block_size // 2),
    }
    sizes = {"vocab_size": vocab_size, "dtype": str(dtype).removeprefix("torch.")}
    weights = export_weights(checkpoint["model"], config, model_type, vocab_size)
    out.mkdir()
    write_json(out / "config.json", to_config_json(config, model_type) | sizes | token_ids)
    write_json(out / "generation_config.json", token_ids | sampling)
    write_json(out / "tokenizer.json", to_tokenizer_json(spec))
    write_json(out / "tokenizer_config.json", tokenizer_config)
    atomic_write(
        out / "model.safetensors",
        save({name: w.to(dtype) for name, w in weights.items()}, {"format": "pt"}),
    )
    atomic_write(out / "README.md", format_model_card(run, checkpoint["step"]))


def format_model_card(run: Path, step: int) -> str:
    """README.md of an exported folder: facts of the training, as code, in which HTML and Markdown have no effect."""
    summary, keys = (
        read_json(run / "summary.json"),
        ("name", "command", "best_val_loss", "device_name", "commit"),
    )
    intro = f"# Language model\n\nIt continues text. trilGPT has trained it for {pluralize(step, 'step')}.\n\n"
    return intro + "".join(
        f"    {key}: {json.dumps(summary[key])}\n" for key in keys if key in summary
    )


def find_folder(name: str) -> Path:
    """Find the folder of a path, or of a model of the Hugging Face hub, which is downloaded once. Raises UserError."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name, allow_patterns=list(FILES)))
        except Exception as error:  # the network raises exceptions of many types
            reason = f"hf:{name} is not a folder, and cannot be downloaded ({type(error).__name__})"
            raise UserError(f"{reason}; check the name and the network, or set hf:FOLDER") from None
    return folder


def read_folder(folder: Path) -> dict[str, Any]:
    """Read a folder of transformers as a checkpoint: model_config, vocab_size, tokenizer, model. Raises UserError."""
    try:
        content = json.loads((path := folder / "config.json").read_bytes())
        config = from_config_json(content, str(path))
        spec = from_tokenizer_json(
            json.loads((path := folder / "tokenizer.json").read_bytes()), str(path)
        )
        if (
            END_OF_TEXT not in spec["special"]
        ):  # the end-of-text token can have another name, such as </s>
            end = content.get("eos_token_id")
            spec["special"] = {
                END_OF_TEXT if i == end else name: i for name, i in spec["special"].items()
            }
        if END_OF_TEXT not in spec["special"] and content.get("bos_token_id") in range(
            len(spec["tokens"])
        ):
            spec["start"] = content["bos_token_id"]
        vocab_size = from_spec(spec).n_vocab
        weights = import_weights(
            load_file(path := folder / "model.safetensors"), config, vocab_size, str(path)
        )
    except Exception as error:  # a damaged file can raise anything
        message = f"{path} cannot be read ({type(error).__name__}: {error}); set hf:FOLDER with {', '.join(FILES)}"
        raise UserError(error if isinstance(error, UserError) else message) from None
    return {
        "model_config": asdict(config),
        "vocab_size": vocab_size,
        "tokenizer": spec,
        "model": weights,
    }
