"""Load a trained run for generation or scoring."""

import tiktoken
import torch

from data.tokenizer import from_spec
from model import AttentionConfig, GPTConfig
from model.attention import get_attention_fn, resolve_model
from model.generation.cpu_linear import replace_linears
from model.generation.pretrained import load_pretrained
from model.gpt import GPT


def load_for_sampling(
    run: str, kind: str, device: torch.device, dtype: torch.dtype, attention: AttentionConfig, batch_size: int
) -> tuple[GPT, tiktoken.Encoding, str]:
    """Load a model -> (model in eval mode, tokenizer, one-line description). The model cannot be trained.

    run, kind: see load_pretrained. dtype: of the weights. Raises UserError if the run does not exist, or if the
    attention backend cannot run on this device.
    """
    path, checkpoint = load_pretrained(run, kind)
    config = GPTConfig(**checkpoint["model_config"])
    activation_dtype = torch.float32 if device.type == "cpu" else dtype
    request = {"B": batch_size, "dtype": activation_dtype, "device": device, "grad": False}
    kernel = resolve_model(attention, config, **request)
    resolve_model(attention, config, Tq=1, positions=batch_size > 1, **request)  # samples of a batch differ in length
    model = GPT(config, checkpoint["vocab_size"], get_attention_fn(attention), weights=checkpoint["model"])
    model = replace_linears(model.requires_grad_(False).to(device).eval(), dtype, batch_size)
    step = f", step {checkpoint['step']:,}" if "step" in checkpoint else ""
    settings = f"{device.type} {str(dtype).removeprefix('torch.')}, attention {kernel.requested} -> {kernel.resolved}"
    return model, from_spec(checkpoint["tokenizer"]), f"{path}{step}, {settings}"
