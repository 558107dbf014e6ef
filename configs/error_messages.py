"""Error messages for wrong keys, values and YAML files: one sentence each, with a suggestion for typos."""

import difflib
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    ConfigTypeError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import YAMLError

from common.errors import format_value
from configs.schema import OPTIMIZERS, list_keys, list_types

TYPE_NAMES = {
    int: ["a whole number"],
    float: ["a number"],
    bool: ["true", "false"],
    str: ["text"],
    list: ["a list"],
    NoneType: ["null"],
}
# Keys of nanoGPT, transformers and litgpt, and the key or setting here; the first one that the script has is suggested.
_SYNONYMS = """
learning_rate                optimizer.lr
min_lr                       schedule.final_fraction
max_iters                    train.steps
epochs                       train.steps
num_train_epochs             train.steps
lr_decay_iters               train.steps
gradient_accumulation_steps  train.micro_batch_size
per_device_train_batch_size  train.micro_batch_size
eval_interval                eval.every
log_interval                 eval.every
save_every                   checkpoint.every
save_steps                   checkpoint.every
out_dir                      name run
dataset                      data
precision                    dtype
gpu                          device
flash                        attention=flash
wandb_log                    wandb.mode
hidden_size                  model.n_embd
d_model                      model.n_embd
seq_len                      model.block_size
seq_length                   model.block_size
context_length               model.block_size
temp                         temperature eval.sample.temperature
start                        prompt
length                       max_new_tokens
max_length                   max_new_tokens
n                            num_samples
"""
SYNONYMS = {key: settings for key, *settings in map(str.split, _SYNONYMS.strip().splitlines())}
LIST_OR_SECTION = "a list cannot replace a section, nor a section a list; see --cfg job"


def one_of(options: list[str]) -> str:
    """[a, b, c] -> "a, b or c"."""
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


def find_similar(wrong: str, options: Iterable[str]) -> list[str]:
    """The options that the user may have meant: with the same last part (for steps, train.steps), else the nearest."""
    options, leaf = list(options), wrong.split(".")[-1]
    return (
        [option for option in options if option.split(".")[-1] == leaf]
        or [setting for setting in SYNONYMS.get(leaf, []) if setting.split("=")[0] in options][:1]
        or difflib.get_close_matches(wrong, options, n=1)
        or [option for option in options if difflib.get_close_matches(leaf, [option.split(".")[-1]])][:1]
        or [option for option in options if wrong.startswith(option)]  # attention=flashattention
    )


def did_you_mean(wrong: str, options: Iterable[str]) -> str:
    """A suggestion for a message; empty if no option is similar."""
    similar = find_similar(wrong, options)
    return f" (did you mean {one_of(similar)}?)" if similar else ""


def explain_unknown_flag(script: str, word: str, next_word: str = "-") -> str:
    """One sentence for --KEY=VALUE, or for --KEY VALUE, which other programs accept."""
    flag, _, given = word.partition("=")
    similar = find_similar(flag.lstrip("-").replace("-", "_"), list_keys(script))
    value = given or ("VALUE" if "=" in next_word or next_word.startswith("-") else next_word)
    advice = one_of([key if "=" in key else f"{key}={value}" for key in similar]) if similar else None
    return f"{flag} is not a flag of this command; {f'set {advice}' if advice else 'see --help'}"


def explain_error(error: Exception) -> str:
    """One sentence for an exception of Hydra, OmegaConf or PyYAML."""
    if not str(error) and isinstance(error.__cause__, Exception):  # Hydra hides some errors of OmegaConf
        error = error.__cause__
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {str(error).splitlines()[0]}".removeprefix(": ")
    if isinstance(error, YAMLError | ValueError):
        return f"a YAML file cannot be read: {' '.join(str(error).split())}; correct that file"
    sentence = " ".join(str(error).split("Config search path:")[0].split())
    place = sentence.removeprefix("Error merging override ++").split(": ConfigTypeError raised")[0]  # a word, or a file
    return sentence if place == sentence else f"{place}: {LIST_OR_SECTION}"


def explain_schema_error(error: OmegaConfBaseException, composed: DictConfig, types: dict[str, Any]) -> str:
    """One sentence for a key or a value that does not fit the schema. types: the types of all keys."""
    key = error.full_key
    if isinstance(error, ConfigKeyError):
        if owners := [name for name, kind in OPTIMIZERS.items() if key in list_types(kind, "optimizer.")]:
            return f"{key} is a key of optimizer={one_of(owners)}; set that optimizer, or remove this key"
        return f"{key}: there is no such key{did_you_mean(key, types)}; see --help and --cfg job"
    if isinstance(error, MissingMandatoryValue):
        return f"{key} has no value; set one, or add text@mix.NAME to the defaults of the YAML file of a mix"
    is_type_error = isinstance(error, ValidationError | ConfigTypeError)
    if not is_type_error or isinstance(error, InterpolationResolutionError):
        return explain_error(error)
    if not key:  # OmegaConf does not say where
        return LIST_OR_SECTION
    value = OmegaConf.select(composed, key)
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    kind = types[key.split("[")[0]]
    options = get_args(kind) if isinstance(kind, UnionType) else (kind,)  # int | None -> (int, NoneType)
    if "[" in key:  # an item of a list
        options = get_args(options[0])
    names = [name for option in options for name in TYPE_NAMES.get(get_origin(option) or option, ["a section"])]
    advice = ""
    if names[0] == "a list" and value is not None:
        advice = f"; set {key}=[{format_value(value)}]"
    elif names[0] == "a section":
        first_key = next((name for name in types if name.startswith(f"{key}.")), None)  # None: the sources of a mix
        in_yaml = "set it in a YAML file (docs/data.md, Mix sources)"
        example = f"{first_key}={format_value(value)}" if isinstance(value, str | int) else first_key
        advice = f"; set its keys, such as {example}" if first_key else f"; {in_yaml}"
    return f"{key}={format_value(value)} must be {one_of(names)}{advice}"
