"""A step of fixed shapes, recorded once as a CUDA graph and replayed: one launch in place of hundreds.

Written without a GPU at hand; what is not CUDA's own is tested on a CPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor

MIN_SLOTS = 256  # slots of the cache that a graph reads; from there on powers of two


class CudaGraphStep:
    """function(recent, at, uniform, reach), as Decoder._advance, for any number of texts up to `rows`.

    There is a graph for each power of two of texts and of slots, so that few are recorded, and none reads more than
    twice what it needs. Texts that are not there are computed for nothing, in rows of the cache that nobody uses.
    """

    def __init__(self, function: Callable[..., Tensor], rows: int, device: torch.device):
        self.function, self.rows, self.device = function, rows, device
        self.graphs: dict[tuple[int, int], tuple] = {}

    def __call__(self, recent: Tensor, at: Tensor, uniform: Tensor, reach: int) -> Tensor:
        n = len(at)
        rows, reach = min(_power_of_two(n), self.rows), max(MIN_SLOTS, _power_of_two(reach))
        if (rows, reach) not in self.graphs:
            inputs = [torch.zeros(rows, *each.shape[1:], dtype=each.dtype, device=self.device)
                      for each in (recent, at, uniform)]  # fmt: skip
            _fill(inputs, (recent, at, uniform))
            self.graphs[rows, reach] = inputs, *self.record(*inputs, reach)
        inputs, replay, chosen = self.graphs[rows, reach]
        _fill(inputs, (recent, at, uniform))
        replay()
        return chosen[:n]

    def record(self, *inputs) -> tuple[Callable[[], None], Tensor]:
        """A way to run the function again on these very tensors, and the one that it writes its result to."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self.function(*inputs)  # once as ever: libraries set themselves up, which cannot be recorded
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may be pinning batches
            chosen = self.function(*inputs)
        return graph.replay, chosen


def _fill(fixed: list[Tensor], given: tuple[Tensor, ...]) -> None:
    for to, source in zip(fixed, given, strict=True):
        to[: len(source)].copy_(source)


def _power_of_two(n: int) -> int:
    """The least that is n or more."""
    return 1 << (n - 1).bit_length()
