"""Load a trained model: a run, or a model in the format of Hugging Face transformers.

run: name or path of a run, "last" for the newest, or hf:NAME, a folder or a model of the Hugging
    Face hub.
checkpoint: "best", "last" or "step-N", for runs.
All functions raise UserError if the model does not exist or cannot be read.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.checkpoint_file import load_checkpoint
from common.console import print_text
from common.machine import dtype_name, resolve_device, resolve_dtype
from common.run_paths import find_checkpoint
from data.tokenizer import Tokenizer, from_spec
from generation.config import LoadConfig
from generation.cpu_linear import replace_linears
from huggingface.folder import find_folder, read_folder
from model import GPTConfig
from model.attention import resolve_model, sdpa
from model.gpt import GPT


def load_pretrained(run: str, checkpoint: str = "best") -> tuple[Path, dict[str, Any]]:
    """Read a model. Returns the path of its weights and the content of a checkpoint.

    A transformers model has only the keys model_config, vocab_size, tokenizer and model.
    """
    if run.startswith("hf:"):
        folder = find_folder(run.removeprefix("hf:"))
        return folder / "model.safetensors", read_folder(folder)
    path = find_checkpoint(run, checkpoint)
    return path, load_checkpoint(path)


def model_from_weights(
    config: GPTConfig,
    vocab_size: int,
    attend: Callable[..., Tensor],
    weights: Mapping[str, Tensor],
) -> GPT:
    """Build a model whose parameters are the tensors of a state_dict, without a copy of them.

    attend: attention function (model/attention/).
    """
    with torch.device("meta"):
        model = GPT(config, vocab_size, attend)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


def load_run(
    run: str = "last",
    checkpoint: str = "best",
    device: str = "cpu",
    attend: Callable[..., Tensor] = sdpa,
) -> tuple[GPT, Tokenizer]:
    """Load a model and its tokenizer for use in Python.

    The model is in eval mode and in float32. It can be trained.
    attend: attention function (model/attention/).
    """
    _, saved = load_pretrained(run, checkpoint)
    config = GPTConfig.from_saved(saved["model_config"])
    model = model_from_weights(config, saved["vocab_size"], attend, saved["model"])
    return model.to(device).eval(), from_spec(saved["tokenizer"])


def load_for_inference(config: LoadConfig, decodes_batches: bool) -> tuple[GPT, Tokenizer, Path]:
    """Load a model that decodes and scores fast, and cannot be trained. Print what was loaded.

    decodes_batches: whether samples of different lengths are decoded together.
    Returns (model, tokenizer, path of the weights).
    Raises UserError if the attention backend or the dtype cannot run on this device.
    """
    device = resolve_device(config.device)
    weight_dtype = resolve_dtype(config.dtype, device, trains=False)
    path, saved = load_pretrained(config.run, config.checkpoint)
    model_config = GPTConfig.from_saved(saved["model_config"])
    dtype = torch.float32 if device.type == "cpu" else weight_dtype  # of activations
    options = {"B": config.batch_size, "dtype": dtype, "device": device, "grad": False}
    attend, kernel = resolve_model(config.attention, model_config, **options)  # for prompts
    # A decode step has one query per sample, and positions if the samples differ in length.
    resolve_model(config.attention, model_config, Tq=1, positions=decodes_batches, **options)
    model = model_from_weights(model_config, saved["vocab_size"], attend, saved["model"])
    model = model.requires_grad_(False).to(device).eval()
    model = replace_linears(model, weight_dtype, config.batch_size)
    step = f", step {saved['step']:,}" if "step" in saved else ""
    print_text(
        f"{path}{step}, {device.type} {dtype_name(weight_dtype)}, attention {kernel}", stderr=True
    )
    return model, from_spec(saved["tokenizer"]), path
