"""plan=true: prints parameters, FLOPs, memory, steps and time of a run, without training it."""

import math
from collections.abc import Callable

import torch
from torch import nn

from common.console import format_duration, format_memory, format_si, pluralize, print_text
from common.errors import UserError
from common.machine import device_name, dtype_name
from data.prepare import prepare
from data.tokenizer import OPENAI_SIZES
from model.attention import naive
from model.flops import (
    attention_flops_per_token,
    params_by_part,
    weight_flops_per_token,
)
from model.gpt import GPT
from model.loss import max_chunk_logits
from training.banner import describe_model, format_epochs
from training.build import load_run_tokenizer
from training.config import FORWARD_SHARE, STUDENT_LENGTH, RunConfig
from training.optimizer import build_optimizers, state_by_name
from training.parallel import FSDP2
from training.presets import choose_preset
from training.runtime import Runtime, resolve_runtime
from training.speed import measure_flops_per_second


def show_plan(config: RunConfig) -> int:
    """Print the plan of a run on rank 0. Returns the exit code."""
    config = choose_preset(config)
    runtime = resolve_runtime(config)
    if runtime.dist.is_main:
        for title, value in make_plan(config, runtime):
            print_text(f"{title:<26}{value}")
    return 0


def make_plan(config: RunConfig, runtime: Runtime) -> list[tuple[str, str]]:
    """Plan a run. Returns titles and values.

    FLOPs count matrix products, forward and backward (model/flops.py). Memory is of one process.
    All other numbers are for all processes together.
    Raises UserError if the vocabulary or the length of an epoch is unknown.
    """
    T = config.model.block_size
    spec = load_run_tokenizer(config.tokenizer.run)
    data = prepare(config.data, config.tokenizer, T, spec, offline=True)
    if data is None:
        epoch_tokens = math.inf
        vocab_size = OPENAI_SIZES.get(config.tokenizer.name, config.tokenizer.vocab_size)
    else:
        epoch_tokens = data.meta["tokens"]["train"]
        vocab_size = data.meta["vocab_size"]
    if vocab_size is None:
        raise UserError("the vocabulary depends on data that is not here; run prepare.py first")
    with torch.device("meta"):
        model = GPT(config.model, vocab_size)
    flops = {
        "weights": weight_flops_per_token(config.model, vocab_size),
        "attention": attention_flops_per_token(config.model, T),
    }
    flops_per_second = config.flops_per_second
    if flops_per_second is None:
        of_one_device = measure_flops_per_second(config, runtime, vocab_size)
        flops_per_second = runtime.dist.world_size * of_one_device
    tokens_per_step = config.train.batch_size * T
    flops_per_step = tokens_per_step * sum(flops.values())
    seconds_per_step = flops_per_step / flops_per_second
    model_steps = count_steps(config, seconds_per_step, epoch_tokens / tokens_per_step)
    seconds = 60 * (config.train.minutes or math.inf)
    n_teachers = config.train.fit_teachers(seconds / (model_steps * seconds_per_step))
    teacher_steps = max(1, n_teachers) * model_steps
    student_step_cost = 1 + FORWARD_SHARE * n_teachers  # a step of a teacher costs 1
    student_steps = 0
    if n_teachers > 0:
        steps_in_time = (seconds / seconds_per_step - teacher_steps) / student_step_cost
        student_steps = min(STUDENT_LENGTH * model_steps, steps_in_time)
    steps = math.ceil(teacher_steps + student_steps)
    tokens = steps * tokens_per_step
    memory = estimate_memory(config, runtime, model)
    memory["teachers"] = n_teachers * sum(p.nbytes for p in model.parameters())
    epochs = "data not prepared yet" if data is None else format_epochs(tokens / epoch_tokens)

    device = f"{device_name(runtime.device)}, {dtype_name(runtime.dtype)}"
    processes = pluralize(runtime.dist.world_size, "process")
    split = f"{processes} x {runtime.accumulation} x {runtime.micro_batch_size}"
    equivalent_steps = teacher_steps + student_step_cost * student_steps  # with as many FLOPs
    total_flops = format_si(equivalent_steps * flops_per_step)
    time = format_duration(equivalent_steps * seconds_per_step)
    models = f", of {n_teachers} teachers and their student" if n_teachers else ""
    return [
        ("preset", config.preset or "none"),
        (
            "model",
            f"{config.model.name}, {describe_model(config.model)}, vocabulary {vocab_size:,}",
        ),
        ("device", f"{device}, attention {runtime.attention}"),
        *list_parts("parameters", params_by_part(model), "{:,}".format),
        *list_parts("training FLOPs per token", flops, format_si),
        *list_parts("memory per process", memory, format_memory),
        ("step", f"{split} = {config.train.batch_size:,} sequences x {T:,} tokens"),
        ("steps", f"{steps:,}{models}: {tokens:,} tokens ({epochs})"),
        ("FLOPs", f"{total_flops} at {format_si(flops_per_second)} FLOP/s"),
        ("time", f"{time}, without evaluations and optimizer"),
    ]


def count_steps(config: RunConfig, seconds_per_step: float, steps_per_epoch: float) -> float:
    """Steps of a model, until train.steps, train.epochs or train.minutes ends it.

    steps_per_epoch: infinite if the data is not prepared.
    """
    train = config.train
    steps = min(
        train.steps or math.inf,
        (train.epochs or math.inf) * steps_per_epoch,
        60 * (train.minutes or math.inf) / seconds_per_step,
    )
    if math.isinf(steps):
        raise UserError("train.epochs needs data on this machine; run python prepare.py first")
    return steps


def estimate_memory(config: RunConfig, runtime: Runtime, model: GPT) -> dict[str, int]:
    """Estimate the bytes of one process. Weights, gradients and optimizer state are exact.

    model: on the meta device, as its gradients and optimizer state will be.
    """
    optimizers = build_optimizers(model, config.optimizer, runtime.dtype)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["fused"] = False  # which the meta device does not have
        optimizer.step()  # makes its state
    states = state_by_name(model, optimizers).values()
    state_bytes = sum(tensor.nbytes for state in states for tensor in state.values())
    weight_bytes = sum(p.nbytes for p in model.parameters())
    # number of processes that share one copy of the model
    shards = runtime.dist.world_size if isinstance(runtime.parallel, FSDP2) else 1
    gradient_bytes = weight_bytes // shards
    if shards > 1 and runtime.accumulation > 1:
        gradient_bytes += weight_bytes  # FSDP accumulates complete gradients
    return {
        "weights": weight_bytes // shards,
        "gradients": gradient_bytes,
        "optimizer state": state_bytes // shards,
        "activations": estimate_activations(config, runtime, model),
    }


def estimate_activations(config: RunConfig, runtime: Runtime, model: GPT) -> int:
    """Estimate the bytes of a forward pass that the backward pass needs, without checkpointing.

    For each token, these are the inputs and outputs of the linear layers, queries and keys after
    rotation, the attention weights of the naive kernel, and the float32 residual of each block;
    for each logit, three float32 numbers; in half precision, a copy of the linear layers' weights.

    The estimates for 26 runs were between 11 % below and 10 % above a simulation of all tensors: 6
    shapes of 1 million to 7 billion parameters, naive and flash, in float32 and bfloat16, on a CPU.
    """
    C = config.model.n_embd
    n_layer = config.model.n_layer
    itemsize = runtime.dtype.itemsize
    linears = [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]
    numbers = sum(layer.in_features + layer.out_features for layer in linears)
    if config.model.position == "rotary":
        numbers += 4 * C * n_layer
    if runtime.attend is naive:
        numbers += config.model.n_head * config.model.block_size * n_layer
    tokens = runtime.micro_batch_size * config.model.block_size
    logits = min(tokens * model.wte.num_embeddings, max_chunk_logits(runtime.device))
    activations = tokens * (itemsize * numbers + 4 * C * n_layer) + 12 * logits
    if itemsize < 4:
        activations += sum(itemsize * layer.weight.numel() for layer in linears)
    return activations


def list_parts(
    title: str, counts: dict[str, int], format_count: Callable[[float], str]
) -> list[tuple[str, str]]:
    """A row for the sum of the counts, and a row for each part."""
    total = sum(counts.values())
    rows = [(title, format_count(total))]
    for name, count in counts.items():
        if count > 0:
            rows.append((f"  {name}", f"{format_count(count)} ({count / total:.1%})"))
    return rows
