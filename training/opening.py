"""A run that was trained, opened to write texts, to measure them, or to go on from."""

from pathlib import Path
from typing import Any

import tiktoken
import torch

from data import tokenizer
from errors import UserError
from model import AttentionConfig, GPTConfig
from model.attention import Need, bind, resolve, resolve_model
from model.gpt import GPT
from model.linear import for_sampling
from training import checkpoint, precision
from training.run import find_run, has_checkpoint


def open_run(
    run: str, which: str, device: str, dtype: str, attention: AttentionConfig, texts: int
) -> tuple[GPT, tiktoken.Encoding, str]:
    """Its model and tokenizer, which come from the checkpoint alone, and a line that says what they are.

    which: best or last. device, dtype: as in the config, auto or a name. texts: how many are to be written side by
    side. Raises UserError for what is not there or cannot run here.
    """
    where = precision.resolve_device(device)
    numbers = precision.resolve_dtype(dtype, where, trains=False)
    path = _checkpoint(run, which)
    saved = checkpoint.load(path)
    shape = GPTConfig(**saved["model_config"])
    computes = torch.float32 if where.type == "cpu" else numbers  # on a CPU rounded weights alone are rounded
    kernel = resolve_model(attention, shape, B=texts, dtype=computes, device=where, grad=False)
    H, G, D = shape.n_head, shape.kv_heads, shape.head_size
    resolve(attention, Need(  # a token more: texts of several lengths stand at several places
        B=texts, Tq=1, Tk=shape.block_size, H=H, G=G, D=D, Dv=D, dtype=computes, device=where, grad=False,
        positions=texts > 1,
    ))  # fmt: skip
    model = GPT(shape, saved["vocab_size"], bind(attention), weights=saved["model"]).requires_grad_(False)
    model = for_sampling(model.to(where).eval(), numbers)
    about = f"{path}, step {saved['step']:,}, {where.type} {str(numbers).removeprefix('torch.')}"
    about += f", attention {kernel.requested} -> {kernel.resolved}"
    return model, tokenizer.from_spec(saved["tokenizer"]), about


def _checkpoint(run: str, which: str) -> Path:
    path = find_run(run) / "checkpoints" / f"{which}.pt"
    if not path.exists():  # a run that was stopped before its first evaluation has no best one yet
        (path,) = path.parent.glob("*.pt")
    return path


def tokenizer_of(run: str | None, name: str | None = None) -> dict | None:
    """The tokenizer's spec that tokenizer=run takes from a run; None: of none. Raises UserError.

    name: the run that is to be trained with it, which has it itself once it has a checkpoint.
    """
    if run is None:
        return None
    return checkpoint.load(_checkpoint(name if has_checkpoint(name) else run, "best"))["tokenizer"]


def start_from(init_from: str, model: GPT, about: dict[str, Any]) -> None:
    """Give `model` the best weights of the run that "run:NAME" names.

    about: what checkpoints of the new run say of it, see training/checkpoint.py. Raises UserError where the weights are
    of another tokenizer or model.
    """
    run = init_from.removeprefix("run:")
    path = _checkpoint(run, "best")
    saved = checkpoint.load(path)
    theirs, ours = saved["tokenizer"], about["tokenizer"]
    if theirs != ours:
        raise UserError(
            f"{path} was trained with another vocabulary ({theirs['name']} of {saved['vocab_size']:,} tokens, here "
            f"{ours['name']} of {about['vocab_size']:,}); set tokenizer=run tokenizer.run={run}"
        )
    before, now = saved["model_config"], about["model_config"]
    free = {"name", "dropout"} | ({"block_size"} if now["position"] == "rotary" else set())
    differs = [f"model.{key}={str(value).replace('None', 'null')}" for key, value in before.items()
               if value != now[key] and key not in free]  # fmt: skip
    if differs:
        raise UserError(f"{path} is another model; set {' '.join(differs)}, as it has")
    model.load_state_dict(saved["model"])
