"""Finetuning: start a run from the weights and the tokenizer of another run, or of a model for transformers."""

from dataclasses import asdict, replace

import torch.nn.functional as F

from common.errors import UserError
from common.settings import format_value
from generation.load import load_pretrained
from generation.run_paths import has_checkpoint
from model.config import GPTConfig
from model.gpt import GPT
from training.config import GPT2_MODELS
from training.parallel import load_weights


def load_run_tokenizer(run: str | None, name: str | None = None) -> dict | None:
    """Load the tokenizer spec of tokenizer.run, if that is set. Raises UserError.

    name: the run to train. If it has a checkpoint, its spec is used, so that `run` can be removed.
    """
    if run is None:
        return None
    _, saved = load_pretrained(name, "last") if has_checkpoint(name) else load_pretrained(run)
    return saved["tokenizer"]


def load_init_weights(
    init_from: str | None, name: str | None, model: GPT, tokenizer_spec: dict
) -> None:
    """Load the weights that train.init_from names, unless the run `name` resumes from its own checkpoint.

    Raises UserError if the tokenizer or the model is different.
    """
    if init_from is None or has_checkpoint(name):
        return
    run = (
        f"hf:openai-community/{init_from}"
        if init_from in GPT2_MODELS
        else init_from.removeprefix("run:")
    )
    path, saved = load_pretrained(run)
    may_differ = {"name": None, "start": None}
    if saved["tokenizer"] | may_differ != tokenizer_spec | may_differ:
        raise UserError(
            f"{path} has another tokenizer than this run; set tokenizer=run tokenizer.run={run}"
        )
    vocab_size, config = saved["vocab_size"], GPTConfig.from_saved(saved["model_config"])
    if different := _find_different_settings(config, model.config):
        raise UserError(f"{path} has another model than this run; set {' '.join(different)}")
    weights = dict(saved["model"])
    if model.wpe is not None:
        weights["wpe.weight"] = weights["wpe.weight"][: model.config.block_size]
    for name in ("wte.weight", "lm_head.weight"):  # this run can pad the vocabulary to another size
        weights[name] = F.pad(
            weights[name][:vocab_size], (0, 0, 0, model.wte.num_embeddings - vocab_size)
        )
    load_weights(model, weights)


def _find_different_settings(saved: GPTConfig, config: GPTConfig) -> list[str]:
    """Overrides of `config` that give the saved model, such as model.n_layer=2."""
    may_differ = {"name", "dropout", "pad_vocab_multiple"}
    if config.position == "rotary" or saved.block_size >= config.block_size:
        may_differ.add("block_size")
    if saved.max_ngram == 1:
        may_differ.add("ngram_table_size")
    old = asdict(saved) | {"n_kv_head": saved.kv_heads, "mlp_width": saved.mlp_channels}
    # the values that null stands for, if all other settings are those of the saved model
    null_values = {
        "n_kv_head": saved.n_head,
        "mlp_width": replace(saved, mlp_width=None).mlp_channels,
    }
    new = {
        key: null_values.get(key) if value is None else value
        for key, value in asdict(config).items()
    }
    different = [key for key in old if old[key] != new[key]]
    return [f"model.{key}={format_value(old[key])}" for key in different if key not in may_differ]
