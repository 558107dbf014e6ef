"""plan=true: prints the parameters, FLOPs, memory, steps and time of a run. Nothing is trained or downloaded."""

import statistics
from collections.abc import Callable
from math import ceil, inf
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

# Private: torch has no public API for tensors without data. Checked with torch 2.13.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from common import system
from common.console import format_duration, format_memory, format_si, make_console, make_table, pluralize
from common.errors import UserError
from data import DataConfig, TokenizerConfig, tokenizer
from data.prepare import prepare_offline
from data.shards import PreparedData
from data.sources import all_files, resolve_sources
from model.attention import BACKENDS, get_attention_fn
from model.flops import attention_flops_per_token, params_by_part, weight_flops_per_token
from model.gpt import GPT
from training.activation_checkpointing import checkpoint_activations
from training.device import Runtime
from training.fsdp import FSDP
from training.init_from import load_run_tokenizer
from training.optimizer import build_optimizers, optimizer_step
from training.planning.micro_batch import run_micro_batch
from training.progress import describe_model, format_epochs
from training.speed import peak_flops, time_calls

WIDTH = 80  # columns where the output is not a terminal
MEASURED_SECONDS = 2.0  # time for measuring the speed
MAX_MEASURED_PASSES = 50
ACTIVATIONS = ("Activation", "Temp", "Other")  # categories of MemTracker


def show_plan(config: Any, runtime: Runtime) -> int:
    """Print the plan for a config of train.py -> exit code. With several processes, only rank 0 prints."""
    if runtime.dist.is_main:
        print_plan(Plan(config, runtime), make_console(width=WIDTH))
    return 0


class Plan:
    """What a run needs. FLOPs are those of matrix products (model/flops.py), forward and backward.

    Counts, FLOPs and speeds are for all processes together. memory: bytes of one process.
    """

    def __init__(self, config: Any, runtime: Runtime):
        """config: the config of train.py. Raises UserError if the vocabulary needs a download."""
        self.config, self.runtime = config, runtime
        dist, T = runtime.dist, config.model.block_size
        dist.share_cores()
        self.micro_batch_size, self.accumulation = config.train.split_batch(dist.world_size)

        # vocabulary
        spec = load_run_tokenizer(config.tokenizer.run, config.name)
        prepared = prepare_offline(config.data, config.tokenizer, T, spec)
        self.vocab_size, self.vocab_is_upper_bound = _find_vocab_size(config.data, config.tokenizer, prepared, spec)

        # parameters, FLOPs per token, memory
        attend = get_attention_fn(config.attention)
        self.parameters = params_by_part(GPT(config.model, self.vocab_size, attend, device="meta"))
        self.weight_flops = weight_flops_per_token(config.model, self.vocab_size)
        self.attention_flops = attention_flops_per_token(config.model, T)
        flops = self.weight_flops + self.attention_flops
        self.memory = estimate_memory(config, runtime, self.vocab_size)

        # FLOP/s of the run
        self.flops_per_second = config.flops_per_second or dist.world_size * _measure_flops_per_second(self, flops)

        # FLOPs of an evaluation: the forward pass takes a third. None: unknown before the data is prepared
        windows = inf if config.eval.batches is None else config.eval.batches * config.train.batch_size
        if prepared is not None:
            windows = min(windows, ceil((prepared.meta["tokens"]["val"] - 1) / T))
        evaluation = None if windows == inf else int(windows) * T * flops // 3

        # the run: train.steps, or as many as fit into train.minutes; the first evaluation is before the first step
        self.tokens_per_step = config.train.batch_size * T
        self.steps = config.train.steps
        if config.train.minutes is not None:
            available = 60 * config.train.minutes * self.flops_per_second - (evaluation or 0)
            flops_per_step = self.tokens_per_step * flops + (evaluation or 0) / config.eval.every
            self.steps = int(min(max(1, available // flops_per_step), self.steps or inf))
        self.evaluations = 1 + ceil(self.steps / config.eval.every)
        self.tokens = self.steps * self.tokens_per_step
        self.epochs = None if prepared is None else self.tokens / prepared.meta["tokens"]["train"]
        self.training_flops = self.tokens * flops
        self.evaluation_flops = None if evaluation is None else self.evaluations * evaluation
        self.seconds = (self.training_flops + (self.evaluation_flops or 0)) / self.flops_per_second


def estimate_memory(config: Any, runtime: Runtime, vocab_size: int) -> dict[str, int]:
    """Bytes of the tensors of one process. The model is made of fake tensors, which have no data.

    Weights, gradients and optimizer state are exact. Activations include temporary tensors at the peak of a forward and
    backward pass. They are missing if attention is compiled, which fake tensors do not support.
    """
    # Private: torch has no public tool that finds the peak of fake tensors. Checked with torch 2.13.
    from torch.distributed._tools.mem_tracker import MemTracker

    processes = runtime.dist.world_size if isinstance(runtime.dist, FSDP) else 1  # that share one copy of the model
    micro_batch_size, accumulation = config.train.split_batch(runtime.dist.world_size)
    with FakeTensorMode(), runtime.device:
        model = GPT(config.model, vocab_size, get_attention_fn(config.attention))
        checkpoint_activations(model, config.train.activation_checkpointing)
        optimizers = build_optimizers(model, config.optimizer, runtime.dtype)
        _allocate_gradients(model)
        optimizer_step(model, optimizers, torch.amp.GradScaler(enabled=False), None)
        states = tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])
        weights, state = (sum(tensor.nbytes for tensor in tensors) for tensors in (model.parameters(), states))
        # while a step accumulates, FSDP also keeps the gradients of all weights
        gradients = weights // processes + (weights if processes > 1 and accumulation > 1 else 0)
        memory = {"weights": weights // processes, "gradients": gradients, "optimizer state": state // processes}
        if BACKENDS[config.attention.backend].needs_compiler and runtime.device.type == "cuda":
            return memory
        if processes > 1:  # FSDP collects the weights of blocks in the dtype of the run
            for module in model.blocks.modules():
                for name, p in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(p.to(runtime.dtype)))
        _allocate_gradients(model)  # as in the second micro batch of a step
        with MemTracker() as tracker:
            run_micro_batch(micro_batch_size, config, runtime, model)
    (peak,) = tracker.get_tracker_snapshot("peak").values()  # of the only device
    return memory | {"activations": sum(size for category, size in peak.items() if category in ACTIVATIONS)}


def _allocate_gradients(model: GPT) -> None:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


def _find_vocab_size(
    data: DataConfig, config: TokenizerConfig, prepared: PreparedData | None, spec: dict | None
) -> tuple[int, bool]:
    """Vocabulary size, and whether it is an upper bound. Raises UserError if it needs a download."""
    if prepared is not None:
        return prepared.tokenizer.n_vocab, False
    if spec is not None:
        return tokenizer.from_spec(spec).n_vocab, False
    files = all_files(resolve_sources(data))
    size = tokenizer.size_without_text(config, has_several_documents=len(files) > 1 or files[0].is_table)
    if size is None:
        raise UserError(
            f"the vocabulary of tokenizer={config.name} depends on the data, which plan=true does not download; run "
            f"python prepare.py data={data.name} tokenizer={config.name} first, or set data.path=FILE"
        )
    return size, config.name == "bpe"


def _measure_flops_per_second(plan: "Plan", flops: int) -> float:
    """Median FLOP/s of forward and backward passes. The first pass, which loads kernels, counts only if no other fits.

    flops: per token. The batch size is chosen so that a pass takes about a second.
    """
    T, device = plan.config.model.block_size, plan.runtime.device
    batch_size = int(0.5 * peak_flops(device, plan.runtime.dtype) / (flops * T))
    batch_size = max(1, min(plan.micro_batch_size, batch_size))
    model = GPT(plan.config.model, plan.vocab_size, get_attention_fn(plan.config.attention)).to(device)

    def run_pass() -> None:
        run_micro_batch(batch_size, plan.config, plan.runtime, model)
        model.zero_grad(set_to_none=True)

    seconds = time_calls(run_pass, device, 1, MEASURED_SECONDS, MAX_MEASURED_PASSES)
    return batch_size * T * flops / statistics.median(seconds[1:] or seconds)


def print_plan(plan: Plan, console: Console) -> None:
    config, model = plan.config, plan.config.model
    at_most = "at most " if plan.vocab_is_upper_bound else ""
    vocabulary = f"{config.tokenizer.name} vocabulary of {at_most}{plan.vocab_size:,}"
    console.print(f"{model.name}: {describe_model(model)}, {vocabulary}")

    console.print("\nparameters", style="bold")
    console.print(_shares_table(plan.parameters, "{:,}".format))

    console.print("\ntraining FLOPs per token, forward and backward", style="bold")
    growth = "T² C" if "softmax" in model.mixers else "T C D"
    flops = {"weights, 6 each (T C² per sequence)": plan.weight_flops, f"attention ({growth})": plan.attention_flops}
    console.print(_shares_table(flops, format_si))

    micro_batch, dtype = pluralize(plan.micro_batch_size, "sequence"), str(plan.runtime.dtype).removeprefix("torch.")
    title = f"memory per process, micro batches of {micro_batch}, {dtype}, attention={config.attention.backend}"
    console.print(f"\n{title}", style="bold")
    console.print(_shares_table(plan.memory, format_memory))
    if "activations" not in plan.memory:
        console.print("activations are unknown: this attention backend is compiled on this device")

    console.print("\nthe run", style="bold")
    console.print(_run_table(plan))


def _shares_table(counts: dict[str, int], format_count: Callable[[int], str]) -> Table:
    table, total = make_table("", "", "", header=False), sum(counts.values())
    for name, count in counts.items():
        if count:
            table.add_row(name, format_count(count), f"{count / total:.1%}")
    table.add_row("total", format_count(total), style="bold")
    return table


def _run_table(plan: Plan) -> Table:
    train, T, world_size = plan.config.train, plan.config.model.block_size, plan.runtime.dist.world_size
    table = make_table("", "", left=2, header=False)
    table.add_row("device", system.device_name(plan.runtime.device))
    factors = f"{pluralize(world_size, 'process')} x {plan.accumulation} x {plan.micro_batch_size}"
    table.add_row("step", f"{factors} = {train.batch_size:,} sequences x {T:,} = {plan.tokens_per_step:,} tokens")
    budget = f", which fit into {train.minutes:g} minutes" if train.minutes is not None else ""
    warmup_steps = min(plan.steps, plan.config.schedule.warmup_steps)
    table.add_row("steps", f"{plan.steps:,}{budget}, including {warmup_steps:,} for warmup")
    passes = "data not prepared yet" if plan.epochs is None else format_epochs(plan.epochs)
    table.add_row("tokens", f"{plan.tokens:,} ({passes})")
    evaluations = ""
    if plan.evaluation_flops is not None:
        evaluations = f", {format_si(plan.evaluation_flops)} for {pluralize(plan.evaluations, 'evaluation')}"
    table.add_row("FLOPs", f"{format_si(plan.training_flops)} for training{evaluations}")
    source = "given" if plan.config.flops_per_second else "measured"
    table.add_row("speed", f"{format_si(plan.flops_per_second)} FLOP/s ({source})")
    excluded = "evaluations, " if plan.evaluation_flops is None else ""
    table.add_row("time", f"{format_duration(plan.seconds)}, without {excluded}optimizer, samples and checkpoints")
    return table
