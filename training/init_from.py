"""Finetuning: start a run from the weights and the tokenizer of another run."""

from common.checkpoint_file import load_checkpoint
from common.errors import UserError, format_value
from common.run_dir import find_checkpoint, has_checkpoint
from model.config import ADDED_SETTINGS
from model.gpt import GPT


def load_run_tokenizer(run: str | None, name: str | None = None) -> dict | None:
    """Load the tokenizer spec of `run` (the setting tokenizer.run); None if `run` is None. Raises UserError.

    name: the run to train. If it has a checkpoint, its spec is used, so that `run` can be removed.
    """
    if run is None:
        return None
    path = find_checkpoint(name, "last") if has_checkpoint(name) else find_checkpoint(run, "best")
    return load_checkpoint(path)["tokenizer"]


def load_init_weights(init_from: str, model: GPT, metadata: dict) -> None:
    """Load the best weights of the run that init_from="run:NAME" names into `model`.

    metadata: see make_checkpoint_metadata, of the new run. Raises UserError if the tokenizer or the model is different.
    """
    run = init_from.removeprefix("run:")
    path = find_checkpoint(run, "best")
    saved = load_checkpoint(path)
    if saved["tokenizer"] != metadata["tokenizer"]:
        raise UserError(
            f"{path} has another tokenizer ({saved['tokenizer']['name']} with {saved['vocab_size']:,} tokens) than "
            f"this run ({metadata['tokenizer']['name']} with {metadata['vocab_size']:,}); "
            f"set tokenizer=run tokenizer.run={run}"
        )
    T = model.config.block_size
    fits = model.config.position == "rotary" or saved["model_config"]["block_size"] >= T
    may_differ = {"name", "dropout"} | ({"block_size"} if fits else set())
    different = [
        f"model.{key}={format_value(value)}"
        for key, value in (ADDED_SETTINGS | saved["model_config"]).items()
        if value != metadata["model_config"][key] and key not in may_differ
    ]
    if different:
        raise UserError(f"{path} has another model than this run; set {' '.join(different)}")
    if model.wpe is not None:
        saved["model"]["wpe.weight"] = saved["model"]["wpe.weight"][:T]
    model.load_state_dict(saved["model"])
