"""Load a trained model: a run, or a model in the format of Hugging Face transformers.

run: name or path of a run, "last" for the newest, or hf:NAME, a folder or a model of the Hugging
    Face hub.
checkpoint: "best", "last" or "step-NNNNNN", for runs.
All functions raise UserError if the model does not exist or cannot be read.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.checkpoint_file import load_checkpoint
from common.machine import resolve_device, resolve_dtype
from common.run_paths import find_checkpoint, find_run
from data.tokenizer import Tokenizer, from_spec
from generation.cpu_linear import replace_linears
from huggingface.folder import find_folder, read_folder
from model import AttentionConfig, GPTConfig
from model.attention import resolve_model
from model.gpt import GPT


def find_pretrained_folder(run: str) -> Path:
    """Find the folder of a run or of a transformers model."""
    if run.startswith("hf:"):
        return find_folder(run.removeprefix("hf:"))
    return find_run(run)


def load_pretrained(run: str, checkpoint: str = "best") -> tuple[Path, dict[str, Any]]:
    """Read a model. Returns the path of its weights and the content of a checkpoint.

    A transformers model has only the keys model_config, vocab_size, tokenizer and model.
    """
    if run.startswith("hf:"):
        folder = find_pretrained_folder(run)
        return folder / "model.safetensors", read_folder(folder)
    path = find_checkpoint(run, checkpoint)
    return path, load_checkpoint(path)


def model_from_weights(
    config: GPTConfig,
    vocab_size: int,
    attend: Callable[..., Tensor] | None,
    weights: Mapping[str, Tensor],
) -> GPT:
    """Build a model whose parameters are the tensors of a state_dict, without a copy of them.

    attend: attention function (model/attention/); None: sdpa.
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
    attend: Callable[..., Tensor] | None = None,
) -> tuple[GPT, Tokenizer]:
    """Load a model and its tokenizer for use in Python.

    The model is in eval mode and in float32. It can be trained.
    attend: attention function (model/attention/); None: sdpa.
    """
    _, saved = load_pretrained(run, checkpoint)
    config = GPTConfig.from_saved(saved["model_config"])
    model = model_from_weights(config, saved["vocab_size"], attend, saved["model"])
    return model.to(device).eval(), from_spec(saved["tokenizer"])


def load_for_sampling(
    run: str,
    checkpoint: str,
    device: str,
    dtype: str,
    attention: AttentionConfig,
    batch_size: int,
) -> tuple[GPT, Tokenizer, str]:
    """Load a model that decodes batch_size sequences fast, and cannot be trained.

    device, dtype: the settings, as for resolve_device and resolve_dtype.
    Returns (model, tokenizer, description).
    Raises UserError if the attention backend or the dtype cannot run on this device.
    """
    torch_device = resolve_device(device)
    weight_dtype = resolve_dtype(dtype, torch_device, trains=False)
    path, saved = load_pretrained(run, checkpoint)
    config = GPTConfig.from_saved(saved["model_config"])
    activation_dtype = torch.float32 if torch_device.type == "cpu" else weight_dtype
    request = {"B": batch_size, "dtype": activation_dtype, "device": torch_device, "grad": False}
    attend, kernel = resolve_model(attention, config, **request)  # for prompts
    # A decode step has one query, and positions because the samples of a batch differ in length.
    resolve_model(attention, config, Tq=1, positions=batch_size > 1, **request)
    model = model_from_weights(config, saved["vocab_size"], attend, saved["model"])
    model = model.requires_grad_(False).to(torch_device).eval()
    model = replace_linears(model, weight_dtype, batch_size)
    step = f", step {saved['step']:,}" if "step" in saved else ""
    dtype_name = str(weight_dtype).removeprefix("torch.")
    description = f"{path}{step}, {torch_device.type} {dtype_name}, attention {kernel}"
    return model, from_spec(saved["tokenizer"]), description
