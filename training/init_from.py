"""Finetuning: start a run from the weights and the tokenizer of another run, or of a model for transformers."""

from dataclasses import asdict, replace

import torch.nn.functional as F

from common.errors import UserError
from common.run_dir import has_checkpoint
from common.settings import format_value
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
    run = f"hf:openai-community/{init_from}" if init_from in GPT2_MODELS else init_from.removeprefix("run:")
    path, saved = load_pretrained(run)
    vocab_size, config = saved["vocab_size"], GPTConfig(**saved["model_config"])
    if saved["tokenizer"] | {"name": None} != metadata["tokenizer"] | {"name": None}:
        raise UserError(f"{path} has another tokenizer than this run; set tokenizer=run tokenizer.run={run}")
    may_differ = {"name", "dropout", "pad_vocab_multiple"}
    if model.config.position == "rotary" or config.block_size >= model.config.block_size:
        may_differ.add("block_size")
    if config.max_ngram == 1:
        may_differ.add("ngram_table_size")
    theirs = asdict(config) | {"n_kv_head": config.kv_heads, "mlp_width": config.mlp_channels}
    # the values that null stands for, if all other settings are those of the saved model
    defaults = {"n_kv_head": config.n_head, "mlp_width": replace(config, mlp_width=None).mlp_channels}
    ours = asdict(model.config)
    ours |= {key: value for key, value in defaults.items() if ours[key] is None}
    different = [
        f"model.{key}={format_value(value)}"
        for key, value in theirs.items()
        if value != ours[key] and key not in may_differ
    ]
    if different:
        raise UserError(f"{path} has another model than this run; set {' '.join(different)}")
    weights = dict(saved["model"])
    if model.wpe is not None:
        weights["wpe.weight"] = weights["wpe.weight"][: model.config.block_size]
    for name in ("wte.weight", "lm_head.weight"):  # this run can pad the vocabulary to another size
        weights[name] = F.pad(weights[name][:vocab_size], (0, 0, 0, model.wte.num_embeddings - vocab_size))
    load_weights(model, weights)
