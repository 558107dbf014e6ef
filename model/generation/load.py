"""Load a trained run for generation or scoring."""

import tiktoken
import torch

from common import checkpoint_file
from common.run_dir import find_checkpoint
from data.tokenizer import from_spec
from model import AttentionConfig, GPTConfig
from model.attention import get_attention_fn, resolve_model
from model.generation.decode_linear import convert_linears
from model.gpt import GPT


def load_for_sampling(
    run: str, kind: str, device: torch.device, dtype: torch.dtype, attention: AttentionConfig, batch_size: int
) -> tuple[GPT, tiktoken.Encoding, str]:
    """Load a checkpoint -> (model in eval mode, tokenizer, one-line description). The model cannot be trained.

    kind: "best", "last" or "step-NNNNNN". dtype: of the weights. Raises UserError if the run does not exist, or if the
    attention backend cannot run on this device.
    """
    path = find_checkpoint(run, kind)
    checkpoint = checkpoint_file.load_checkpoint(path)
    config = GPTConfig.from_checkpoint(checkpoint["model_config"])
    activation_dtype = torch.float32 if device.type == "cpu" else dtype
    request = {"B": batch_size, "dtype": activation_dtype, "device": device, "grad": False}
    kernel = resolve_model(attention, config, **request)
    resolve_model(attention, config, Tq=1, positions=batch_size > 1, **request)  # samples of a batch differ in length
    model = GPT(config, checkpoint["vocab_size"], get_attention_fn(attention), weights=checkpoint["model"])
    model = convert_linears(model.requires_grad_(False).to(device).eval(), dtype)
    description = (
        f"{path}, step {checkpoint['step']:,}, {device.type} {str(dtype).removeprefix('torch.')}, "
        f"attention {kernel.requested} -> {kernel.resolved}"
    )
    return model, from_spec(checkpoint["tokenizer"]), description
