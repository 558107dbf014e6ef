"""Estimates the memory of training by simulating optimizer steps on fake tensors.

Fake tensors (torch's FakeTensorMode) have shapes but no data: nothing is computed or allocated. A dispatch mode counts
the bytes of each storage that the training code creates and frees. The estimate therefore needs no formula and covers
every backend and option. Steps are simulated without torch.compile; compiled steps need less memory.

PyTorch's torch.distributed._tools.mem_tracker.MemTracker finds the same peak, but reports neither the attention
scores nor the small blocks. Without the small blocks, CPU estimates were 18.6 % (naive) and 20.5 % (flash) too low.
"""

import platform
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Private: torch has no public API for tensors without data or for a hook on every operation. Checked with torch 2.13.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import AttentionConfig, GPTConfig
from model.attention import get_attention_fn
from model.gpt import GPT
from training.config import AdamWConfig, MuonConfig
from training.device import autocast
from training.optimizer import build_optimizers, optimizer_step

MAX_SMALL_BLOCK_BYTES = 16 * 2**20
STEPS = 2  # memory peaks in the second step: the optimizer allocates its state in the first


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


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one process in bytes.

    weights: parameters and buffers. activations: tensors that exist after a forward pass, except weights, gradients
    and optimizer state. scores: their part of shape (..., T, T), which attention saves for the backward pass. peak: the
    largest sum of all tensors. reserved: what the allocator takes from the system. On a CPU with glibc, malloc keeps
    freed blocks of up to MAX_SMALL_BLOCK_BYTES, so it reserves about the small activations in addition to the peak
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

    current: bytes that exist now. small: their part in blocks of up to MAX_SMALL_BLOCK_BYTES.
    """

    def __init__(self):
        super().__init__()
        self.current = self.small = self.peak = 0
        self.is_in_attention = False
        self._attention_shapes = weakref.WeakKeyDictionary()  # storage -> shape if attention created it, else None

    def track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._attention_shapes:
            return
        self._attention_shapes[storage] = tensor.shape if self.is_in_attention else None
        self._add(storage.nbytes(), 1)
        weakref.finalize(storage, self._add, storage.nbytes(), -1)

    def _add(self, size: int, sign: int) -> None:
        self.current += sign * size
        self.small += sign * size if size <= MAX_SMALL_BLOCK_BYTES else 0
        self.peak = max(self.peak, self.current)

    def score_bytes(self, T: int) -> int:
        """Bytes of the tensors of shape (..., T, T) that attention created and that still exist."""
        shapes = self._attention_shapes.items()
        return sum(storage.nbytes() for storage, shape in shapes if shape is not None and shape[-2:] == (T, T))

    def tag_attention(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap `attend` so that the storages which it creates are tagged as created by attention."""

        def tagged(*args, **kwargs):
            self.is_in_attention = True
            try:
                return attend(*args, **kwargs)
            finally:
                self.is_in_attention = False

        return tagged

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.track(leaf)
        return result


def simulate_memory(step: StepSpec, micro_batch_size: int, accumulation: int) -> MemoryEstimate:
    """Memory for training with `accumulation` micro batches per optimizer step, without DDP's gradient buckets."""
    T, device, tracker = step.model.block_size, step.device, MemoryTracker()
    attend = tracker.tag_attention(get_attention_fn(step.attention))
    with FakeTensorMode():
        with device:
            model = GPT(step.model, step.vocab_size, attend, device=device)
        for tensor in (*model.parameters(), *model.buffers()):
            tracker.track(tensor)
        weights = tracker.current
        optimizers = build_optimizers(model, step.optimizer)
        with tracker:
            for _ in range(STEPS):
                optimizer_state = tracker.current - weights
                for _ in range(min(2, accumulation)):  # from the second on, gradients and activations exist
                    current, small = tracker.current, tracker.small
                    tokens, targets, doc_ids = torch.zeros(3, micro_batch_size, T, dtype=torch.int64, device=device)
                    with autocast(device, step.dtype):
                        loss = model(tokens, targets, doc_ids=doc_ids if step.document_mask else None)
                    activations, small_activations = tracker.current - current, tracker.small - small
                    scores = tracker.score_bytes(T)
                    loss.backward()
                    del loss, tokens, targets, doc_ids
                gradients = tracker.current - weights - optimizer_state
                optimizer_step(model, optimizers, torch.amp.GradScaler(device.type, enabled=False), None)
    keeps_small_blocks = device.type == "cpu" and platform.libc_ver()[0] == "glibc"
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=tracker.current - weights,
        activations=activations,
        scores=scores,
        peak=tracker.peak,
        reserved=tracker.peak + (small_activations if keeps_small_blocks else 0),
    )
