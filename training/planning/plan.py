"""What a run will take, before it runs: parameters, FLOPs, memory, steps and time. Nothing is trained or downloaded.

make_plan counts, simulates (planning/memory.py) and measures; table.py prints it.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor

from common import system
from common.errors import UserError
from data import sources, tokenizer
from data.prepare import Prepared, prepare_offline
from model import AttentionConfig
from model.attention import BACKENDS, get_attention_fn, resolve_model
from model.flops import attention_flops_per_token, crossover, flops_per_token, linear_flops_per_token, params_by_part
from model.gpt import GPT
from training import optimizer
from training.device import autocast, configure_backends, resolve_device, resolve_dtype
from training.distributed import Dist
from training.init_from import load_run_tokenizer
from training.planning import micro_batch
from training.planning.memory import Memory, simulate_memory
from training.speed import peak_flops, synchronize


@dataclass(frozen=True)
class Plan:
    """FLOPs: of matrix products, see model/flops.py; per token and of training, a forward and a backward pass.

    parameters: by part. at_most: whether vocab_size is an upper bound. crossover: the context at which attention takes
    as many FLOPs as all else, None: never. memory: by attention backend, of one process; a sentence: why it cannot
    run here. process_bytes: what a CPU process holds without the model, None: unknown. batch_size, steps, tokens and
    FLOPs are of all processes together. epochs, evaluation_flops: None: unknown until the text is prepared.
    flops_per_second: given or measured, of all processes; peak: what matrix products reach, None where it was given.
    """

    device: str
    dtype: str
    vocab_size: int
    at_most: bool
    parameters: dict[str, int]
    linear_flops: int
    attention_flops: int
    crossover: int | None
    memory: dict[str, Memory | str]
    process_bytes: int | None
    world_size: int
    micro_batch_size: int
    accumulation: int
    tokens_per_step: int
    steps: int
    tokens: int
    epochs: float | None
    evaluations: int
    training_flops: int
    evaluation_flops: int | None
    flops_per_second: float
    peak: float | None

    @property
    def seconds(self) -> float:
        return (self.training_flops + (self.evaluation_flops or 0)) / self.flops_per_second

    def total_bytes(self, backend: str) -> int | None:
        """The peak_memory_bytes that a run's summary.json will have. None: unknown, or it cannot run here."""
        memory = self.memory[backend]
        return None if self.process_bytes is None or isinstance(memory, str) else self.process_bytes + memory.reserved


def make_plan(config: Any, dist: Dist, say: Callable[[str], None] = lambda text: None) -> Plan:
    """The plan of `config`, for the processes of `dist`. `say` is told what is going on.

    Raises UserError where the device or the attention would be refused, and where it takes a download to know the
    vocabulary.
    """
    device = resolve_device(config.device, dist.local_rank)
    dtype = resolve_dtype(config.dtype, device)
    least, _ = config.train.plan(dist.world_size)
    T, batch_size = config.model.block_size, config.train.batch_size
    configure_backends(device, config.deterministic, config.tf32)
    _resolve(config.attention, config, least, dtype, device)
    attend = get_attention_fn(config.attention)
    dist.share_cores()

    say("loading libraries")
    process_bytes = _process_bytes(config, attend, device, dtype)  # first, while the process is as small as a run's
    spec = load_run_tokenizer(config.tokenizer.run, config.name)
    prepared = prepare_offline(config.data, config.tokenizer, T, spec)
    vocab_size, at_most = _vocabulary(config, prepared, spec)
    model = GPT(config.model, vocab_size, attend, device="meta")
    micro_batch_size, accumulation = micro_batch.estimate_micro_batch_size(config, model, dtype, device, dist)

    memory, followed = {}, {}
    for name in BACKENDS:
        say(f"following the memory of attention={name}")
        own = name == config.attention.backend
        other = config.attention if own else AttentionConfig(backend=name, kernels=None, impl=None)
        if BACKENDS[name].needs_compiler and device.type == "cuda":
            memory[name] = f"attention={name} is compiled, which is not followed here"
            continue
        try:
            kernel = _resolve(other, config, micro_batch_size, dtype, device)
        except UserError as refusal:
            memory[name] = str(refusal)
            continue
        if kernel not in followed:  # two backends may come to the same
            followed[kernel] = simulate_memory(
                model, get_attention_fn(other), config.optimizer, B=micro_batch_size, T=T, accumulation=accumulation,
                dtype=dtype, device=device, document_mask=config.data.document_mask,
            )  # fmt: skip
        memory[name] = followed[kernel]

    flops, peak, speed = flops_per_token(config.model, vocab_size, T), None, config.flops_per_second
    if speed is None:
        say("measuring this machine's speed")
        peak = peak_flops(device, dtype) * dist.world_size
        _resolve(config.attention, config, micro_batch_size, dtype, device)  # the others may have set another up
        model = GPT(config.model, vocab_size, attend).to(device)
        speed = _measure(model, flops * T, micro_batch_size, peak / dist.world_size, dtype) * dist.world_size

    tokens_per_step = batch_size * T
    windows = _evaluated_windows(config, prepared)
    evaluation = 0 if windows is None else windows * T * flops // 3  # a forward pass is a third of both
    steps = _steps(config, tokens_per_step * flops / speed, evaluation / speed)
    evaluations = 1 + ceil(steps / config.eval.every)
    tokens = steps * tokens_per_step
    return Plan(
        device=system.device_name(device), dtype=str(dtype).removeprefix("torch."), vocab_size=vocab_size,
        at_most=at_most,
        parameters=params_by_part(model), linear_flops=linear_flops_per_token(config.model, vocab_size),
        attention_flops=attention_flops_per_token(config.model, T), crossover=crossover(config.model, vocab_size),
        memory=memory, process_bytes=process_bytes, world_size=dist.world_size, micro_batch_size=micro_batch_size,
        accumulation=accumulation, tokens_per_step=tokens_per_step, steps=steps, tokens=tokens,
        epochs=None if prepared is None else tokens / prepared.meta["tokens"]["train"], evaluations=evaluations,
        training_flops=tokens * flops, evaluation_flops=None if windows is None else evaluations * evaluation,
        flops_per_second=speed, peak=peak,
    )  # fmt: skip


def _resolve(attention: AttentionConfig, config: Any, B: int, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel that `attention` comes to. Raises UserError where it cannot train `config.model` here."""
    document_mask = config.data.document_mask
    return resolve_model(
        attention, config.model, B=B, dtype=dtype, device=device, grad=True, document_mask=document_mask
    ).resolved


def _vocabulary(config: Any, prepared: Prepared | None, spec: dict | None) -> tuple[int, bool]:
    """(vocabulary size, whether that is an upper bound). Raises UserError where it takes a download to know."""
    if prepared is not None:
        return prepared.encoding.n_vocab, False
    if spec is not None:
        return tokenizer.from_spec(spec).n_vocab, False
    places = sources.all_places(config.data)
    size = tokenizer.size_without_text(config.tokenizer, several=len(places) > 1 or places[0].is_table)
    if size is None:
        raise UserError(
            f"the vocabulary of tokenizer={config.tokenizer.name} depends on the text, which a plan does not download; "
            f"run python prepare.py data={config.data.name} tokenizer={config.tokenizer.name} first, or set "
            "data.path=FILE"
        )
    return size, config.tokenizer.name == "bpe"


def _process_bytes(config: Any, attend: Callable[..., Tensor], device: torch.device, dtype: torch.dtype) -> int | None:
    """What a CPU process that trains holds besides tensors: Python, libraries, and what kernels load at first use.

    0 on other devices, whose allocators count tensors alone.
    """
    if device.type != "cpu":
        return 0
    if config.wandb.mode != "disabled":
        import wandb  # noqa: F401 (a run imports it; nothing is logged here)
    tiny = GPT(replace(config.model, n_embd=8 * config.model.n_head, ngram_table_size=64), 64, attend)
    _pass(tiny, torch.zeros(1, min(8, config.model.block_size), dtype=torch.int64), dtype)
    for each in optimizer.build_optimizers(tiny, config.optimizer):
        each.step()
    system.reset_peak_memory(device)
    return system.peak_memory_bytes(device)


def _pass(model: GPT, tokens: Tensor, dtype: torch.dtype) -> None:
    with autocast(tokens.device, dtype):
        loss = model(tokens, tokens)
    loss.backward()


def _measure(model: GPT, flops: int, most: int, peak: float, dtype: torch.dtype) -> float:
    """FLOP/s of forward and backward passes of at most `most` sequences, each of `flops`, at about a second a pass."""
    device = next(model.parameters()).device
    B = max(1, min(most, int(0.5 * peak / flops)))
    tokens = torch.randint(model.vocab_size, (B, model.config.block_size), device=device)
    seconds = []
    while sum(seconds) < 2:
        synchronize(device)
        started = time.perf_counter()
        _pass(model, tokens, dtype)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
        model.zero_grad(set_to_none=True)
    return B * flops / statistics.median(seconds[1:] or seconds)  # the first warms up, unless it takes that long


def _evaluated_windows(config: Any, prepared: Prepared | None) -> int | None:
    """How many validation windows an evaluation looks at; None: all, of a text that is not prepared yet."""
    wanted = inf if config.eval.batches is None else config.eval.batches * config.train.batch_size
    there = inf if prepared is None else ceil((prepared.meta["tokens"]["val"] - 1) / config.model.block_size)
    return None if wanted == there == inf else int(min(wanted, there))


def _steps(config: Any, step_seconds: float, evaluation_seconds: float) -> int:
    """The optimizer steps of the run: train.steps, or as many as fit into train.minutes where they are fewer."""
    if config.train.minutes is None:
        return config.train.steps
    left = 60 * config.train.minutes - evaluation_seconds  # the first look is ahead of the first step
    fitting = max(1, int(left / (step_seconds + evaluation_seconds / config.eval.every)))
    return fitting if config.train.steps is None else min(config.train.steps, fitting)
