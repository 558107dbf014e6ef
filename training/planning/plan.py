"""plan=true: prints the parameters, FLOPs, memory, steps and time of a run. Nothing is trained or downloaded.

`make_plan` counts parameters and FLOPs, simulates the memory (memory.py) and measures this machine's speed.
`print_plan` prints the result.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from common import system
from common.console import format_duration, format_memory, format_si, make_console, make_table, pluralize
from common.errors import UserError
from data import DataConfig, TokenizerConfig, tokenizer
from data.prepare import prepare_offline
from data.shards import PreparedData
from data.sources import all_files, resolve_sources
from model import AttentionConfig, GPTConfig
from model.attention import BACKENDS, ResolvedAttention, get_attention_fn, resolve_model
from model.flops import (
    attention_flops_per_token,
    find_flops_crossover,
    flops_per_token,
    linear_flops_per_token,
    params_by_part,
)
from model.gpt import GPT
from training.config import AUTO, EvalConfig, TrainConfig
from training.device import autocast, configure_backends, resolve_device, resolve_dtype
from training.distributed import Dist
from training.init_from import load_run_tokenizer
from training.optimizer import build_optimizers, optimizer_step
from training.planning.memory import MemoryEstimate, StepSpec, simulate_memory
from training.planning.micro_batch import estimate_micro_batch_size
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


@dataclass(frozen=True)
class Plan:
    """What a run needs. FLOPs are those of matrix products (model/flops.py), forward and backward.

    Counts, FLOPs and speeds are for all processes together; memory is for one.
    """

    step: StepSpec
    train: TrainConfig
    warmup_steps: int
    device: str
    tokenizer: str
    vocab_is_upper_bound: bool
    parameters: dict[str, int]  # by part of the model
    linear_flops: int  # per token
    attention_flops: int  # per token
    memory: dict[str, MemoryEstimate | str]  # by attention backend; a str is the reason why it cannot run
    process_bytes: int | None  # memory of a process without a model; None: unknown on this system
    world_size: int
    micro_batch_size: int
    accumulation: int
    steps: int
    epochs: float | None  # None: unknown before the data is prepared
    evaluations: int
    evaluation_flops: int | None  # of all evaluations; None: unknown before the data is prepared
    flops_per_second: float
    peak: float | None  # FLOP/s of large matrix products; None: flops_per_second was given

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.step.model.block_size

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def training_flops(self) -> int:
        return self.tokens * (self.linear_flops + self.attention_flops)

    @property
    def seconds(self) -> float:
        return (self.training_flops + (self.evaluation_flops or 0)) / self.flops_per_second

    def total_bytes(self, backend: str) -> int | None:
        """Predicted peak_memory_bytes of summary.json. None: unknown, or the backend cannot run."""
        memory = self.memory[backend]
        return None if self.process_bytes is None or isinstance(memory, str) else self.process_bytes + memory.reserved


def show_plan(config: Any) -> int:
    """Print the plan for a config of train.py -> exit code. With several processes, only rank 0 prints."""
    dist = Dist.from_environment()
    if dist.is_main:
        console = make_console(width=WIDTH)
        with console.status("") as status:
            plan = make_plan(config, dist, report=lambda activity: status.update(f"{activity} ..."))
        print_plan(plan, console)
    return 0


def make_plan(config: Any, dist: Dist, report: Callable[[str], None] = lambda activity: None) -> Plan:
    """The plan for a config of train.py and the processes of `dist`. `report` receives the current activity.

    Raises UserError for an unsupported device or attention backend, and if the vocabulary needs a download.
    """
    # device and kernel: a config that cannot run is refused first
    device = resolve_device(config.device, dist.local_rank)
    dtype = resolve_dtype(config.dtype, device)
    configure_backends(device, config.deterministic, config.tf32)
    resolve_kernel = partial(
        resolve_model,
        model=config.model,
        dtype=dtype,
        device=device,
        grad=True,
        document_mask=config.data.document_mask,
    )
    min_micro_batch_size, _ = config.train.split_batch(dist.world_size)
    resolve_kernel(config.attention, B=min_micro_batch_size)
    dist.share_cores()

    # memory of a process without a model, measured before this process allocates more than a run; then the vocabulary
    report("loading libraries")
    attend, T = get_attention_fn(config.attention), config.model.block_size
    if config.wandb.mode != "disabled":
        import wandb  # noqa: F401 (a run imports it, so its memory counts)
    process_bytes = _measure_process_bytes(config.model, attend, config.optimizer, device, dtype)
    spec = load_run_tokenizer(config.tokenizer.run, config.name)
    prepared = prepare_offline(config.data, config.tokenizer, T, spec)
    vocab_size, is_upper_bound = _find_vocab_size(config.data, config.tokenizer, prepared, spec)

    # memory
    step = StepSpec(
        config.model, vocab_size, config.attention, config.optimizer, dtype, device, config.data.document_mask
    )
    micro_batch_size, accumulation = estimate_micro_batch_size(config.train, step, dist)
    memory = {}
    for name in BACKENDS:
        report(f"simulating the memory of attention={name}")
        is_chosen = name == config.attention.backend
        attention = config.attention if is_chosen else AttentionConfig(backend=name, kernels=None, impl=None)
        memory[name] = _simulate_backend(
            replace(step, attention=attention), micro_batch_size, accumulation, resolve_kernel
        )

    # speed
    flops, peak, flops_per_second = flops_per_token(config.model, vocab_size, T), None, config.flops_per_second
    if flops_per_second is None:
        report("measuring the speed of this machine")
        resolve_kernel(config.attention, B=micro_batch_size)  # resolving the other backends can change global settings
        device_peak = peak_flops(device, dtype)
        speed = _measure_flops_per_second(step, micro_batch_size, flops, device_peak)
        flops_per_second, peak = dist.world_size * speed, dist.world_size * device_peak

    # steps and evaluations
    windows = _count_evaluated_windows(config.eval, config.train.batch_size, T, prepared)
    evaluation = None if windows is None else windows * T * flops // 3  # the forward pass is a third of the FLOPs
    steps = _count_steps(
        config.train,
        step_seconds=config.train.batch_size * T * flops / flops_per_second,
        evaluation_seconds=(evaluation or 0) / flops_per_second,
        steps_per_evaluation=config.eval.every,
    )
    evaluations = 1 + ceil(steps / config.eval.every)
    train_tokens = None if prepared is None else prepared.meta["tokens"]["train"]
    return Plan(
        step=step,
        train=config.train,
        warmup_steps=config.schedule.warmup_steps,
        device=system.device_name(device),
        tokenizer=config.tokenizer.name,
        vocab_is_upper_bound=is_upper_bound,
        parameters=params_by_part(GPT(config.model, vocab_size, attend, device="meta")),
        linear_flops=linear_flops_per_token(config.model, vocab_size),
        attention_flops=attention_flops_per_token(config.model, T),
        memory=memory,
        process_bytes=process_bytes,
        world_size=dist.world_size,
        micro_batch_size=micro_batch_size,
        accumulation=accumulation,
        steps=steps,
        epochs=None if train_tokens is None else steps * config.train.batch_size * T / train_tokens,
        evaluations=evaluations,
        evaluation_flops=None if evaluation is None else evaluations * evaluation,
        flops_per_second=flops_per_second,
        peak=peak,
    )


def _simulate_backend(
    step: StepSpec, micro_batch_size: int, accumulation: int, resolve_kernel: Callable[..., ResolvedAttention]
) -> MemoryEstimate | str:
    """The memory of a step, or the reason why its attention backend cannot run or be simulated."""
    backend = step.attention.backend
    if BACKENDS[backend].needs_compiler and step.device.type == "cuda":
        return f"attention={backend} is compiled on CUDA, and compiled steps are not simulated"
    try:
        resolve_kernel(step.attention, B=micro_batch_size)
    except UserError as error:
        return str(error)
    return simulate_memory(step, micro_batch_size, accumulation)


def _find_vocab_size(
    data: DataConfig, config: TokenizerConfig, prepared: PreparedData | None, spec: dict | None
) -> tuple[int, bool]:
    """Vocabulary size, and whether it is an upper bound. Raises UserError if it needs a download."""
    if prepared is not None:
        return prepared.tokenizer.n_vocab, False
    if spec is not None:
        return tokenizer.from_spec(spec).n_vocab, False
    files = all_files(resolve_sources(data))
    size = tokenizer.size_without_text(config, several=len(files) > 1 or files[0].is_table)
    if size is None:
        raise UserError(
            f"the vocabulary of tokenizer={config.name} depends on the data, which plan=true does not download; run "
            f"python prepare.py data={data.name} tokenizer={config.name} first, or set data.path=FILE"
        )
    return size, config.name == "bpe"


def _measure_process_bytes(
    model: GPTConfig, attend: Callable[..., Tensor], optimizer: Any, device: torch.device, dtype: torch.dtype
) -> int | None:
    """Memory of a training process without its model: Python, libraries, and what kernels load at first use.

    0 on devices other than the CPU, where peak_memory_bytes counts tensors only.
    """
    if device.type != "cpu":
        return 0
    tiny = GPT(replace(model, n_embd=8 * model.n_head, ngram_table_size=64), 64, attend)
    optimizers = build_optimizers(tiny, optimizer)
    _run_pass(tiny, torch.zeros(1, min(8, model.block_size), dtype=torch.int64), dtype)
    optimizer_step(tiny, optimizers, torch.amp.GradScaler(enabled=False), None)
    system.reset_peak_memory(device)
    return system.peak_memory_bytes(device)


def _run_pass(model: GPT, tokens: Tensor, dtype: torch.dtype) -> None:
    """A forward and a backward pass."""
    with autocast(tokens.device, dtype):
        loss = model(tokens, tokens)
    loss.backward()


def _measure_flops_per_second(step: StepSpec, max_batch_size: int, flops: int, peak: float) -> float:
    """Median FLOP/s of forward and backward passes. The first pass, which loads kernels, counts only if no other fits.

    flops: per token. peak: FLOP/s of matrix products. The batch size is chosen so that a pass takes about a second.
    """
    T = step.model.block_size
    batch_size = max(1, min(max_batch_size, int(0.5 * peak / (flops * T))))
    model = GPT(step.model, step.vocab_size, get_attention_fn(step.attention)).to(step.device)
    tokens = torch.randint(step.vocab_size, (batch_size, T), device=step.device)

    def run() -> None:
        _run_pass(model, tokens, step.dtype)
        model.zero_grad(set_to_none=True)

    seconds = time_calls(run, step.device, 1, MEASURED_SECONDS, MAX_MEASURED_PASSES)
    return batch_size * T * flops / statistics.median(seconds[1:] or seconds)


def _count_evaluated_windows(config: EvalConfig, batch_size: int, T: int, prepared: PreparedData | None) -> int | None:
    """Validation windows per evaluation. None: all windows, and their number is unknown before the data is prepared."""
    requested = inf if config.batches is None else config.batches * batch_size
    existing = inf if prepared is None else ceil((prepared.meta["tokens"]["val"] - 1) / T)
    return None if requested == existing == inf else int(min(requested, existing))


def _count_steps(config: TrainConfig, step_seconds: float, evaluation_seconds: float, steps_per_evaluation: int) -> int:
    """Optimizer steps of the run: train.steps, or as many as fit into train.minutes, if that is fewer."""
    if config.minutes is None:
        return config.steps
    available = 60 * config.minutes - evaluation_seconds  # the first evaluation is before the first step
    fitting = max(1, int(available / (step_seconds + evaluation_seconds / steps_per_evaluation)))
    return fitting if config.steps is None else min(config.steps, fitting)


def print_plan(plan: Plan, console: Console) -> None:
    model, vocab_size = plan.step.model, plan.step.vocab_size
    at_most = "at most " if plan.vocab_is_upper_bound else ""
    console.print(f"{model.name}: {describe_model(model)}, {plan.tokenizer} vocabulary of {at_most}{vocab_size:,}")

    console.print("\nparameters", style="bold")
    console.print(_shares_table(plan.parameters, "{:,}".format))

    console.print("\ntraining FLOPs per token, forward and backward", style="bold")
    flops = {"weights, 6 each (T C² per sequence)": plan.linear_flops, "attention (T² C)": plan.attention_flops}
    console.print(_shares_table(flops, format_si))
    T = find_flops_crossover(model, vocab_size)
    if T is None:
        console.print("attention never needs as many FLOPs as the weights")
    else:
        console.print(f"attention needs as many FLOPs as the weights at a context of {T:,}")

    micro_batch = pluralize(plan.micro_batch_size, "sequence")
    auto = " (auto)" if plan.train.micro_batch_size == AUTO else ""
    dtype = str(plan.step.dtype).removeprefix("torch.")
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
    return table


def _run_table(plan: Plan) -> Table:
    train, T = plan.train, plan.step.model.block_size
    table = make_table("", "", left=2, header=False)
    table.add_row("device", plan.device)
    factors = f"{pluralize(plan.world_size, 'process')} x {plan.accumulation} x {plan.micro_batch_size}"
    table.add_row("step", f"{factors} = {train.batch_size:,} sequences x {T:,} = {plan.tokens_per_step:,} tokens")
    budget = f", which fit into {train.minutes:g} minutes" if train.minutes is not None else ""
    table.add_row("steps", f"{plan.steps:,}{budget}, including {min(plan.steps, plan.warmup_steps):,} for warmup")
    passes = "data not prepared yet" if plan.epochs is None else format_epochs(plan.epochs)
    table.add_row("tokens", f"{plan.tokens:,} ({passes})")
    evaluations = ""
    if plan.evaluation_flops is not None:
        evaluations = f", {format_si(plan.evaluation_flops)} for {pluralize(plan.evaluations, 'evaluation')}"
    table.add_row("FLOPs", f"{format_si(plan.training_flops)} for training{evaluations}")
    source = "given" if plan.peak is None else f"measured, {plan.flops_per_second / plan.peak:.0%} of matrix products"
    table.add_row("speed", f"{format_si(plan.flops_per_second)} FLOP/s ({source})")
    excluded = "evaluations, " if plan.evaluation_flops is None else ""
    table.add_row("time", f"{format_duration(plan.seconds)}, without {excluded}optimizer, samples and checkpoints")
    return table
