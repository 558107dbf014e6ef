"""A run that was trained, opened to write texts or to measure them."""

import tiktoken
import torch

from data import tokenizer
from model import AttentionConfig, GPTConfig
from model.attention import Need, bind, resolve, resolve_model
from model.gpt import GPT
from model.linear import for_sampling
from training import checkpoint, precision
from training.run import find_run


def open_run(
    run: str, which: str, device: str, dtype: str, attention: AttentionConfig, texts: int
) -> tuple[GPT, tiktoken.Encoding, str]:
    """Its model and tokenizer, which come from the checkpoint alone, and a line that says what they are.

    which: best or last. device, dtype: as in the config, auto or a name. texts: how many are to be written side by
    side. Raises UserError for what is not there or cannot run here.
    """
    where = precision.resolve_device(device)
    numbers = precision.resolve_dtype(dtype, where, trains=False)
    folder = find_run(run)
    path = folder / "checkpoints" / f"{which}.pt"
    if not path.exists():  # a run that was stopped before its first evaluation has no best one yet
        (path,) = path.parent.glob("*.pt")
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
