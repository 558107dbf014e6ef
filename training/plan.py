"""plan=true: prints parameters, FLOPs, memory, steps and time of a run, without training it."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import nn

# Private: torch has no public API for tensors without data. Checked with torch 2.13.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from common.console import (
    PlainConsole,
    format_duration,
    format_memory,
    format_si,
    make_table,
    pluralize,
)
from common.errors import UserError
from common.machine import device_name
from data import TokenizerConfig
from data.prepare import prepare
from data.tokenizer import OPENAI_SIZES
from model.attention import BACKENDS
from model.flops import (
    attention_flops_per_token,
    flops_per_token,
    params_by_part,
    weight_flops_per_token,
)
from model.gpt import GPT
from training.banner import describe_model, format_epochs
from training.build import checkpoint_activations, load_run_tokenizer
from training.config import RunConfig
from training.optimizer import build_optimizers
from training.parallel import FSDP2
from training.presets import name_preset, parse_preset, preset_values
from training.runtime import Runtime, resolve_runtime
from training.speed import peak_flops, time_calls

MEASURED_SECONDS = 2.0  # for measuring the speed
MAX_MEASURED_PASSES = 50
NEIGHBORS = (0.25, 0.5, 1, 2, 4)  # FLOPs of the presets that a plan shows, relative to the run's
ACTIVATIONS = ("Activation", "Temp", "Other")  # categories of MemTracker


@dataclass
class Plan:
    """Estimated parameters, FLOPs, memory and time of a run.

    FLOPs count matrix products, forward and backward (model/flops.py). Memory is in bytes of one
    process. All other numbers are for all processes together.
    """

    vocab_size: int
    parameters: dict[str, int]  # by part of the model
    flops_per_token: dict[str, int]  # of weights and of attention
    memory: dict[str, int]
    flops_per_second: float
    steps: int
    tokens: int
    epochs: float | None  # None if the data is not prepared

    @property
    def flops(self) -> int:
        return self.tokens * sum(self.flops_per_token.values())

    @property
    def seconds(self) -> float:
        return self.flops / self.flops_per_second


def make_plan(config: RunConfig, runtime: Runtime) -> Plan:
    """Plan a run. Raises UserError if its vocabulary needs text that is not on this machine."""
    block_size = config.model.block_size
    spec = load_run_tokenizer(config.tokenizer.run)
    prepared = prepare(config.data, config.tokenizer, block_size, spec, offline=True)
    if prepared is None:
        vocab_size = _largest_vocab_size(config.tokenizer, spec)
    else:
        vocab_size = prepared.meta["vocab_size"]
    with torch.device("meta"):
        parameters = params_by_part(GPT(config.model, vocab_size))
    flops_by_part = {
        "weights": weight_flops_per_token(config.model, vocab_size),
        "attention": attention_flops_per_token(config.model, block_size),
    }
    memory = estimate_memory(config, runtime, vocab_size)
    flops = sum(flops_by_part.values())
    flops_per_second = config.flops_per_second
    if flops_per_second is None:
        of_one_device = measure_flops_per_second(config, runtime, vocab_size)
        flops_per_second = runtime.dist.world_size * of_one_device

    # the run ends at train.steps, train.epochs or train.minutes, whichever comes first
    tokens_per_step = config.train.batch_size * block_size
    steps = config.train.steps or math.inf
    if config.train.minutes is not None:
        seconds_per_step = tokens_per_step * flops / flops_per_second
        steps = min(steps, max(1, 60 * config.train.minutes // seconds_per_step))
    if config.train.epochs is not None and prepared is not None:
        epoch_tokens = prepared.meta["tokens"]["train"]
        steps = min(steps, math.ceil(config.train.epochs * epoch_tokens / tokens_per_step))
    if math.isinf(steps):
        raise UserError("train.epochs needs data on this machine; run python prepare.py first")
    tokens = int(steps) * tokens_per_step
    epochs = None if prepared is None else tokens / prepared.meta["tokens"]["train"]
    return Plan(
        vocab_size,
        parameters,
        flops_by_part,
        memory,
        flops_per_second,
        int(steps),
        tokens,
        epochs,
    )


def estimate_memory(config: RunConfig, runtime: Runtime, vocab_size: int) -> dict[str, int]:
    """Estimate the bytes of one process with a model of fake tensors, which have no data.

    Weights, gradients and optimizer state are exact. Activations include temporary tensors at the
    peak of a forward and backward pass. They are missing if attention is compiled, because fake
    tensors do not support compilation.
    """
    # Private: imported here because it is slow. Checked with torch 2.13.
    from torch.distributed._tools.mem_tracker import MemTracker

    # number of processes that share one copy of the model
    shards = runtime.dist.world_size if isinstance(runtime.parallel, FSDP2) else 1
    with FakeTensorMode(), runtime.device:
        model = GPT(config.model, vocab_size, runtime.attend)
        checkpoint_activations(model, config.train.activation_checkpointing)
        optimizers = build_optimizers(model, config.optimizer, runtime.dtype)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)  # as in the second micro batch of a step
        for optimizer in optimizers:
            optimizer.step()  # allocates its state
        states = tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])
        weight_bytes = sum(p.nbytes for p in model.parameters())
        state_bytes = sum(tensor.nbytes for tensor in states)
        memory = {
            "weights": weight_bytes // shards,
            "gradients": weight_bytes // shards,
            "optimizer state": state_bytes // shards,
        }
        if shards > 1 and runtime.accumulation > 1:
            memory["gradients"] += weight_bytes  # FSDP accumulates complete gradients
        backend = BACKENDS.get(config.attention.backend)  # None: auto, which is never compiled
        is_compiled = backend is not None and backend.needs_compiler
        if is_compiled and runtime.device.type == "cuda":
            return memory
        if shards > 1:
            _cast_matrices(model.blocks, runtime.dtype)
        with MemTracker() as tracker:
            run_micro_batch(runtime.micro_batch_size, config, runtime, model)
    peaks = tracker.get_tracker_snapshot("peak").values()  # of each device: {category: bytes}
    memory["activations"] = sum(peak[category] for peak in peaks for category in ACTIVATIONS)
    return memory


def run_micro_batch(batch_size: int, config: RunConfig, runtime: Runtime, model: GPT) -> None:
    """Run a forward and backward pass on random tokens."""
    shape = (batch_size, config.model.block_size)
    tokens = torch.randint(model.vocab_size, shape, device=runtime.device)
    doc_ids = torch.zeros_like(tokens) if config.data.document_mask else None
    with runtime.autocast():
        loss = model(tokens, tokens, doc_ids=doc_ids)
    loss.backward()


def _cast_matrices(blocks: nn.Module, dtype: torch.dtype) -> None:
    """Give the matrices of blocks the dtype in which FSDP collects them."""
    for module in blocks.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.to(dtype))
            module.weight.grad = torch.zeros_like(module.weight)


def _largest_vocab_size(config: TokenizerConfig, spec: dict | None) -> int:
    """The vocabulary size of data that is not prepared. For bpe, the largest possible size."""
    if spec is not None:
        return len(spec["tokens"]) + len(spec["special"])
    sizes = OPENAI_SIZES | {"bpe": config.vocab_size, "byte": 257}
    if config.name not in sizes:
        raise UserError(
            f"the vocabulary of tokenizer={config.name} depends on text that is not on this "
            "machine; run python prepare.py with the same data and tokenizer first"
        )
    return sizes[config.name]


def measure_flops_per_second(config: RunConfig, runtime: Runtime, vocab_size: int) -> float:
    """Measure the median FLOP/s of a device in forward and backward passes, for two seconds.

    The first pass loads kernels, so it counts only if there is no time for others.
    """
    device = runtime.device
    block_size = config.model.block_size
    flops_per_sequence = block_size * flops_per_token(config.model, vocab_size, block_size)
    in_one_second = int(0.5 * peak_flops(device, runtime.dtype) / flops_per_sequence)
    batch_size = max(1, min(runtime.micro_batch_size, in_one_second))
    model = GPT(config.model, vocab_size, runtime.attend).to(device)

    def run_pass() -> None:
        run_micro_batch(batch_size, config, runtime, model)
        model.zero_grad(set_to_none=True)

    seconds = time_calls(run_pass, device, 1, MEASURED_SECONDS, MAX_MEASURED_PASSES)
    return batch_size * flops_per_sequence / statistics.median(seconds[1:] or seconds)


def show_plan(config: RunConfig) -> int:
    """Print the plan of a run on rank 0. Returns the exit code."""
    runtime = resolve_runtime(config)
    if runtime.dist.is_main:
        plan = make_plan(config, runtime)
        console = PlainConsole()
        console.print(make_plan_table(config, runtime, plan), width=80)
        numbers = parse_preset(config.preset)
        if numbers is not None:
            console.print(make_neighbor_table(*numbers), width=80)
    return 0


def make_plan_table(config: RunConfig, runtime: Runtime, plan: Plan) -> Table:
    """The plan as a table of two columns."""
    model = config.model
    table = make_table("", "", left=2, header=False)
    if config.preset is not None:
        table.add_row("preset", config.preset)
    table.add_row("model", f"{model.name}, {describe_model(model)}, vocabulary {plan.vocab_size:,}")
    dtype = str(runtime.dtype).removeprefix("torch.")
    table.add_row(
        "device", f"{device_name(runtime.device)}, {dtype}, attention {runtime.attention}"
    )
    _add_parts(table, "parameters", plan.parameters, "{:,}".format)
    _add_parts(table, "training FLOPs per token", plan.flops_per_token, format_si)
    _add_parts(table, "memory per process", plan.memory, format_memory)
    if "activations" not in plan.memory:
        table.add_row("  activations", "unknown: this attention backend is compiled")
    processes = pluralize(runtime.dist.world_size, "process")
    split = f"{processes} x {runtime.accumulation} x {runtime.micro_batch_size}"
    sequences = f"{split} = {config.train.batch_size:,} sequences"
    table.add_row("step", f"{sequences} x {model.block_size:,} tokens")
    epochs = "data not prepared yet" if plan.epochs is None else format_epochs(plan.epochs)
    table.add_row("steps", f"{plan.steps:,}: {plan.tokens:,} tokens ({epochs})")
    source = "measured" if config.flops_per_second is None else "given"
    speed = f"{format_si(plan.flops_per_second)} FLOP/s ({source})"
    table.add_row("FLOPs", f"{format_si(plan.flops)} at {speed}")
    table.add_row("time", f"{format_duration(plan.seconds)}, without evaluations and optimizer")
    return table


def make_neighbor_table(text_bytes: float, flops: float) -> Table:
    """What presets choose for the same text and less or more FLOPs."""
    columns = {
        "model.n_layer": "layers",
        "model.n_embd": "channels",
        "model.block_size": "context",
        "model.max_ngram": "n-gram",
        "tokenizer.vocab_size": "vocab",
        "train.batch_size": "batch",
        "train.epochs": "epochs",
    }
    table = make_table("preset", *columns.values())
    for factor in NEIGHBORS:
        preset = name_preset(text_bytes, factor * flops)
        values = preset_values(preset)
        cells = [f"{values[key]:,}" for key in columns]
        table.add_row(preset, *cells, style="bold" if factor == 1 else None)
    return table


def _add_parts(
    table: Table, title: str, counts: dict[str, int], format_count: Callable[[float], str]
) -> None:
    """Add a row for the sum of the counts, and a row for each part."""
    total = sum(counts.values())
    table.add_row(title, format_count(total), style="bold")
    for name, count in counts.items():
        if count > 0:
            table.add_row(f"  {name}", f"{format_count(count)} ({count / total:.1%})")
