"""plan=true: prints the parameters, FLOPs, memory, steps and time of a run, without training or downloading."""

import statistics
from math import inf

import torch
from torch import nn

# Private: torch has no public API for tensors without data. Checked with torch 2.13.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from common import system
from common.console import (
    PlainConsole,
    format_duration,
    format_memory,
    format_si,
    make_table,
    pluralize,
)
from common.errors import UserError
from data import TokenizerConfig
from data.prepare import prepare
from data.tokenizer import OPENAI_SIZES
from model.activation_checkpointing import checkpoint_activations
from model.attention import BACKENDS, get_attention_fn
from model.attention.flops import attention_flops_per_token
from model.flops import params_by_part, weight_flops_per_token
from model.gpt import GPT
from training.config import RunConfig
from training.device import Runtime
from training.init_from import load_run_tokenizer
from training.optimizer import build_optimizers
from training.parallel import FSDP2
from training.peak_flops import peak_flops
from training.planning.micro_batch import run_micro_batch
from training.progress import describe_model, format_epochs
from training.speed import time_calls

MEASURED_SECONDS, MAX_MEASURED_PASSES = 2.0, 50  # for measuring the speed
ACTIVATIONS = ("Activation", "Temp", "Other")  # categories of MemTracker


class Plan:
    """Estimated parameters, FLOPs, memory and time of a run.

    FLOPs count matrix products, forward and backward (model/flops.py). Memory is in bytes of one process. All other
    numbers are for all processes together. Raises UserError if the vocabulary needs a download.
    """

    def __init__(self, config: RunConfig, runtime: Runtime):
        self.config, self.runtime, dist, T = config, runtime, runtime.dist, config.model.block_size
        self.micro_batch_size, self.accumulation = config.train.split_batch(dist.world_size)
        spec = load_run_tokenizer(config.tokenizer.run, config.name)
        prepared = prepare(config.data, config.tokenizer, T, spec, offline=True)
        self.vocab_size = (
            prepared.meta["vocab_size"] if prepared else _largest_vocab_size(config.tokenizer, spec)
        )
        with torch.device("meta"):
            self.parameters = params_by_part(GPT(config.model, self.vocab_size))
        self.flops_per_token = {
            "weights": weight_flops_per_token(config.model, self.vocab_size),
            "attention": attention_flops_per_token(config.model, T),
        }
        flops = sum(self.flops_per_token.values())
        self.memory = estimate_memory(config, runtime, self.vocab_size)
        # the run ends at train.steps or train.minutes, whichever comes first
        self.flops_per_second = (
            config.flops_per_second or dist.world_size * _measure_flops_per_second(self, flops)
        )
        tokens_per_step, self.steps = config.train.batch_size * T, config.train.steps
        if config.train.minutes is not None:
            fitting = 60 * config.train.minutes * self.flops_per_second // (tokens_per_step * flops)
            self.steps = int(min(max(1, fitting), self.steps or inf))
        self.tokens = self.steps * tokens_per_step
        self.epochs = None if prepared is None else self.tokens / prepared.meta["tokens"]["train"]
        self.flops = self.tokens * flops
        self.seconds = self.flops / self.flops_per_second


def estimate_memory(config: RunConfig, runtime: Runtime, vocab_size: int) -> dict[str, int]:
    """Estimate the bytes of one process's tensors with a model of fake tensors, which have no data.

    Weights, gradients and optimizer state are exact. Activations include temporary tensors at the peak of a forward and
    backward pass. They are missing if attention is compiled, because fake tensors do not support compilation.
    """
    from torch.distributed._tools.mem_tracker import MemTracker  # private, checked with torch 2.13

    # processes that share one copy of the model
    processes = runtime.dist.world_size if isinstance(runtime.parallel, FSDP2) else 1
    micro_batch_size, accumulation = config.train.split_batch(runtime.dist.world_size)
    with FakeTensorMode(), runtime.device:
        model = GPT(config.model, vocab_size, get_attention_fn(config.attention))
        checkpoint_activations(model, config.train.activation_checkpointing)
        optimizers = build_optimizers(model, config.optimizer, runtime.dtype)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)  # as in the second micro batch of a step
        for optimizer in optimizers:
            optimizer.step()  # allocates its state
        states = tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])
        weights, state = (
            sum(tensor.nbytes for tensor in tensors) for tensors in (model.parameters(), states)
        )
        # FSDP also stores complete gradients while a step accumulates
        gradients = weights // processes + (weights if processes > 1 and accumulation > 1 else 0)
        memory = {
            "weights": weights // processes,
            "gradients": gradients,
            "optimizer state": state // processes,
        }
        if BACKENDS[config.attention.backend].needs_compiler and runtime.device.type == "cuda":
            return memory
        if processes > 1:  # FSDP collects the matrices of blocks in the dtype of the run
            for module in model.blocks.modules():
                if isinstance(module, nn.Linear):
                    module.weight = nn.Parameter(module.weight.to(runtime.dtype))
                    module.weight.grad = torch.zeros_like(module.weight)
        with MemTracker() as tracker:
            run_micro_batch(micro_batch_size, config, runtime, model)
    peaks = tracker.get_tracker_snapshot("peak").values()  # of each device: {category: bytes}
    return memory | {
        "activations": sum(peak[category] for peak in peaks for category in ACTIVATIONS)
    }


def _largest_vocab_size(config: TokenizerConfig, spec: dict | None) -> int:
    """The vocabulary size of data that is not prepared. For tokenizer=bpe, it is the largest possible size."""
    sizes = OPENAI_SIZES | {"bpe": config.vocab_size, "byte": 257}
    if spec is not None:
        return len(spec["tokens"]) + len(spec["special"])
    if config.name not in sizes:
        reason = (
            f"the vocabulary of tokenizer={config.name} depends on text that is not on this machine"
        )
        raise UserError(f"{reason}; run python prepare.py with the same data and tokenizer first")
    return sizes[config.name]


def _measure_flops_per_second(plan: "Plan", flops: int) -> float:
    """Measure the median FLOP/s of forward and backward passes that take about a second each.

    flops: FLOPs per token. The first pass loads kernels, so it counts only if the time is over after it.
    """
    T, device = plan.config.model.block_size, plan.runtime.device
    one_second = int(0.5 * peak_flops(device, plan.runtime.dtype) / (flops * T))
    batch_size = max(1, min(plan.micro_batch_size, one_second))
    model = GPT(plan.config.model, plan.vocab_size, get_attention_fn(plan.config.attention)).to(
        device
    )

    def run_pass() -> None:
        run_micro_batch(batch_size, plan.config, plan.runtime, model)
        model.zero_grad(set_to_none=True)

    seconds = time_calls(run_pass, device, 1, MEASURED_SECONDS, MAX_MEASURED_PASSES)
    return batch_size * T * flops / statistics.median(seconds[1:] or seconds)


def show_plan(config: RunConfig, runtime: Runtime) -> int:
    """Print the plan of a run on rank 0. Returns the exit code."""
    if not runtime.dist.is_main:
        return 0
    plan, train, model = Plan(config, runtime), config.train, config.model
    table = make_table("", "", left=2, header=False)
    table.add_row("model", f"{model.name}, {describe_model(model)}, vocabulary {plan.vocab_size:,}")
    dtype = str(runtime.dtype).removeprefix("torch.")
    table.add_row(
        "device",
        f"{system.device_name(runtime.device)}, {dtype}, attention={config.attention.backend}",
    )
    for title, counts, format_count in (
        ("parameters", plan.parameters, "{:,}".format),
        ("training FLOPs per token", plan.flops_per_token, format_si),
        ("memory per process", plan.memory, format_memory),
    ):
        total = sum(counts.values())
        table.add_row(title, format_count(total), style="bold")
        for name, count in counts.items():
            if count:
                table.add_row(f"  {name}", f"{format_count(count)} ({count / total:.1%})")
    if "activations" not in plan.memory:
        table.add_row("  activations", "unknown: this attention backend is compiled")
    processes = pluralize(runtime.dist.world_size, "process")
    sequences = f"{processes} x {plan.accumulation} x {plan.micro_batch_size} = {train.batch_size:,} sequences"
    table.add_row("step", f"{sequences} x {model.block_size:,} tokens")
    epochs = "data not prepared yet" if plan.epochs is None else format_epochs(plan.epochs)
    table.add_row("steps", f"{plan.steps:,}: {plan.tokens:,} tokens ({epochs})")
    source = "given" if config.flops_per_second else "measured"
    table.add_row(
        "FLOPs", f"{format_si(plan.flops)} at {format_si(plan.flops_per_second)} FLOP/s ({source})"
    )
    table.add_row("time", f"{format_duration(plan.seconds)}, without evaluations and optimizer")
    PlainConsole().print(table, width=80)
    return 0
