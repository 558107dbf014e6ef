"""Estimates the memory of training by simulating optimizer steps on fake tensors.

Fake tensors (torch's FakeTensorMode) have shapes but no data: nothing is computed or allocated. A dispatch mode counts
the bytes of each storage that the training code creates and frees. The estimate therefore needs no formula and covers
every backend and option. Steps are simulated without torch.compile; compiled steps need less memory.

PyTorch's torch.distributed._tools.mem_tracker.MemTracker finds the same peak, but reports neither the attention
scores nor the small blocks. Without the small blocks, CPU estimates were 18.6 % (naive) and 20.5 % (flash) too low.
"""

import platform
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

# Private: torch has no public API for tensors without data or for a hook on every operation. Checked with torch 2.13.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.errors import UserError
from common.interrupt import StopRequest
from model import AttentionConfig, GPTConfig
from model.attention import BACKENDS, get_attention_fn
from model.gpt import GPT
from training.activation_checkpointing import checkpoint_activations
from training.config import AdamWConfig, MuonConfig
from training.device import Runtime, autocast
from training.distributed import Dist
from training.optimizer import build_optimizers, optimizer_step, set_lr
from training.sharding import local_tensor

MAX_SMALL_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class StepSpec:
    """Everything that determines the memory of an optimizer step, except the number of sequences."""

    model: GPTConfig
    vocab_size: int
    attention: AttentionConfig
    optimizer: AdamWConfig | MuonConfig
    dtype: torch.dtype
    device: torch.device
    document_mask: bool
    activation_checkpointing: str
    dist: Dist

    @classmethod
    def from_config(cls, config: Any, vocab_size: int, runtime: Runtime) -> "StepSpec":
        """The steps of a run. config: the config of train.py."""
        return cls(
            config.model,
            vocab_size,
            config.attention,
            config.optimizer,
            runtime.dtype,
            runtime.device,
            config.data.document_mask,
            config.train.activation_checkpointing,
            runtime.dist,
        )


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one process in bytes.

    weights: parameters and buffers. activations: tensors that exist after a forward pass, except weights, gradients
    and optimizer state; with FSDP, also the embeddings and the head, which are then still collected. scores: their part
    of shape (..., T, T), which attention saves for the backward pass. peak: the largest sum of all tensors. reserved:
    what the allocator takes from the system. On a CPU with glibc, malloc keeps freed blocks of up to
    MAX_SMALL_BLOCK_BYTES, so it reserves about the small activations in addition to the peak
    (docs/experiments/memory-and-planning.md); elsewhere reserved is the peak.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    scores: int
    peak: int
    reserved: int


class MemoryTracker(TorchDispatchMode):
    """Context manager that counts the bytes of all storages which tensor operations create. Views count once.

    current: bytes that exist now. small: their part in blocks of up to MAX_SMALL_BLOCK_BYTES. scores: their part that
    attention has created with shape (..., T, T). activations, small_activations, activation_scores: what the last
    forward pass of a model has added, if start_forward and end_forward are its hooks.
    """

    def __init__(self, T: int):
        super().__init__()
        self.T, self.is_in_attention = T, False
        self.current = self.small = self.scores = self.peak = 0
        self._sizes = weakref.WeakKeyDictionary()  # storage -> list of its size in bytes

    def track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._sizes:
            size = self._sizes[storage] = [storage.nbytes()]
            is_score = self.is_in_attention and tensor.shape[-2:] == (self.T, self.T)
            self._add(size[0], is_score)
            weakref.finalize(storage, lambda: self._add(-size[0], is_score))

    @contextmanager
    def count_resizing(self) -> Iterator[None]:
        """Context manager that also counts storages which change their size: FSDP releases weights in this way."""
        resize = torch.UntypedStorage.resize_

        def counted_resize(storage: torch.UntypedStorage, num_bytes: int) -> None:
            if storage in self._sizes:
                self._add(num_bytes - self._sizes[storage][0], False)
                self._sizes[storage][0] = num_bytes
            resize(storage, num_bytes)

        torch.UntypedStorage.resize_ = counted_resize
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize

    def _add(self, size: int, is_score: bool) -> None:
        self.current += size
        self.small += size if abs(size) <= MAX_SMALL_BLOCK_BYTES else 0
        self.scores += size if is_score else 0
        self.peak = max(self.peak, self.current)

    def start_forward(self, *_) -> None:
        self._before_forward = self.current, self.small

    def end_forward(self, *_) -> None:
        current, small = self._before_forward
        self.activations, self.small_activations = self.current - current, self.small - small
        self.activation_scores = self.scores

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(hasattr(kind, "full_tensor") for kind in types):  # a sharded tensor
            return NotImplemented  # its operations on local tensors are counted instead
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.track(leaf)
        return result


def simulate_memory(step: StepSpec, micro_batch_size: int, accumulation: int) -> MemoryEstimate:
    """Memory for training with `accumulation` micro batches per optimizer step.

    Raises UserError for a backend that is compiled on the device.
    """
    backend, device, tracker = step.attention.backend, step.device, MemoryTracker(step.model.block_size)
    if BACKENDS[backend].needs_compiler and device.type == "cuda":
        raise UserError(
            f"attention={backend} is compiled on CUDA, and compiled steps are not simulated; if "
            "train.micro_batch_size=auto, set a number"
        )
    attend = get_attention_fn(step.attention)

    def tracked_attention(*args, **kwargs) -> Tensor:
        tracker.is_in_attention = True
        y = attend(*args, **kwargs)
        tracker.is_in_attention = False
        return y

    step = replace(step, dist=step.dist.simulated(device))
    with FakeTensorMode():
        model = step.dist.build_model(partial(GPT, step.model, step.vocab_size, tracked_attention), device, step.dtype)
        checkpoint_activations(model, step.activation_checkpointing)
        model.register_forward_pre_hook(tracker.start_forward, prepend=True)  # before FSDP collects weights
        model.register_forward_hook(tracker.end_forward)
        for tensor in (*model.parameters(), *model.buffers()):
            tracker.track(local_tensor(tensor))
        weights = tracker.current
        optimizers = build_optimizers(model, step.optimizer, step.dtype)
        # A signal must not raise in the tracker's finalizers, where Python ignores exceptions.
        with tracker.count_resizing(), tracker, StopRequest() as stop:
            stop.enable()
            allocate_optimizer_state(model, optimizers)
            tracker.peak = tracker.current  # without what sharded tensors allocate in the first call of an operation
            # From the second micro batch on, gradients and activations exist. DDP's buffers for gradients always exist.
            micro_batches = 2 if step.dist.keeps_gradients else min(2, accumulation)
            run_steps(model, optimizers, step, micro_batch_size, micro_batches)
            step.dist.unshard(model, model, step.dtype)  # for an evaluation
        if stop.requested:
            raise KeyboardInterrupt
    keeps_small_blocks = device.type == "cpu" and platform.libc_ver()[0] == "glibc"
    return MemoryEstimate(
        weights=weights,
        gradients=sum(local_tensor(p).nbytes for p in model.parameters()),
        optimizer=tracker.current - weights,
        activations=tracker.activations,
        scores=tracker.activation_scores,
        peak=tracker.peak,
        reserved=tracker.peak + (tracker.small_activations if keeps_small_blocks else 0),
    )


def allocate_optimizer_state(model: GPT, optimizers: list[Optimizer]) -> None:
    """Run a step with zero gradients and learning rates, which does not change the weights."""
    set_lr(optimizers, 0.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    # Without a scaler no overflow of float16 skips a step, so the optimizer always allocates its state.
    optimizer_step(model, optimizers, torch.amp.GradScaler(enabled=False), None)


def run_steps(
    model: GPT, optimizers: list[Optimizer], step: StepSpec, micro_batch_size: int, accumulation: int
) -> None:
    """Run an optimizer step on zeros, after allocate_optimizer_state. The weights do not change."""
    shape = (3, micro_batch_size, step.model.block_size)
    tokens, targets, doc_ids = torch.zeros(shape, dtype=torch.int64, device=step.device)
    for micro_step in range(accumulation):
        with step.dist.sync_gradients(model, is_last=micro_step == accumulation - 1):
            with autocast(step.device, step.dtype):
                loss = model(tokens, targets, doc_ids=doc_ids if step.document_mask else None)
            loss.backward()
            del loss
    optimizer_step(model, optimizers, torch.amp.GradScaler(enabled=False), None)
