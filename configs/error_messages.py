"""Error messages for wrong keys, values and YAML files: one sentence each.

Hydra and OmegaConf say what is wrong. This module adds the key, the YAML file, and the nearest
key or choice.
"""

from collections.abc import Iterable
from inspect import formatannotation
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from common.settings import did_you_mean
from configs.schema import key_types

# Our keys and settings, and the keys of other programs for which they are suggested: of nanoGPT,
# transformers and litgpt.
SYNONYMS = {
    "name": "out_dir output_dir run_name wandb_run_name",
    "run": "name ckpt",
    "checkpoint": "ckpt",
    "device=cuda": "gpu",
    "dtype": "precision",
    "dtype=float16": "fp16",
    "dtype=bfloat16": "bf16",
    "attention=flash": "flash flash_attn",
    "optimizer.lr": "learning_rate",
    "optimizer.betas": "beta1 beta2",
    "schedule.warmup_steps": "warmup_iters",
    "schedule.final_fraction": "min_lr",
    "train.steps": "max_iter max_iters lr_decay_iters",
    "train.epochs": "num_train_epochs",
    "train.batch_size": "batch",
    "train.micro_batch_size": "batch gradient_accumulation_steps grad_accum accumulate "
    "per_device_train_batch_size",
    "eval.every": "eval_interval log_interval",
    "eval.windows": "eval_iters",
    "checkpoint.every": "save_every save_interval save_steps",
    "wandb.mode": "wandb_log",
    "model.n_head": "num_attention_heads num_heads",
    "model.n_embd": "hidden_size d_model width dim",
    "model.n_layer": "num_hidden_layers depth",
    "model.block_size": "seq_len seq_length context_length context max_seq_length n_ctx ctx",
    "model.window": "window_size",
    "block_sizes": "block_size",
    "backends": "attention",
    "prompt": "start",
    "num_samples": "n",
    "temperature": "temp",
    "eval.sample.temperature": "temp",
    "max_new_tokens": "length num_tokens max_tokens",
}


def explain_error(script: str, error: BaseException) -> str:
    """One sentence for an exception of Hydra or OmegaConf while a config is composed."""
    if isinstance(error, RecursionError):
        return "a YAML file contains itself, through its defaults or an alias (*name)"
    if isinstance(error, OverrideParseException):
        advice = """put its value in two pairs of quotes: 'KEY="VALUE"'"""
        return f"{error.override!r} cannot be parsed; {advice}"
    if "Ambiguous value" in str(error):  # attention=naive,flash
        word = str(error).partition("'")[2].partition("'")[0]
        advice = "put a list in brackets, as in [a,b]"
        if script == "train":
            advice = f"add -m to train each of them, or {advice}"
        return f"{word} has several values; {advice}"
    if isinstance(error, MissingConfigException):
        # The file that was not found, and the choices, if there are any
        paragraphs = str(error).partition("Config search path:")[0].strip().replace("\n\n", "; ")
        choice = str(error.missing_cfg_file).rpartition("/")[2]
        return " ".join(paragraphs.split()) + did_you_mean(choice, error.options or [], {})
    types = key_types(script)
    if not isinstance(error, HydraException):
        return explain_cause(error, types)
    # An error of OmegaConf usually made Hydra fail
    sentence = explain_cause(error.__cause__ or error.__context__ or error, types)
    if "raised while composing" in str(error):  # In 'experiment/mine': ConfigKeyError raised ...
        return f"{str(error).partition(':')[0]}: {sentence}"
    return sentence


def explain_cause(cause: BaseException, types: dict[str, Any]) -> str:
    """One sentence for an error of OmegaConf, which knows the key. types: of the script's keys."""
    reason = " ".join(str(cause).partition("full_key:")[0].split()).removesuffix(".")
    key = getattr(cause, "full_key", None)
    if not key:
        return reason
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        # A key in types belongs to another optimizer, or is not nested in YAML: train.steps: 5
        return f"{key}: {reason}" if key in types else explain_unknown_key(key, types)
    for name in types:
        if name.startswith(f"{key}."):
            return f"{key}: {reason}; set its keys, such as {name}"
    if key in types:
        reason += f"; set a value of type {formatannotation(types[key])}"
    return f"{key}: {reason}"


def explain_unknown_key(key: str, keys: Iterable[str]) -> str:
    """What is wrong with a key that does not exist. keys: all keys of the script."""
    return f"{key}: there is no such key{did_you_mean(key, keys, SYNONYMS)}"
