"""plan=true: prints the parameters, FLOPs, memory, steps and time of a run. Nothing is trained or downloaded.

`Plan` counts parameters and FLOPs, simulates the memory (memory.py) and measures this machine's speed.
`print_plan` prints the result.
"""

import csv
import statistics
from collections.abc import Callable
from dataclasses import replace
from math import ceil, inf, log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from common import system
from common.console import format_duration, format_memory, format_si, make_console, make_table, pluralize
from common.errors import UserError
from data import DataConfig, TokenizerConfig, tokenizer
from data.prepare import prepare_offline
from data.shards import PreparedData
from data.sources import all_files, resolve_sources
from model import AttentionConfig, GPTConfig
from model.attention import BACKENDS, get_attention_fn
from model.attention.linear import CHUNK
from model.flops import (
    attention_flops_per_token,
    find_flops_crossover,
    linear_attention_keys,
    n_params,
    params_by_part,
    visible_pairs,
    weight_flops_per_token,
)
from model.gpt import GPT
from training.config import AUTO
from training.device import Runtime, autocast
from training.distributed import Dist
from training.init_from import load_run_tokenizer
from training.optimizer import build_optimizers
from training.planning.memory import MemoryEstimate, StepSpec, allocate_optimizer_state, run_steps, simulate_memory
from training.planning.micro_batch import find_longest_context, resolve_micro_batch_size, usable_memory
from training.progress import describe_model, format_epochs
from training.speed import peak_flops, time_calls

WIDTH = 80  # columns where the output is not a terminal
MEASURED_SECONDS = 2.0  # time for measuring the speed
MAX_MEASURED_PASSES = 50
MEMORY_ROWS = {  # label -> field of MemoryEstimate
    "weights": "weights",
    "gradients": "gradients",
    "optimizer state": "optimizer",
    "activations after forward": "activations",
    "  attention scores among them": "scores",
    "peak of all tensors": "peak",
}


def show_plan(config: Any, runtime: Runtime) -> int:
    """Print the plan for a config of train.py -> exit code. With several processes, only rank 0 prints."""
    if runtime.dist.is_main:
        console = make_console(width=WIDTH)
        with console.status("") as status:
            plan = Plan(config, runtime, report=lambda activity: status.update(f"{activity} ..."))
        print_plan(plan, console)
    return 0


class Plan:
    """What a run needs. FLOPs are those of matrix products (model/flops.py), forward and backward.

    Counts, FLOPs and speeds are for all processes together; memory is for one.
    """

    def __init__(self, config: Any, runtime: Runtime, report: Callable[[str], None] = lambda activity: None):
        """config: the config of train.py. report: receives the current activity.

        Raises UserError if the vocabulary needs a download or not even one sequence fits into memory.
        """
        self.config, self.runtime = config, runtime
        dist, T = runtime.dist, config.model.block_size
        dist.share_cores()

        # memory of a process without a model, measured before this process allocates more memory than a run does
        report("loading libraries")
        if config.wandb.mode != "disabled":
            import wandb  # noqa: F401 (a run imports it, so its memory counts)
        step = StepSpec.from_config(config, 0, runtime)
        dist.simulated(runtime.device)  # imports what sharding needs
        self.process_bytes = _measure_process_bytes(step)  # None: unknown on this system

        # vocabulary
        spec = load_run_tokenizer(config.tokenizer.run, config.name)
        prepared = prepare_offline(config.data, config.tokenizer, T, spec)
        self.vocab_size, self.vocab_is_upper_bound = _find_vocab_size(config.data, config.tokenizer, prepared, spec)
        step = replace(step, vocab_size=self.vocab_size)

        # parameters, and FLOPs per token
        model = GPT(config.model, self.vocab_size, get_attention_fn(config.attention), device="meta")
        self.parameters = params_by_part(model)
        self.weight_flops = weight_flops_per_token(config.model, self.vocab_size)
        self.attention_flops = attention_flops_per_token(config.model, T)
        flops = self.weight_flops + self.attention_flops

        # memory by attention backend, or the reason why it cannot run
        self.micro_batch_size, self.accumulation = resolve_micro_batch_size(config.train, step, dist)
        self.memory: dict[str, MemoryEstimate | str] = {}
        for name in BACKENDS:
            report(f"simulating the memory of attention={name}")
            attention = AttentionConfig(backend=name, kernels=None, impl=None)
            if name == config.attention.backend:
                attention = config.attention
            try:
                self._resolve_attention(attention)
                simulated = replace(step, attention=attention)
                self.memory[name] = simulate_memory(simulated, self.micro_batch_size, self.accumulation)
            except UserError as error:
                self.memory[name] = str(error)

        # speed
        self.flops_per_second, self.peak = config.flops_per_second, None  # FLOP/s of the run, and of matrix products
        if self.flops_per_second is None:
            report("measuring the speed of this machine")
            self._resolve_attention(config.attention)  # resolving the other backends can change global settings
            peak = peak_flops(runtime.device, runtime.dtype)
            speed = _measure_flops_per_second(step, self.micro_batch_size, flops, peak)
            self.flops_per_second, self.peak = dist.world_size * speed, dist.world_size * peak

        # communication
        block_params = sum(p.numel() for p in model.blocks.parameters())
        self.sent_bytes = dist.sent_bytes_per_step(
            n_params(model), block_params, runtime.dtype.itemsize, self.accumulation
        )

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
        self.seconds_per_step = self.tokens_per_step * flops / self.flops_per_second
        self.seconds_by_backend = {} if config.attention_csv is None else self._seconds_by_backend(config)

    def _seconds_by_backend(self, config: Any) -> dict[str, float]:
        """Time of the run with each backend that the file of a bench has. Raises UserError if it does not fit."""
        path, chosen = Path(config.attention_csv), config.attention.backend
        if any(config.model.windows):
            raise UserError("attention_csv has no times for windows; set model.window=null, or remove attention_csv")
        dtype = str(self.runtime.dtype).removeprefix("torch.")
        times = read_attention_times(path, self.runtime.device.type, dtype, config.model)
        if chosen not in times:
            raise UserError(
                f"attention_csv={path} has no finished rows of {chosen} for phase forward+backward on "
                f"{self.runtime.device.type} in {dtype}, with head dimension {config.model.head_dim} and contexts "
                f"around {config.model.block_size}; run bench.py with these values, or set another attention_csv"
            )
        per_token = {name: seconds / config.model.block_size for name, seconds in times.items()}
        tokens = self.tokens + (self.evaluation_flops or 0) * self.tokens / self.training_flops
        tokens /= self.runtime.dist.world_size
        other_seconds = self.seconds - tokens * per_token[chosen]
        if other_seconds < 0:
            raise UserError(f"attention_csv={path} is of a slower machine; run bench.py on the machine of the run")
        return {name: other_seconds + tokens * per_token[name] for name in times}

    def longest_context(self, backend: str) -> int | None:
        """The longest model.block_size that fits into the free memory with a backend; None: unknown."""
        available = usable_memory(self.runtime.device, self.runtime.dist)
        if available is None:
            return None
        step = StepSpec.from_config(self.config, self.vocab_size, self.runtime)
        if backend != step.attention.backend:
            step = replace(step, attention=AttentionConfig(backend=backend, kernels=None, impl=None))
        return find_longest_context(step, self.micro_batch_size, self.accumulation, available)

    def _resolve_attention(self, attention: AttentionConfig) -> None:
        """Raises UserError for a backend that cannot run."""
        document_mask = self.config.data.document_mask
        self.runtime.resolve_attention(attention, self.config.model, self.micro_batch_size, document_mask)

    def total_bytes(self, backend: str) -> int | None:
        """Predicted peak_memory_bytes of summary.json. None: unknown, or the backend cannot run."""
        memory = self.memory[backend]
        return None if self.process_bytes is None or isinstance(memory, str) else self.process_bytes + memory.reserved


def read_attention_times(path: Path, device: str, dtype: str, model: GPTConfig) -> dict[str, float]:
    """Seconds of attention per sequence, forward and backward, in all softmax layers -> {backend: seconds}.

    The speeds of attention.csv, in FLOP/s, are interpolated between its contexts. Backends that were not measured with
    this head dimension and context are left out. Raises UserError.
    """
    wanted = {"phase": "forward+backward", "mask": "causal", "status": "finished", "device": device, "dtype": dtype}
    wanted |= {"D": str(model.head_dim), "Dv": str(model.head_dim)}
    speeds: dict[str, dict[float, float]] = {}  # backend -> {log T: FLOP/s}, from short contexts to long ones
    try:
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if wanted.items() <= row.items() and row["backend"] in BACKENDS:
                    speeds.setdefault(row["backend"], {})[log(int(row["T"]))] = float(row["flops_per_second"])
    except (OSError, ValueError, KeyError, csv.Error):
        raise UserError(f"attention_csv={path} cannot be read; set the attention.csv of a run of bench.py") from None
    T, D = model.block_size, model.head_dim
    windows = [window for mixer, window in zip(model.mixers, model.windows, strict=True) if mixer == "softmax"]
    flops = 3 * 4 * model.n_head * D * sum(visible_pairs(T, T, window) for window in windows)
    return {
        name: flops / np.interp(log(T), list(line), list(line.values()))
        for name, line in speeds.items()
        if min(line) <= log(T) <= max(line)
    }


def _measure_process_bytes(step: StepSpec) -> int | None:
    """Memory of a training process without its model: Python, libraries, and what kernels load at first use.

    0 on devices other than the CPU, where peak_memory_bytes counts tensors only.
    """
    if step.device.type != "cpu":
        return 0
    tiny = replace(
        step.model, n_embd=8 * step.model.n_head, window=None, mlp_width=None, block_size=8, ngram_table_size=64
    )
    model = GPT(tiny, 64, get_attention_fn(step.attention))
    optimizers = build_optimizers(model, step.optimizer, step.dtype)
    allocate_optimizer_state(model, optimizers)
    run_steps(model, optimizers, replace(step, model=tiny, dist=Dist()), 1, 1)
    system.reset_peak_memory(step.device)
    return system.peak_memory_bytes(step.device)


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


def _measure_flops_per_second(step: StepSpec, max_batch_size: int, flops: int, peak: float) -> float:
    """Median FLOP/s of forward and backward passes. The first pass, which loads kernels, counts only if no other fits.

    flops: per token. peak: FLOP/s of matrix products. The batch size is chosen so that a pass takes about a second.
    """
    T = step.model.block_size
    batch_size = max(1, min(max_batch_size, int(0.5 * peak / (flops * T))))
    model = GPT(step.model, step.vocab_size, get_attention_fn(step.attention)).to(step.device)
    tokens = torch.randint(step.vocab_size, (batch_size, T), device=step.device)

    def run_pass() -> None:
        with autocast(step.device, step.dtype):
            loss = model(tokens, tokens)
        loss.backward()
        model.zero_grad(set_to_none=True)

    seconds = time_calls(run_pass, step.device, 1, MEASURED_SECONDS, MAX_MEASURED_PASSES)
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
    T = find_flops_crossover(model, plan.vocab_size)
    if T is None:
        console.print("attention never needs as many FLOPs as the weights")
    else:
        console.print(f"attention needs as many FLOPs as the weights at a context of {T:,}")
    if "linear" in model.mixers:
        T = linear_attention_keys(model.head_dim, CHUNK)
        console.print(
            f"linear attention needs fewer FLOPs above a context of {T:,} than naive, which computes all scores, "
            f"and above {2 * T:,} than kernels that skip the masked half, such as flash"
        )

    micro_batch = pluralize(plan.micro_batch_size, "sequence")
    auto = " (auto)" if config.train.micro_batch_size == AUTO else ""
    dtype = str(plan.runtime.dtype).removeprefix("torch.")
    console.print(f"\nmemory per process, micro batches of {micro_batch}{auto}, {dtype}", style="bold")
    console.print(_memory_table(plan))
    for backend, memory in plan.memory.items():
        if isinstance(memory, str):
            console.print(f"{backend}: {memory}")

    console.print("\nthe run", style="bold")
    console.print(_run_table(plan))


def _shares_table(counts: dict[str, int], format_count: Callable[[int], str]) -> Table:
    table, total = make_table("", "", "", header=False), sum(counts.values())
    for name, count in counts.items():
        if count:
            table.add_row(name, format_count(count), f"{count / total:.1%}")
    table.add_row("total", format_count(total), style="bold")
    return table


def _memory_table(plan: Plan) -> Table:
    estimates = {backend: memory for backend, memory in plan.memory.items() if isinstance(memory, MemoryEstimate)}
    table = make_table("", *estimates, header=False)
    table.add_row("", *estimates)
    for label, field in MEMORY_ROWS.items():
        table.add_row(label, *(format_memory(getattr(memory, field)) for memory in estimates.values()))
    if plan.process_bytes:  # unknown on some systems, and 0 on a GPU
        label = f"process ({format_memory(plan.process_bytes)} without a model)"
        table.add_row(label, *(format_memory(plan.total_bytes(backend)) for backend in estimates))
    contexts = map(plan.longest_context, estimates)
    table.add_row("longest context that fits", *("-" if T is None else f"{T:,}" for T in contexts))
    if plan.seconds_by_backend:
        seconds = [plan.seconds_by_backend.get(backend) for backend in estimates]
        table.add_row("time of the run", *("-" if s is None else format_duration(s) for s in seconds))
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
    source = "given" if plan.peak is None else f"measured, {plan.flops_per_second / plan.peak:.0%} of matrix products"
    table.add_row("speed", f"{format_si(plan.flops_per_second)} FLOP/s ({source})")
    excluded = "evaluations, " if plan.evaluation_flops is None else ""
    if world_size > 1:
        communication = f"{format_memory(plan.sent_bytes)} per process and step"
        if plan.config.bandwidth is not None:
            seconds, compute_seconds = plan.sent_bytes / plan.config.bandwidth, plan.seconds_per_step
            communication += f", {seconds:.3g} s; the step computes for {compute_seconds:.3g} s"
        table.add_row("communication", communication)
    table.add_row("time", f"{format_duration(plan.seconds)}, without {excluded}optimizer, samples and checkpoints")
    return table
