"""Error messages for wrong keys, values and YAML files: one sentence each, with a suggestion for typos."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from configs.schema import key_types

TYPE_NAMES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "None": "null"}
TYPE_NAMES |= {"list": "a list such as [1]", "dict": "a section of a YAML file", "|": "or"}
# Our keys and settings, and the keys of nanoGPT, transformers and litgpt for which they are suggested.
SYNONYMS = {
    "optimizer.lr": "learning_rate",
    "train.steps": "max_iters epochs num_train_epochs lr_decay_iters",
    "train.micro_batch_size": "gradient_accumulation_steps per_device_train_batch_size",
    "eval.every": "eval_interval log_interval",
    "checkpoint.every": "save_every save_interval save_steps",
    "name": "out_dir output_dir run_name",
    "model.n_head": "num_attention_heads num_heads",
    "model.n_embd": "hidden_size d_model width dim",
    "model.n_layer": "num_hidden_layers depth",
    "model.block_size": "seq_len seq_length context_length context max_seq_length",
    "prompt": "start",
}


def did_you_mean(wrong: str, options: Iterable[str]) -> str:
    """Suggest up to three options with the same or a similar last part. Empty if none is similar."""
    leaf, leaves = wrong.split(".")[-1], {option: option.split(".")[-1] for option in options}
    close = difflib.get_close_matches(leaf, leaves.values(), n=1)
    similar = (
        [ours for ours, theirs in SYNONYMS.items() if leaf in theirs.split() and ours in leaves]
        or [option for option in leaves if leaves[option] == leaf]
        or difflib.get_close_matches(wrong, leaves, n=1)
        or [option for option in leaves if len(leaf) > 2 and leaf in leaves[option]]
        or [option for option in leaves if leaves[option] in close]
    )
    return f" (did you mean {' or '.join(similar[:3])}?)" if similar else ""


def explain_error(script: str, error: BaseException) -> str:
    """One sentence for an exception of Hydra or OmegaConf while a config is composed."""
    sentence = " ".join(re.split("Config search path|full_key:", str(error))[0].split())
    if isinstance(error, RecursionError):
        return "a YAML file contains itself, through its defaults or an alias (*name); remove that entry"
    if isinstance(error, MissingConfigException):
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        advice = f"{did_you_mean(choice, error.options or [])}; set {', '.join(sorted(error.options or []))}"
        if not error.options:  # in a recipe, Hydra looks below its folder
            advice = f"; write - override /{group.split('/')[-1]}: {choice}"
        return f"{group}={choice}: there is no such choice{advice}"
    if isinstance(error, OverrideParseException):
        advice = f"""put its value in two pairs of quotes: '{error.override.split("=", 1)[0]}="VALUE"'"""
        return f"{error.override!r} cannot be parsed; {advice}"
    # Hydra names the file or the word, and OmegaConf the key or a dataclass: in the cause, or in the message itself
    text = str(error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error)
    keys, types = re.findall(r"(?:full_key: |Could not override ')([\w.\[\]]+)", text), key_types(script)
    if not keys and (section := re.search(r"not a subclass of (\w+)", text)):
        keys = [next((key for key, kind in types.items() if section[1] in str(kind)), "optimizer")]
    file = re.match(r"In '(.*?)': \w+ raised while composing config:", text)
    key, place = keys[-1] if keys else "its content", f"{file[1]}.yaml: " if file else ""
    if "Key '" in text or sentence.startswith("Could not override"):
        if "." in key and f"Key '{key}'" in text:
            return f"{place}{key}: write {key.replace('.', ': {')}: VALUE{'}' * key.count('.')}"
        if key in types:
            return f"{place}{key} is a key of another optimizer; set that optimizer, or remove this key"
        return f"{place}{key}: there is no such key{did_you_mean(key, types)}; see --help and --cfg job"
    if "mandatory value" in text:
        return f"{key} is missing; set it in the YAML file"
    if file or sentence.startswith("Error merging override "):
        word = place + key if file else sentence.removeprefix("Error merging override ")
        return f"{word} must be {describe_type(key, types)}"
    return f"{key}: {' '.join(text.split('full_key:')[0].split())}" if keys else sentence


def describe_type(key: str, types: dict[str, Any]) -> str:
    """The type of a key in words: int | None is "a whole number or null". A key may name an item: sizes[1]."""
    for name in types:
        if name.startswith(f"{key}."):
            return f"a section; set its keys, such as {name}"
    name = str(types.get(key.split("[")[0], dict)).removeprefix("<class '")  # dict: a source of data.mix
    name = re.sub(r".*\[(.*?)\].*", r"\1", name) if "[" in key else re.sub(r"\[.*?\]|'>", "", name)
    return re.sub(r"\w+|\|", lambda word: TYPE_NAMES.get(word[0], word[0]), name)
