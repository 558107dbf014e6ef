"""Builds the parts of a run from its config: data, model, and the facts in summary.json."""

from dataclasses import asdict
from functools import partial
from typing import Any

from common.environment import describe_environment
from data.prepare import PreparedData, prepare
from generation.kv_cache import kv_cache_bytes_per_token
from model.activation_checkpointing import checkpoint_activations
from model.flops import flops_per_token, n_params
from model.gpt import GPT
from training.config import RunConfig
from training.device import Runtime
from training.distributed import Dist
from training.init_from import load_run_tokenizer
from training.run_folder import RunFolder

SAME_DATA = (
    "copy the text and data/prepared from rank 0's machine; data=python_stdlib also needs its "
    "Python version"
)


def build_data(config: RunConfig, run: RunFolder, dist: Dist) -> PreparedData:
    """Prepare the data, unless this was done before. All processes must find the same data."""
    checkpoint = run.last if run.resumes else None
    spec = load_run_tokenizer(config.tokenizer.run, checkpoint)
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
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "compile": runtime.compile,
        "world_size": runtime.dist.world_size,
        "attention": asdict(runtime.attention),
        "vocab_size": vocab_size,
        "micro_batch_size": runtime.micro_batch_size,
        "accumulation": runtime.accumulation,
        "data": str(data.folder),
        "n_params": n_params(model),
        "flops_per_token": flops_per_token(config.model, vocab_size, config.model.block_size),
        "kv_cache_bytes_per_token": kv_cache_bytes_per_token(config.model, runtime.dtype),
    }
