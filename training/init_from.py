"""Finetuning: start a run from the weights and the tokenizer of another run, or of a model for transformers."""

from dataclasses import asdict, replace

import torch.nn.functional as F

from common.errors import UserError, format_value
from common.run_dir import has_checkpoint
from model.config import GPTConfig
from model.gpt import GPT
from model.pretrained import load_pretrained
from training.config import GPT2_MODELS
from training.sharding import load_weights


def load_run_tokenizer(run: str | None, name: str | None = None) -> dict | None:
    """Load the tokenizer spec of `run` (the setting tokenizer.run); None if `run` is None. Raises UserError.

    name: the run to train. If it has a checkpoint, its spec is used, so that `run` can be removed.
    """
    if run is None:
        return None
    _, saved = load_pretrained(name, "last") if has_checkpoint(name) else load_pretrained(run)
    return saved["tokenizer"]


def load_init_weights(init_from: str, model: GPT, metadata: dict) -> None:
    """Load the weights that train.init_from names into `model`: the best ones of a run, or a model for transformers.

    metadata: see make_checkpoint_metadata, of the new run. Raises UserError if the tokenizer or the model is different.
    """
    run = resolve_init_from(init_from)
    path, saved = load_pretrained(run)
    if _without_name(saved["tokenizer"]) != _without_name(metadata["tokenizer"]):
        raise UserError(
            f"{path} has another tokenizer ({saved['tokenizer']['name']} with {saved['vocab_size']:,} tokens) than "
            f"this run ({metadata['tokenizer']['name']} with {metadata['vocab_size']:,}); "
            f"set tokenizer=run tokenizer.run={run}"
        )
    saved_config, T = GPTConfig.from_checkpoint(saved["model_config"]), model.config.block_size
    fits = model.config.position == "rotary" or saved_config.block_size >= T
    may_differ = {"name", "dropout", "pad_vocab_multiple"} | ({"block_size"} if fits else set())
    may_differ |= {"ngram_table_size"} if saved_config.max_ngram == 1 else set()
    # the values that null stands for, if all other settings are those of the saved model
    settings = asdict(model.config) | {
        "n_kv_head": model.config.n_kv_head or saved_config.n_head,
        "mlp_width": model.config.mlp_width or replace(saved_config, mlp_width=None).mlp_channels,
    }
    saved_settings = asdict(saved_config) | {"n_kv_head": saved_config.kv_heads, "mlp_width": saved_config.mlp_channels}
    different = [
        f"model.{key}={format_value(value)}"
        for key, value in saved_settings.items()
        if value != settings[key] and key not in may_differ
    ]
    if different:
        raise UserError(f"{path} has another model than this run; set {' '.join(different)}")
    weights = dict(saved["model"])
    if model.wpe is not None:
        weights["wpe.weight"] = weights["wpe.weight"][:T]
    for name in ("wte.weight", "lm_head.weight"):
        V = saved["vocab_size"]
        weights[name] = F.pad(weights[name][:V], (0, 0, 0, model.wte.num_embeddings - V))
    load_weights(model, weights)


def resolve_init_from(init_from: str) -> str:
    """The name of the model in train.init_from, for load_pretrained."""
    return f"hf:openai-community/{init_from}" if init_from in GPT2_MODELS else init_from.removeprefix("run:")


def _without_name(spec: dict) -> dict:
    return {key: value for key, value in spec.items() if key != "name"}
