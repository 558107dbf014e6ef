"""Error messages for wrong keys, values and YAML files: one sentence each, with a suggestion for typos."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

from hydra.errors import MissingConfigException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from configs.schema import key_types

TYPE_NAMES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "None": "null"}
TYPE_NAMES |= {"list": "a list such as [1]", "dict": "a section of a YAML file", "|": "or"}
# Our keys and settings, and the keys of nanoGPT, transformers and litgpt for which they are suggested.
SYNONYMS = {
    "optimizer.lr": "learning_rate",
    "train.steps": "max_iters epochs num_train_epochs lr_decay_iters",
    "train.micro_batch_size": "gradient_accumulation_steps per_device_train_batch_size",
    "eval.every": "eval_interval log_interval",
    "name": "out_dir",
    "model.n_embd": "hidden_size d_model",
    "model.block_size": "seq_len seq_length context_length",
    "prompt": "start",
}


def find_similar(wrong: str, options: Iterable[str]) -> list[str]:
    """The option that the user probably meant, or several with the same last part. Empty if none is similar."""
    options, leaf = list(options), wrong.split(".")[-1]
    return (
        [ours for ours, theirs in SYNONYMS.items() if leaf in theirs.split() and ours in options]
        or [option for option in options if option.split(".")[-1] == leaf and option != wrong]
        or difflib.get_close_matches(wrong, options, n=1)
    )


def did_you_mean(wrong: str, options: Iterable[str]) -> str:
    """A suggestion for a message; empty if no option is similar."""
    similar = find_similar(wrong, options)
    return f" (did you mean {' or '.join(similar)}?)" if similar else ""


def explain_error(script: str, error: BaseException) -> str:
    """One sentence for an exception of Hydra, OmegaConf or PyYAML while a config is composed."""
    sentence = " ".join(re.split("Config search path|full_key:", str(error))[0].split())
    if isinstance(error, RecursionError):
        return "a YAML file contains itself, through its defaults or an alias (*name); remove that entry"
    if isinstance(error, MissingConfigException):
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        return f"{group}={choice}: {no_such_choice(choice, error.options or [])}"
    if isinstance(error, YAMLError):
        return f"a YAML file cannot be read: {sentence}; correct that file"
    # Hydra names the file or the word, and OmegaConf the key: in the cause, or in the message itself
    text = str(error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error)
    keys = re.findall(r"(?:full_key: |Could not override ')([\w.\[\]]+)", text)
    key, types = keys[-1] if keys else "", key_types(script)
    place = f"{file[1]}.yaml: " if (file := re.match(r"In '(.*?)': ", sentence)) else ""
    if "Key '" in text or sentence.startswith("Could not override"):
        if key in types:
            return f"{place}{key} is a key of another optimizer; set that optimizer, or remove this key"
        return f"{place}{key}: there is no such key{did_you_mean(key, types)}; see --help and --cfg job"
    if sentence.startswith("Error merging override ") and key.split("[")[0] in types:
        return f"{sentence.removeprefix('Error merging override ')} must be {describe_type(key, types)}"
    return f"{place}{key}: {' '.join(text.split('full_key:')[0].split())}" if key else sentence


def no_such_choice(choice: str, options: Iterable[str]) -> str:
    """Advice for a choice of a group that does not exist."""
    return f"there is no such choice{did_you_mean(choice, options)}; set {', '.join(sorted(options))}"


def describe_type(key: str, types: dict[str, Any]) -> str:
    """The type of a key in words: int | None is "a whole number or null". A key may name an item: sizes[1]."""
    for name in types:
        if name.startswith(f"{key}."):
            return f"a section; set its keys, such as {name}"
    annotation = types[key.split("[")[0]]
    name = str(annotation) if "[" in key else getattr(annotation, "__name__", str(annotation))
    name = re.sub(r".*\[(.*?)\].*", r"\1", name) if "[" in key else re.sub(r"\[.*?\]", "", name)
    return re.sub(r"\w+|\|", lambda word: TYPE_NAMES.get(word[0], word[0]), name)
