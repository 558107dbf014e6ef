"""Error messages for wrong keys, values and YAML files: one sentence each, with a suggestion for typos."""

import re
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from common.settings import did_you_mean
from configs.schema import key_types

TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "None": "null",
}
TYPE_NAMES |= {"list": "a list such as [A,B]", "dict": "a section of a YAML file", "|": "or"}
# Our keys and settings, and the keys of nanoGPT, transformers and litgpt for which they are suggested.
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
    "train.steps": "max_iter max_iters epochs num_train_epochs lr_decay_iters",
    "train.batch_size": "batch",
    "train.micro_batch_size": "batch gradient_accumulation_steps grad_accum accumulate per_device_train_batch_size",
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
    "prompt": "start",
    "num_samples": "n",
    "temperature": "temp",
    "eval.sample.temperature": "temp",
    "max_new_tokens": "length num_tokens max_tokens",
}


def explain_error(script: str, error: BaseException) -> str:
    """One sentence for an exception of Hydra or OmegaConf while a config is composed."""
    sentence = " ".join(re.split("Config search path|full_key:", str(error))[0].split())
    if isinstance(error, RecursionError):
        return "a YAML file contains itself, through its defaults or an alias (*name); remove that entry"
    if isinstance(error, MissingConfigException):
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        advice = f"{did_you_mean(choice, error.options or [], {})}; set {', '.join(sorted(error.options or []))}"
        if not error.options:  # in a recipe, Hydra looks below its folder
            advice = f"; write - override /{group.split('/')[-1]}: {choice}"
        return f"{group}={choice}: there is no such choice{advice}"
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} cannot be parsed; {quoting_advice(error.override)}"
    # Hydra names the file or the word, and OmegaConf the key or a dataclass: in the cause, or in the message itself
    text = str(error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error)
    keys, types = (
        re.findall(r"(?:full_key: |Could not override ')([^\s']+)", text),
        key_types(script),
    )
    if not keys and (section := re.search(r"not a subclass of (\w+)", text)):
        keys = [next((key for key, kind in types.items() if section[1] in str(kind)), "optimizer")]
    file = re.match(r"In '(.*?)': \w+ raised while composing config:", text)
    key, place = keys[-1] if keys else "its content", f"{file[1]}.yaml: " if file else ""
    if "Key '" in text or sentence.startswith("Could not override"):
        if "." in key and f"Key '{key}'" in text:
            return f"{place}{key}: write {key.replace('.', ': {')}: VALUE{'}' * key.count('.')}"
        if key in types:
            return f"{place}{key} is a key of another optimizer; set that optimizer, or remove this key"
        return f"{place}{key}: there is no such key{did_you_mean(key, types, SYNONYMS)}; see --help and --cfg job"
    if "mandatory value" in text:
        return f"{key} is missing; set it in the YAML file"
    if file or sentence.startswith("Error merging override "):
        word = (
            place + key
            if file
            else sentence.removeprefix("Error merging override ").replace("'", "")
        )
        kind = describe_type(key, types)
        if kind.startswith("text"):
            kind += "; put it in quotes" if file else f"; {quoting_advice(word)}"
        return f"{word} must be {kind}"
    return f"{key}: {' '.join(text.split('full_key:')[0].split())}" if keys else sentence


def quoting_advice(word: str) -> str:
    """How to type a value as text: the shell removes the outer quotes."""
    return f"""put its value in two pairs of quotes: '{word.split("=")[0]}="VALUE"'"""


def describe_type(key: str, types: dict[str, Any]) -> str:
    """The type of a key in words: int | None is "a whole number or null". A key may name an item: sizes[1]."""
    for name in types:
        if name.startswith(f"{key}."):
            return f"a section; set its keys, such as {name}"
    name = str(types.get(key.split("[")[0], dict)).removeprefix(
        "<class '"
    )  # dict: a source of data.mix
    name = re.sub(r".*\[(.*?)\].*", r"\1", name) if "[" in key else re.sub(r"\[.*?\]|'>", "", name)
    return re.sub(r"\w+|\|", lambda word: TYPE_NAMES.get(word[0], word[0]), name)
