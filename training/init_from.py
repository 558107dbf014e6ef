"""Starts a run from the weights and the tokenizer of another run."""

from typing import Any

from common import checkpoint_file
from common.errors import UserError, format_value
from common.run_dir import find_checkpoint, has_checkpoint
from model.gpt import GPT


def load_run_tokenizer(run: str | None, name: str | None = None) -> dict | None:
    """The tokenizer's spec that tokenizer=run takes from a run; None: of none. Raises UserError.

    name: the run that is to be trained with it, which has it itself once it has a checkpoint.
    """
    if run is None:
        return None
    return checkpoint_file.load_checkpoint(find_checkpoint(name if has_checkpoint(name) else run, "best"))["tokenizer"]


def load_init_weights(init_from: str, model: GPT, about: dict[str, Any]) -> None:
    """Give `model` the best weights of the run that "run:NAME" names.

    about: what checkpoints of the new run say of it, see training/checkpoint.py. Raises UserError where the weights are
    of another tokenizer or model.
    """
    run = init_from.removeprefix("run:")
    path = find_checkpoint(run, "best")
    saved = checkpoint_file.load_checkpoint(path)
    theirs, ours = saved["tokenizer"], about["tokenizer"]
    if theirs != ours:
        raise UserError(
            f"{path} was trained with another vocabulary ({theirs['name']} of {saved['vocab_size']:,} tokens, here "
            f"{ours['name']} of {about['vocab_size']:,}); set tokenizer=run tokenizer.run={run}"
        )
    before, now = saved["model_config"], about["model_config"]
    free = {"name", "dropout"} | ({"block_size"} if now["position"] == "rotary" else set())
    differs = [f"model.{key}={format_value(value)}" for key, value in before.items()
               if value != now[key] and key not in free]  # fmt: skip
    if differs:
        raise UserError(f"{path} is another model; set {' '.join(differs)}, as it has")
    model.load_state_dict(saved["model"])
