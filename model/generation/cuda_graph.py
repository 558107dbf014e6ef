"""CUDA graphs: capture a decode step once, and replay it with one launch instead of hundreds."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MIN_SLOTS = 256  # smallest number of cache slots that a graph reads


class CudaGraphStep:
    """Runs step(last_tokens, positions, uniform, num_slots) -> (B,), for B up to `batch_size`, as a CUDA graph.

    A graph has fixed shapes. Both B and num_slots are rounded up to powers of two, so that few graphs are captured.
    num_slots is at least MIN_SLOTS. The additional rows of a batch compute values that are not used.
    """

    def __init__(self, step: Callable[..., Tensor], batch_size: int, device: torch.device):
        self.step, self.batch_size, self.device = step, batch_size, device
        self.graphs: dict[tuple[int, int], tuple[list[Tensor], Callable[[], None], Tensor]] = {}

    def __call__(self, last_tokens: Tensor, positions: Tensor, uniform: Tensor, num_slots: int) -> Tensor:
        values, B = (last_tokens, positions, uniform), len(positions)
        key = min(_next_power_of_two(B), self.batch_size), max(MIN_SLOTS, _next_power_of_two(num_slots))
        if key not in self.graphs:
            rows, slots = key
            inputs = [value.new_zeros((rows, *value.shape[1:]), device=self.device) for value in values]
            _copy_rows(values, inputs)
            self.graphs[key] = inputs, *self.capture(inputs, slots)
        inputs, replay, output = self.graphs[key]
        _copy_rows(values, inputs)
        replay()
        return output[:B]

    def capture(self, inputs: list[Tensor], num_slots: int) -> tuple[Callable[[], None], Tensor]:
        """Capture the step on these tensors -> (function that replays it, tensor that receives its result)."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.step(*inputs, num_slots)  # warmup: the initialization of libraries cannot be captured
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may pin memory during the capture
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = self.step(*inputs, num_slots)
        return graph.replay, output


def _copy_rows(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[: len(source)].copy_(source)


def _next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
