"""Evaluation: validation loss, a generated sample, and attention maps."""

from dataclasses import dataclass
from math import isfinite, log
from pathlib import Path

import tiktoken
import torch
from torch import nn

from data.loader import Loader
from data.tokenizer import initial_tokens, token_bytes
from model import SamplingConfig
from model.generation.attention_maps import attention_maps, entropy, layer_entropies
from model.generation.attention_plots import plot_overview
from model.generation.engine import Prompt, generate
from model.gpt import GPT
from training.device import Runtime

MAP_TOKENS = 64  # tokens in an attention map; the picture has one map per head


@torch.no_grad()
def validation_loss(
    forward: nn.Module, loader: Loader, tokenizer: tiktoken.Encoding, windows: int | None, size: int, runtime: Runtime
) -> dict[str, float]:
    """Mean loss over validation windows: val/loss in nats per token, val/bpb in bits per byte of text.

    windows: how many to use, spread evenly over the validation split; None: all, with each token counted exactly once.
    size: windows per forward pass. The processes share the windows.
    """
    windows = min(windows or loader.val_windows, loader.val_windows)
    stride = loader.val_windows // windows
    bytes_of_token = torch.from_numpy(token_bytes(tokenizer)).to(loader.device)
    nats, num_tokens, num_bytes = [], 0, torch.zeros((), dtype=torch.int64, device=loader.device)
    forward.eval()
    for first in range(runtime.dist.rank * size, windows, runtime.dist.world_size * size):
        x, y, doc_ids = loader.batch("val", first * stride, min(size, windows - first), stride)
        with runtime.autocast():
            nats.append(forward(x, y, doc_ids=doc_ids, reduction="sum"))
        targets = y[y >= 0]
        num_tokens += targets.numel()
        num_bytes += bytes_of_token[targets].sum()
    forward.train()
    # Read from the device after the last window, and summed in float64.
    total, num_tokens, num_bytes = runtime.dist.sum(sum(loss.item() for loss in nats), num_tokens, int(num_bytes))
    return {"val/loss": total / num_tokens, "val/bpb": total / log(2) / max(1, num_bytes)}


@dataclass
class Evaluator:
    """Evaluates a model while it trains.

    forward: the model as the loop calls it. windows, size: see validation_loss. sampling: of the sample.
    maps_folder: attention maps are saved there; None: no maps.
    """

    model: GPT
    forward: nn.Module
    loader: Loader
    tokenizer: tiktoken.Encoding
    runtime: Runtime
    size: int
    sampling: SamplingConfig
    seed: int
    windows: int | None
    maps_folder: Path | None

    def evaluate(self, step: int) -> dict:
        """Metrics after `step` steps: the validation loss; on rank 0 also a sample and attention maps."""
        row = validation_loss(self.forward, self.loader, self.tokenizer, self.windows, self.size, self.runtime)
        if isfinite(row["val/loss"]) and self.runtime.dist.is_main:
            with self.runtime.autocast():
                if step > 0:  # an untrained model writes noise
                    row["sample"] = self.generate_sample(step)
                if self.maps_folder is not None:
                    row |= self.save_attention_maps(self.maps_folder / f"step-{step:06d}.png")
        return row

    def generate_sample(self, step: int) -> str:
        """A sample without a prompt."""
        prompt = Prompt(initial_tokens(self.tokenizer), self.seed + step)
        chunks = generate(self.model, self.tokenizer, [prompt], self.sampling, batch_size=1)
        return "".join(chunk.text for chunk in chunks)

    def save_attention_maps(self, picture: Path) -> dict:
        """Plot each head's attention weights on the first validation tokens -> the picture, and layer entropies."""
        x, _, doc_ids = self.loader.batch("val", 0, 1)
        doc_ids = None if doc_ids is None else doc_ids[:, :MAP_TOKENS]
        weights = attention_maps(self.model, x[:, :MAP_TOKENS], doc_ids)
        plot_overview(weights.numpy(), entropy(weights).numpy(), picture)
        return {"attention": picture} | layer_entropies(weights)
