"""Builds the parts of a run from its config: data, model, and the facts in summary.json."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from common.errors import UserError
from common.machine import describe_environment, dtype_name
from common.settings import format_value
from data.prepare import PreparedData, prepare
from data.tokenizer import is_same_vocabulary
from generation.load import load_pretrained
from model.config import GPTConfig
from model.flops import flops_per_token, kv_cache_bytes_per_token, n_params
from model.gpt import GPT
from training.config import GPT2_MODELS, RunConfig
from training.parallel import load_weights
from training.run_folder import RunFolder
from training.runtime import Dist, Runtime

SAME_DATA = (
    "copy the text and data/prepared from rank 0's machine; data=python_stdlib also needs its "
    "Python version"
)


def build_data(config: RunConfig, run: RunFolder, dist: Dist) -> PreparedData:
    """Prepare the data, unless this was done before. All processes must find the same data."""
    spec = load_run_tokenizer(config.tokenizer.run, run.last if run.resumes else None)
    data = prepare(config.data, config.tokenizer, config.model.block_size, spec)
    dist.require_equal(str(data.folder), SAME_DATA)
    return data


def build_model(config: RunConfig, runtime: Runtime, vocab_size: int) -> GPT:
    """Build the model with random weights, on the device or divided over the devices."""
    model = runtime.parallel.build(partial(GPT, config.model, vocab_size, runtime.attend))
    checkpoint_activations(model, config.train.activation_checkpointing)
    return model


def describe_run(
    config: RunConfig, runtime: Runtime, model: GPT, data: PreparedData
) -> dict[str, Any]:
    """What computes the run, for summary.json: machine, software, kernel, sizes and data."""
    vocab_size = data.meta["vocab_size"]
    return describe_environment(runtime.device) | {
        "dtype": dtype_name(runtime.dtype),
        "compile": runtime.compile,
        "world_size": runtime.dist.world_size,
        "attention": asdict(runtime.attention),
        "vocab_size": vocab_size,
        "micro_batch_size": runtime.micro_batch_size,
        "accumulation": runtime.accumulation,
        "data": str(data.folder),
        "text_hash": data.text_hash,
        "n_params": n_params(model),
        "flops_per_token": flops_per_token(config.model, vocab_size, config.model.block_size),
        "kv_cache_bytes_per_token": kv_cache_bytes_per_token(config.model, runtime.dtype),
    }


def load_run_tokenizer(run: str | None, checkpoint: Path | None = None) -> dict | None:
    """Load the tokenizer spec of tokenizer.run, if that is set. Raises UserError.

    checkpoint: of the run to train, if it resumes. Its spec is used, so that `run` can be removed.
    """
    if run is None:
        return None
    _, saved = load_pretrained(str(checkpoint or run))
    return saved["tokenizer"]


def load_init_weights(init_from: str, model: GPT, tokenizer_spec: dict) -> None:
    """Load the weights that train.init_from names.

    Raises UserError if the tokenizer or the model is different.
    """
    run = init_from.removeprefix("run:")
    if init_from in GPT2_MODELS:
        run = f"hf:openai-community/{init_from}"
    path, saved = load_pretrained(run)
    if not is_same_vocabulary(saved["tokenizer"], tokenizer_spec):
        raise UserError(
            f"{path} has another tokenizer than this run; set tokenizer=run tokenizer.run={run}"
        )
    different = _find_different_settings(GPTConfig.from_saved(saved["model_config"]), model.config)
    if different:
        raise UserError(f"{path} has another model than this run; set {' '.join(different)}")
    weights = dict(saved["model"])
    if model.wpe is not None:
        weights["wpe.weight"] = weights["wpe.weight"][: model.config.block_size]
    vocab_size = saved["vocab_size"]
    num_padding = model.wte.num_embeddings - vocab_size  # which can differ between the runs
    for name in ("wte.weight", "lm_head.weight"):
        weights[name] = F.pad(weights[name][:vocab_size], (0, 0, 0, num_padding))
    load_weights(model, weights)


def _find_different_settings(saved: GPTConfig, config: GPTConfig) -> list[str]:
    """Overrides of `config` that give the saved model, such as model.n_layer=2."""
    may_differ = {"name", "dropout", "pad_vocab_multiple"}
    if config.position == "rotary" or saved.block_size >= config.block_size:
        may_differ.add("block_size")
    if saved.max_ngram == 1:
        may_differ.add("ngram_table_size")
    old = asdict(saved) | {"n_kv_head": saved.kv_heads, "mlp_width": saved.mlp_channels}
    # what None stands for, once all other settings equal the saved model
    defaults = replace(saved, n_kv_head=None, mlp_width=None)
    new = asdict(config) | {
        "n_kv_head": config.n_kv_head or defaults.kv_heads,
        "mlp_width": config.mlp_width or defaults.mlp_channels,
    }
    return [
        f"model.{key}={format_value(value)}"
        for key, value in old.items()
        if value != new[key] and key not in may_differ
    ]


def checkpoint_activations(model: GPT, part: str) -> None:
    """Save only the inputs of each block or attention, and recompute the rest in the backward pass.

    part: "block", "attention" or "none". Losses and gradients do not change.
    """
    modules = {
        "none": [],
        "block": model.blocks,
        "attention": [block.attn for block in model.blocks],
    }
    for module in modules[part]:
        # Dropout needs the random numbers of the forward pass again.
        module.forward = partial(
            checkpoint,
            module.forward,
            use_reentrant=False,
            preserve_rng_state=model.config.dropout > 0,
        )
