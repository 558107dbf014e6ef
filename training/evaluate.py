"""Evaluation: validation loss, a generated sample, attention statistics and attention maps."""

from dataclasses import replace
from math import isfinite, log
from pathlib import Path
from typing import Any

import tiktoken
import torch
from torch import nn

from common.errors import UserError
from common.interrupt import StopRequest
from common.system import peak_memory_bytes
from data.loader import Loader
from data.tokenizer import initial_tokens, token_bytes
from model.attention.head_statistics import entropy
from model.generation.attention_maps import attention_maps, attention_statistics, layer_entropies
from model.generation.attention_plots import plot_attention
from model.generation.config import unescape
from model.generation.engine import Prompt, generate
from model.gpt import GPT
from training.checkpoint import TrainState
from training.config import RunConfig
from training.device import Runtime

MAP_TOKENS = 64  # tokens in an attention map; the picture has one map per head
STATISTICS_WINDOWS = 4  # validation windows for the attention statistics


class Evaluator:
    """Evaluates a model while it trains.

    config: the config of train.py. wrapped_model: the model as the loop calls it (Runtime.wrap). batch_size: windows
    per forward pass. folder: of the run. stop: a signal ends an evaluation after its forward pass.
    """

    def __init__(
        self, config: RunConfig, runtime: Runtime, model: GPT, wrapped_model: nn.Module, loader: Loader,
        tokenizer: tiktoken.Encoding, batch_size: int, folder: Path, stop: StopRequest,
    ):  # fmt: skip
        self.config, self.runtime, self.model, self.wrapped_model = config, runtime, model, wrapped_model
        self.loader, self.tokenizer, self.batch_size, self.stop = loader, tokenizer, batch_size, stop
        self.maps_folder = folder / "attention"
        self.windows = loader.val_windows
        if config.eval.batches is not None:
            self.windows = min(config.eval.batches * config.train.batch_size, loader.val_windows)

    def evaluate(self, state: TrainState, is_stopped: bool = False) -> tuple[dict, bool]:
        """Evaluate the model, and record the loss in `state`.

        Returns the metrics (on rank 0 also a sample, attention statistics and maps), and whether the loss is the lowest
        so far. Without metrics if a signal stops the evaluation. is_stopped: all processes know that the run stops.
        """
        state.evaluation_interrupted = is_stopped
        if is_stopped:
            return {}, False
        dist = self.runtime.dist
        model, wrapped_model = dist.unshard(self.model, self.wrapped_model, self.runtime.dtype)
        row: dict[str, Any] = self.compute_validation_loss(wrapped_model)
        if isfinite(row["val/loss"]) and dist.is_main:
            with self.runtime.autocast():
                if state.step > 0:  # an untrained model writes noise
                    row["sample"] = self.generate_sample(model, state.step)
                row |= self.measure_attention(model, state.step)
        # a signal to any process may have cut the loss or the sample short
        (signals,) = dist.all_reduce_sum(self.stop.requested)
        state.evaluation_interrupted = signals > 0
        if signals:
            return {}, False
        is_random = state.step == 0 and self.config.train.init_from is None  # random weights are never the best
        is_best = not is_random and state.record_evaluation(row["val/loss"], row["val/bpb"])
        return row | {"peak_memory_bytes": peak_memory_bytes(self.runtime.device)}, is_best

    @torch.no_grad()
    def compute_validation_loss(self, model: nn.Module) -> dict[str, float]:
        """Mean loss over validation windows: val/loss in nats per token, val/bpb in bits per byte of text.

        The windows are spread evenly over the validation split. The processes share them. A signal ends the loop.
        Tokens of prompts do not count. Raises UserError if the windows have no others.
        """
        loader, batch_size, dist = self.loader, self.batch_size, self.runtime.dist
        stride = loader.val_windows / self.windows
        bytes_of_token = torch.from_numpy(token_bytes(self.tokenizer)).to(loader.device)
        nats, num_tokens, num_bytes = [], 0, torch.zeros((), dtype=torch.int64, device=loader.device)
        model.eval()
        for first in range(dist.rank * batch_size, self.windows, dist.world_size * batch_size):
            if self.stop.requested:
                break
            x, y, doc_ids = loader.batch("val", first, min(batch_size, self.windows - first), stride)
            with self.runtime.autocast():
                nats.append(model(x, y, doc_ids=doc_ids, reduction="sum"))
            targets = y[y >= 0]
            num_tokens += targets.numel()
            num_bytes += bytes_of_token[targets].sum()
        model.train()
        # the losses are read from the device only after the last window, and summed in float64
        total = sum(loss.item() for loss in nats)
        total, num_tokens, num_bytes = dist.all_reduce_sum(total, num_tokens, int(num_bytes))
        if not num_tokens and not self.stop.requested:
            raise UserError(
                f"the {self.windows} validation windows have only prompts; set a larger eval.batches, or null"
            )
        return {"val/loss": total / max(1, num_tokens), "val/bpb": total / log(2) / max(1, num_bytes)}

    def generate_sample(self, model: GPT, step: int) -> str:
        """Generate a sample without a prompt. A signal ends it."""
        prompt = Prompt(initial_tokens(self.tokenizer), self.config.seed + step)
        sampling = replace(self.config.eval.sample, stop=unescape(self.config.eval.sample.stop))
        sample = ""
        for chunk in generate(model, self.tokenizer, [prompt], sampling, batch_size=1):
            if self.stop.requested:
                break
            sample += chunk.text
        return sample

    def measure_attention(self, model: GPT, step: int) -> dict:
        """Attention maps of the first validation tokens, and statistics of each head on a few windows, if requested."""
        loader, row = self.loader, {}
        if self.config.wandb.attention_maps:
            x, _, doc_ids = loader.batch("val", 0, 1)
            weights = attention_maps(model, x[:, :MAP_TOKENS], None if doc_ids is None else doc_ids[:, :MAP_TOKENS])
            row = {"attention": self.maps_folder / f"step-{step:06d}.png"} | layer_entropies(weights)
            plot_attention(weights.numpy(), entropy(weights).numpy(), row["attention"])
        if self.config.eval.attention_stats:
            windows = min(STATISTICS_WINDOWS, loader.val_windows)
            x, _, doc_ids = loader.batch("val", 0, windows, loader.val_windows / windows)
            row |= attention_statistics(model, x, doc_ids)
        return row
