"""What training a model will hold in memory, without training it.

One optimizer step is run on fake tensors, which have shapes but no numbers (torch's FakeTensorMode), while every
storage that it makes and lets go of is followed. So the figures are those of the code that trains, whatever the
backend, and no formula has to be kept true. Eager code is followed; a compiled step holds less.
"""

import copy
import platform
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.gpt import GPT
from training import optimizer
from training.config import AdamWConfig, MuonConfig
from training.device import autocast

SMALL = 16 * 2**20  # bytes
STEPS = 2  # the second has the optimizer's state from the start


@dataclass(frozen=True)
class Memory:
    """Bytes, of one process.

    weights: parameters and buffers. activations: all that lives at the end of a forward pass besides weights,
    gradients and the optimizer's state; of them scores, the (T, T) tensors of attention, kept for the backward pass.
    peak: the most that lives at once. held: the most that the allocator holds for it. That is the peak, but on a CPU
    with glibc, whose malloc keeps about as much again for the activations that lie in blocks of up to SMALL, as they
    come and go: a rule fitted to measured runs (EXPERIMENTS.md).
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    scores: int
    peak: int
    reserved: int


class MemoryTracker(TorchDispatchMode):
    """Inside, follows every storage that a tensor operation makes: each once, and a view costs nothing."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.small, self.attending = 0, 0, 0, False
        self.shapes = weakref.WeakKeyDictionary()  # storage -> (its first tensor's shape, made by attention?)

    def track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self.shapes:
            return
        size = storage.nbytes()
        self.shapes[storage] = (tensor.shape, self.attending)
        self.now += size
        self.peak = max(self.peak, self.now)
        self.small += size if size <= SMALL else 0
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.now -= size
        self.small -= size if size <= SMALL else 0

    def scores(self, T: int) -> int:
        """Bytes of the (..., T, T) tensors that live, of those that attention made."""
        of_attention = [(storage, shape) for storage, (shape, attending) in self.shapes.items() if attending]
        return sum(storage.nbytes() for storage, shape in of_attention if shape[-2:] == (T, T))

    def tag_attention(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`attend`, with the storages that it makes marked as attention's."""

        def watched(*args, **kwargs):
            self.attending = True
            try:
                return attend(*args, **kwargs)
            finally:
                self.attending = False

        return watched

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.track(leaf)
        return made


def simulate_memory(
    model: GPT, attend: Callable[..., Tensor], config: AdamWConfig | MuonConfig, *,
    B: int, T: int, accumulation: int, dtype: torch.dtype, device: torch.device, document_mask: bool,
) -> Memory:  # fmt: skip
    """The memory for training `model` with `attend` as its attention, on micro batches of B sequences of T tokens.

    Of the model (which may be on the meta device) shapes are taken alone, and nothing is computed. document_mask:
    whether documents are masked. Gradient clipping and the copies that DDP makes are not followed.
    """
    model, storages = copy.deepcopy(model), MemoryTracker()
    for block in model.blocks:
        block.attn.attend = storages.tag_attention(attend)
    with FakeTensorMode(), storages:
        _materialise(model, device)
        weights = storages.now
        optimizers = optimizer.build_optimizers(model, config)
        for _ in range(STEPS):
            state = storages.now - weights
            for _ in range(min(2, accumulation)):  # in the second, gradients live beside the activations
                before, small = storages.now, storages.small
                tokens = torch.zeros(3, B, T, dtype=torch.int64, device=device)
                with autocast(device, dtype):
                    loss = model(tokens[0], tokens[1], doc_ids=tokens[2] if document_mask else None)
                activations, scores, small = storages.now - before, storages.scores(T), storages.small - small
                loss.backward()
                del loss, tokens
            gradients = storages.now - weights - state
            for each in optimizers:
                each.step()
            model.zero_grad(set_to_none=True)
    by_malloc = device.type == "cpu" and platform.libc_ver()[0] == "glibc"
    return Memory(
        weights=weights, gradients=gradients, optimizer=storages.now - weights, activations=activations,
        scores=scores, peak=storages.peak, reserved=storages.peak + (small if by_malloc else 0),
    )  # fmt: skip


def _materialise(model: GPT, device: torch.device) -> None:
    """Put new tensors in the place of all parameters and buffers; what was shared stays shared."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and id(old) not in made:
                made[id(old)] = nn.Parameter(torch.empty(old.shape, device=device))
            module._parameters[name] = made.get(id(old))
        for name, old in module._buffers.items():
            module._buffers[name] = torch.empty(old.shape, device=device)
