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
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.gpt import GPT
from training import optimizer, precision
from training.config import AdamWConfig, MuonConfig

KiB, MiB = 2**10, 2**20
STEPS = 3  # the second has the optimizer's state from the start, the third finds the heap as the others left it


@dataclass(frozen=True)
class Memory:
    """Bytes, of one process.

    weights: parameters and buffers. activations: all that lives at the end of a forward pass besides weights,
    gradients and the optimizer's state; of them scores, the (T, T) tensors of attention, kept for the backward pass.
    peak: the most that lives at once. held: the most that the allocator holds for it.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    scores: int
    peak: int
    held: int


class Heap:
    """Memory that glibc's malloc holds for tensors (malloc/malloc.c; M_MMAP_THRESHOLD in mallopt(3)), roughly.

    Blocks above a threshold are mapped, and go back to the system when they are freed. The others come from a heap
    that shrinks at its end alone: a hole in it is given out again, the best fitting first, and stays in memory. The
    threshold grows to the largest mapped block that was freed, up to 32 MiB.

    Aligned memory is asked for with MARGIN on top, so that a block's own hole is too small for the next of its size.
    Small objects that settle between blocks keep neighbouring holes from merging; that this is so at every third
    block is fitted to measured runs (EXPERIMENTS.md), which hold 1.05 to 2.2 times what their tensors need.
    """

    MARGIN, PINNED = 96, 3

    def __init__(self):
        self.threshold, self.top, self.end, self.mapped, self.peak, self.count = 128 * KiB, 0, 0, 0, 0, 0
        self.holes: dict[int, int] = {}  # address -> size
        self.pinned: set[int] = set()  # addresses that no hole grows across

    def take(self, size: int) -> int | None:
        """The address of a new block; None: it is mapped."""
        address, needed = None, size + self.MARGIN
        fitting = [(length, start) for start, length in self.holes.items() if length >= needed]
        if fitting:
            length, address = min(fitting)
            del self.holes[address]
            self.holes[address + size] = length - size
        elif self.end - self.top >= needed or needed < self.threshold:
            address, self.top = self.top, self.top + size
            self.end = max(self.end, self.top + self.MARGIN)
        else:
            self.mapped += needed
        if address is not None:
            self.count += 1
            if self.count % self.PINNED == 0:
                self.pinned.add(address)
        self.peak = max(self.peak, self.end + self.mapped)
        return address

    def give_back(self, address: int | None, size: int) -> None:
        if address is None:
            self.mapped -= size + self.MARGIN
            if self.threshold < size <= 32 * MiB:
                self.threshold = size
            return
        if address + size not in self.pinned:
            size += self.holes.pop(address + size, 0)
        before = next((start for start, length in self.holes.items() if start + length == address), None)
        if before is not None and address not in self.pinned:
            address, size = before, size + self.holes.pop(before)
        if address + size < self.top or self.top in self.pinned:
            self.holes[address] = size
            return
        self.top = address
        if self.end - self.top > 2 * self.threshold:
            self.end = self.top


class Storages(TorchDispatchMode):
    """Inside, follows every storage that a tensor operation makes: each once, and a view costs nothing."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.heap, self.attending = 0, 0, Heap(), False
        self.shapes = weakref.WeakKeyDictionary()  # storage -> (its first tensor's shape, made by attention?)

    def follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self.shapes:
            return
        size = storage.nbytes()
        self.shapes[storage] = (tensor.shape, self.attending)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, size, self.heap.take(size))

    def _forget(self, size: int, address: int | None) -> None:
        self.now -= size
        self.heap.give_back(address, size)

    def scores(self, T: int) -> int:
        """Bytes of the (..., T, T) tensors that live, of those that attention made."""
        of_attention = [(storage, shape) for storage, (shape, attending) in self.shapes.items() if attending]
        return sum(storage.nbytes() for storage, shape in of_attention if shape[-2:] == (T, T))

    def watching(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
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
                self.follow(leaf)
        return made


def simulate(
    model: GPT, attend: Callable[..., Tensor], config: AdamWConfig | MuonConfig, *,
    B: int, T: int, accumulation: int, dtype: torch.dtype, device: torch.device, documents: bool,
) -> Memory:  # fmt: skip
    """The memory for training `model` with `attend` as its attention, on micro batches of B sequences of T tokens.

    documents: whether they are kept apart.
    Nothing is computed, and the model is left alone. On a CPU with glibc `held` counts what malloc keeps, see Heap;
    elsewhere it is the peak.
    """
    fake = FakeTensorMode()
    with FakeCopyMode(fake):
        model = copy.deepcopy(model)
    storages = Storages()
    for block in model.blocks:
        block.attn.attend = storages.watching(attend)
    with fake, storages:
        for tensor in [*model.parameters(), *model.buffers()]:
            storages.follow(tensor)
        weights = storages.now
        optimizers = optimizer.build(model, config)
        for _ in range(STEPS):
            state = storages.now - weights
            for _ in range(min(2, accumulation)):  # in the second, gradients live beside the activations
                before = storages.now
                tokens = torch.zeros(3, B, T, dtype=torch.int64, device=device)
                with precision.autocast(device, dtype):
                    loss = model(tokens[0], tokens[1], documents=tokens[2] if documents else None)
                activations, scores = storages.now - before, storages.scores(T)
                loss.backward()
                del loss, tokens
            gradients = storages.now - weights - state
            for each in optimizers:
                each.step()
            model.zero_grad(set_to_none=True)
    by_malloc = device.type == "cpu" and platform.libc_ver()[0] == "glibc"
    return Memory(
        weights=weights, gradients=gradients, optimizer=storages.now - weights, activations=activations,
        scores=scores, peak=storages.peak, held=storages.heap.peak if by_malloc else storages.peak,
    )  # fmt: skip
