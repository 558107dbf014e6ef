"""CUDA graphs: capture a decode step once, and replay it with one launch instead of hundreds."""

from collections.abc import Callable

import torch
from torch import Tensor

from model.attention import BACKENDS
from model.gpt import GPT

MIN_SLOTS = 256  # smallest number of cache slots that a graph reads


def supports_cuda_graphs(model: GPT) -> bool:
    """Whether decode steps can have fixed shapes. A capture runs a step twice, which changes linear attention twice."""
    attend = getattr(model.attend, "func", model.attend)  # a partial if attention.kernels is set
    (backend,) = [backend for backend in BACKENDS.values() if backend.attend is attend]
    return set(model.config.mixers) == {"softmax"} and backend.on["cuda"].positions and not backend.needs_compiler


class CudaGraphStep:
    """Runs Engine._decode with fixed shapes: for all rows of the batch, and for a power of two of slots."""

    def __init__(self, step: Callable[..., Tensor], batch_size: int):
        self.step, self.batch_size = step, batch_size
        self.graphs: dict[int, tuple[list[Tensor], Callable[[], None], Tensor]] = {}

    def __call__(self, values: list[Tensor], num_slots: int, shared_position: int | None) -> Tensor:
        B, num_slots = len(values[0]), max(MIN_SLOTS, 1 << (num_slots - 1).bit_length())
        if num_slots not in self.graphs:
            inputs = [torch.cat((value, value.new_zeros(self.batch_size - B, *value.shape[1:]))) for value in values]
            self.graphs[num_slots] = inputs, *self.capture(inputs, num_slots)
        inputs, replay, output = self.graphs[num_slots]
        for buffer, value in zip(inputs, values, strict=True):
            buffer[:B] = value
        replay()
        return output[:B]

    def capture(self, inputs: list[Tensor], num_slots: int) -> tuple[Callable[[], None], Tensor]:
        """Capture the step on these tensors -> (function that replays it, tensor that receives its result)."""
        current, stream = torch.cuda.current_stream(inputs[0].device), torch.cuda.Stream(inputs[0].device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.step(inputs, num_slots, None)  # warmup: the initialization of libraries cannot be captured
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may pin memory during the capture
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = self.step(inputs, num_slots, None)
        return graph.replay, output
