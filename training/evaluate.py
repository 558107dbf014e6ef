"""Evaluation during training: validation loss, a generated sample, and attention statistics."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.machine import peak_memory_bytes
from common.process import StopRequest
from common.settings import unescape
from data.loader import Loader
from data.tokenizer import token_bytes
from generation.attention_maps import attention_maps, attention_statistics, plot_attention
from generation.engine import Prompt, generate
from model.gpt import GPT
from training.config import EvalConfig
from training.run_folder import RunFolder
from training.runtime import Runtime
from training.train_state import TrainState

MAP_TOKENS = 64  # tokens in an attention map; the picture has one map per head
STATISTICS_WINDOWS = 4  # validation windows for the attention statistics


@dataclass
class Evaluator:
    """Evaluates a model while it trains."""

    config: EvalConfig
    runtime: Runtime
    loader: Loader
    run: RunFolder
    stop: StopRequest  # a signal ends an evaluation after its current forward pass
    model: GPT
    wrapped_model: nn.Module  # the model as the loop calls it

    def __post_init__(self) -> None:
        bytes_of_token = token_bytes(self.loader.tokenizer)
        self.bytes_of_token = torch.from_numpy(bytes_of_token).to(self.loader.device)

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        """Evaluate the model, and record the loss in `state`. All processes call this method.

        Returns the metrics. If a signal stops the evaluation, there are none, and state.stopped is
        true in all processes.
        """
        if state.stopped:
            return {}
        dist = self.runtime.dist
        model, wrapped_model = self.runtime.parallel.unshard(self.model, self.wrapped_model)
        metrics: dict[str, Any] = self.compute_validation_loss(wrapped_model)
        if math.isfinite(metrics["val/loss"]) and dist.is_main:
            model.eval()
            with self.runtime.autocast():
                if state.step > 0:  # an untrained model writes noise
                    metrics |= self.generate_sample(model, state.step)
                metrics |= self.measure_attention(model, state.step)
            model.train()
        # a signal to any process may have cut the loss or the sample short
        (signals,) = dist.all_reduce(self.stop.requested)
        if signals > 0:
            state.stopped = True
            return {}
        # random weights are never the best
        if state.step > 0 or state.config.init_from is not None:
            state.record_evaluation(metrics["val/loss"], metrics["val/bpb"])
        metrics["peak_memory_bytes"] = peak_memory_bytes(self.runtime.device)
        return metrics

    @torch.no_grad()
    def compute_validation_loss(self, model: nn.Module) -> dict[str, float]:
        """Mean loss over evenly spread validation windows.

        Returns val/loss in nats per token and val/bpb in bits per byte. Tokens of prompts do not
        count. Raises UserError if the windows have no other tokens.
        """
        loader = self.loader
        dist = self.runtime.dist
        B = self.runtime.micro_batch_size
        windows = min(self.config.windows or loader.val_windows, loader.val_windows)
        stride = loader.val_windows / windows
        losses: list[Tensor] = []  # in nats, summed over the tokens of a batch
        counts = torch.zeros(2, dtype=torch.int64, device=loader.device)  # of tokens and bytes
        model.eval()
        for first in range(dist.rank * B, windows, dist.world_size * B):
            if self.stop.requested:
                break
            x, y, doc_ids = loader.batch("val", first, min(B, windows - first), stride)
            with self.runtime.autocast():
                losses.append(model(x, y, doc_ids=doc_ids, reduction="sum"))
            is_target = y >= 0
            target_bytes = self.bytes_of_token[y.clamp(min=0)] * is_target
            counts += torch.stack([is_target, target_bytes]).sum(dim=(1, 2))
        model.train()
        # the losses are read from the device after the last window, and summed in float64
        nats = sum(loss.item() for loss in losses)
        total, num_tokens, num_bytes = dist.all_reduce(nats, *counts.tolist())
        if num_tokens == 0 and not self.stop.requested:
            raise UserError(
                f"the {windows} validation windows have only prompts; set a larger eval.windows, "
                "or null"
            )
        return {
            "val/loss": total / max(1, num_tokens),
            "val/bpb": total / math.log(2) / max(1, num_bytes),
        }

    def generate_sample(self, model: GPT, step: int) -> dict[str, Any]:
        """Generate a sample without a prompt. A signal ends it."""
        tokenizer = self.loader.tokenizer
        prompt = Prompt([tokenizer.start_token], self.loader.seed + step)
        sampling = replace(self.config.sample, stop=unescape(self.config.sample.stop))
        text = ""
        for chunk in generate(model, tokenizer, [prompt], sampling, batch_size=1):
            if self.stop.requested:
                break
            text += chunk.text
        return {"sample": text}

    def measure_attention(self, model: GPT, step: int) -> dict[str, Any]:
        """Attention maps and attention statistics, if the config requests them."""
        loader = self.loader
        metrics: dict[str, Any] = {}
        if self.config.attention_maps:
            x, _, doc_ids = loader.batch("val", 0, 1)
            if doc_ids is not None:
                doc_ids = doc_ids[:, :MAP_TOKENS]
            picture = f"attention/step-{step:06d}.png"
            maps = attention_maps(model, x[:, :MAP_TOKENS], doc_ids)
            plot_attention(maps, self.run.folder / picture)
            metrics["attention_maps"] = picture
        if self.config.attention_stats:
            windows = min(STATISTICS_WINDOWS, loader.val_windows)
            x, _, doc_ids = loader.batch("val", 0, windows, loader.val_windows / windows)
            metrics |= attention_statistics(model, x, doc_ids)
        return metrics
