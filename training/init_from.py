"""Finetuning: start a run from the weights and the tokenizer of another run or model."""

from dataclasses import asdict, replace
from pathlib import Path

import torch.nn.functional as F

from common.checkpoint_file import load_checkpoint
from common.errors import UserError
from common.settings import format_value
from generation.load import load_pretrained
from model.config import GPTConfig
from model.gpt import GPT
from training.config import GPT2_MODELS
from training.parallel import load_weights


def load_run_tokenizer(run: str | None, checkpoint: Path | None = None) -> dict | None:
    """Load the tokenizer spec of tokenizer.run, if that is set. Raises UserError.

    checkpoint: of the run to train, if it resumes. Its spec is used, so that `run` can be removed.
    """
    if run is None:
        return None
    if checkpoint is not None:
        return load_checkpoint(checkpoint)["tokenizer"]
    _, saved = load_pretrained(run)
    return saved["tokenizer"]


def load_init_weights(init_from: str, model: GPT, tokenizer_spec: dict) -> None:
    """Load the weights that train.init_from names.

    Raises UserError if the tokenizer or the model is different.
    """
    run = init_from.removeprefix("run:")
    if init_from in GPT2_MODELS:
        run = f"hf:openai-community/{init_from}"
    path, saved = load_pretrained(run)
    may_differ = {"name": None, "start": None}
    if saved["tokenizer"] | may_differ != tokenizer_spec | may_differ:
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
    # what None stands for, once all other settings are those of the saved model
    defaults = replace(saved, n_kv_head=None, mlp_width=None)
    new = asdict(config) | {
        "n_kv_head": config.n_kv_head or defaults.kv_heads,
        "mlp_width": config.mlp_width or defaults.mlp_channels,
    }
    different = [key for key in old if old[key] != new[key] and key not in may_differ]
    return [f"model.{key}={format_value(old[key])}" for key in different]
