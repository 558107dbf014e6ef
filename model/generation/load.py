"""A run that was trained, opened to write texts, to measure them, or to go on from."""

import tiktoken
import torch

from common import checkpoint_file
from common.run_dir import find_checkpoint
from data import tokenizer
from model import AttentionConfig, GPTConfig
from model.attention import AttentionRequest, get_attention_fn, resolve, resolve_model
from model.generation.decode_linear import convert_linears
from model.gpt import GPT


def load_for_sampling(
    run: str, which: str, device: torch.device, dtype: torch.dtype, attention: AttentionConfig, texts: int
) -> tuple[GPT, tiktoken.Encoding, str]:
    """Its model and tokenizer, which come from the checkpoint alone, and a line that says what they are.

    which: best or last. texts: how many are to be written side by
    side. Raises UserError for what is not there or cannot run here.
    """
    path = find_checkpoint(run, which)
    saved = checkpoint_file.load_checkpoint(path)
    shape = GPTConfig(**saved["model_config"])
    computes = torch.float32 if device.type == "cpu" else dtype  # on a CPU rounded weights alone are rounded
    kernel = resolve_model(attention, shape, B=texts, dtype=computes, device=device, grad=False)
    H, G, D = shape.n_head, shape.kv_heads, shape.head_dim
    resolve(attention, AttentionRequest(  # a token more: texts of several lengths stand at several places
        B=texts, Tq=1, Tk=shape.block_size, H=H, G=G, D=D, Dv=D, dtype=computes, device=device, grad=False,
        positions=texts > 1,
    ))  # fmt: skip
    model = GPT(shape, saved["vocab_size"], get_attention_fn(attention), weights=saved["model"]).requires_grad_(False)
    model = convert_linears(model.to(device).eval(), dtype)
    about = f"{path}, step {saved['step']:,}, {device.type} {str(dtype).removeprefix('torch.')}"
    about += f", attention {kernel.requested} -> {kernel.resolved}"
    return model, tokenizer.from_spec(saved["tokenizer"]), about
