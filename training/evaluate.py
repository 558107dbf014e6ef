"""Evaluation: validation loss, a generated sample, attention statistics and attention maps."""

from dataclasses import dataclass, replace
from itertools import takewhile
from math import isfinite, log
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.errors import UserError
from common.settings import unescape
from common.system import peak_memory_bytes
from data.loader import Loader
from data.tokenizer import Tokenizer, token_bytes
from generation.attention_maps import attention_maps, attention_statistics
from generation.attention_plots import plot_attention
from generation.engine import Prompt, generate
from model.gpt import GPT
from training.checkpoint import TrainState
from training.config import RunConfig
from training.device import Runtime
from training.signals import StopRequest

MAP_TOKENS = 64  # tokens in an attention map; the picture has one map per head
STATISTICS_WINDOWS = 4  # validation windows for the attention statistics


@dataclass
class Evaluator:
    """Evaluates a model while it trains."""

    config: RunConfig
    runtime: Runtime
    model: GPT
    wrapped_model: nn.Module  # the model as the loop calls it
    loader: Loader
    tokenizer: Tokenizer
    batch_size: int  # windows per forward pass
    folder: Path  # run folder
    stop: StopRequest  # a signal ends an evaluation after its current forward pass

    def evaluate(self, state: TrainState, step_metrics: dict[str, Any]) -> dict[str, Any]:
        """Evaluate the model, and record the loss. Returns all metrics of the step, or {} if a signal stops it."""
        state.unlogged = step_metrics
        if state.stopped:
            return {}
        dist = self.runtime.dist
        model, wrapped_model = self.runtime.parallel.unshard(self.model, self.wrapped_model)
        metrics: dict[str, Any] = self.compute_validation_loss(wrapped_model)
        if isfinite(metrics["val/loss"]) and dist.is_main:
            with self.runtime.autocast():
                if state.step > 0:  # an untrained model writes noise
                    metrics["sample"] = self.generate_sample(model, state.step)
                metrics |= self.measure_attention(model, state.step)
        # a signal to any process may have cut the loss or the sample short
        (signals,) = dist.all_reduce(self.stop.requested)
        state.stopped = signals > 0
        if state.stopped:
            return {}
        state.unlogged = {}
        if (
            state.step > 0 or self.config.train.init_from is not None
        ):  # random weights are never the best
            state.record_evaluation(metrics["val/loss"], metrics["val/bpb"])
        return (
            step_metrics | metrics | {"peak_memory_bytes": peak_memory_bytes(self.runtime.device)}
        )

    @torch.no_grad()
    def compute_validation_loss(self, model: nn.Module) -> dict[str, float]:
        """Mean loss over evenly spread validation windows: val/loss in nats per token, val/bpb in bits per byte.

        Tokens of prompts do not count. Raises UserError if the windows have no other tokens.
        """
        loader, B, dist = self.loader, self.batch_size, self.runtime.dist
        windows = min(self.config.eval.windows or loader.val_windows, loader.val_windows)
        stride = loader.val_windows / windows
        bytes_of_token = torch.from_numpy(token_bytes(self.tokenizer)).to(loader.device)
        nats, counts = (
            [],
            torch.zeros(2, dtype=torch.int64, device=loader.device),
        )  # of tokens and bytes
        model.eval()
        for first in range(dist.rank * B, windows, dist.world_size * B):
            if self.stop.requested:
                break
            x, y, doc_ids = loader.batch("val", first, min(B, windows - first), stride)
            with self.runtime.autocast():
                nats.append(model(x, y, doc_ids=doc_ids, reduction="sum"))
            counts += torch.stack([y >= 0, bytes_of_token[y.clamp(min=0)] * (y >= 0)]).sum(
                dim=(1, 2)
            )
        model.train()
        # the losses are read from the device only after the last window, and summed in float64
        total, num_tokens, num_bytes = dist.all_reduce(
            sum(loss.item() for loss in nats), *counts.tolist()
        )
        if not num_tokens and not self.stop.requested:
            raise UserError(
                f"the {windows} validation windows have only prompts; set a larger eval.windows, or null"
            )
        return {
            "val/loss": total / max(1, num_tokens),
            "val/bpb": total / log(2) / max(1, num_bytes),
        }

    def generate_sample(self, model: GPT, step: int) -> str:
        """Generate a sample without a prompt. A signal ends it."""
        prompt = Prompt([self.tokenizer.start_token], self.config.seed + step)
        sampling = replace(self.config.eval.sample, stop=unescape(self.config.eval.sample.stop))
        chunks = generate(model, self.tokenizer, [prompt], sampling, batch_size=1)
        return "".join(chunk.text for chunk in takewhile(lambda _: not self.stop.requested, chunks))

    def measure_attention(self, model: GPT, step: int) -> dict[str, Any]:
        """Attention maps of the first validation tokens, and statistics of each head on a few windows, if requested."""
        loader, metrics = self.loader, {}
        if self.config.eval.attention_maps:
            x, _, doc_ids = loader.batch("val", 0, 1)
            weights = attention_maps(
                model, x[:, :MAP_TOKENS], None if doc_ids is None else doc_ids[:, :MAP_TOKENS]
            )
            path = self.folder / "attention" / f"step-{step:06d}.png"
            plot_attention(weights, path)
            metrics = {"attention": path}
        if self.config.eval.attention_stats:
            windows = min(STATISTICS_WINDOWS, loader.val_windows)
            x, _, doc_ids = loader.batch("val", 0, windows, loader.val_windows / windows)
            metrics |= attention_statistics(model, x, doc_ids)
        return metrics
