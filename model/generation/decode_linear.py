"""Linear layers for decoding. A decode step multiplies few rows, so reading the weights takes most of the time.

On a CPU, no implementation is the fastest for all shapes, numbers of rows and processors, so `convert_linears` measures
those of the requested dtype. docs/experiments/generation.md has the measurements.

M input rows, K inputs, N outputs; a weight is (N, K).
"""

import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from model.attention.torch_internals import (
    has_bf16_kernels,
    linear_packed,
    pack_weight,
)
from model.gpt import GPT

MAX_SPLIT_ROWS = 64  # SplitLinear uses F.linear for inputs with more rows, as in prefill
MIN_PACKED_ROWS = 4  # with the layout for a single row, oneDNN is slower, also for that row
MEASURED_BYTES = 2**28  # measure at most this many bytes of weights of a shape, which exceeds most caches
MEASURED_ROUNDS = 3
MIN_GAIN = 1.1  # an implementation replaces an earlier one of its list if it is this many times as fast

BuildLayer = Callable[[nn.Linear], nn.Module]


class SplitLinear(nn.Module):
    """float32 linear layer for CPUs: one part of the weight for each core, in a batched product.

    F.linear takes up to twice as long for one row, because it does not divide the work evenly among the cores.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight, bias = linear.weight, linear.bias
        self.weight, self.bias = weight, bias
        num_parts = torch.get_num_threads()
        rows = len(weight) // num_parts
        self.parts = weight[: num_parts * rows].view(num_parts, rows, linear.in_features)
        self.remainder = weight[num_parts * rows :]  # fewer rows than parts

    def forward(self, x: Tensor) -> Tensor:
        *batch_shape, K = x.shape
        x = x.reshape(-1, K)
        if len(x) > MAX_SPLIT_ROWS:
            return F.linear(x, self.weight, self.bias).view(*batch_shape, -1)
        y = torch.bmm(self.parts, x.T.expand(len(self.parts), K, len(x))).flatten(0, 1)  # (N, M)
        if len(self.remainder):
            y = torch.cat((y, self.remainder @ x.T))
        y = y.T.reshape(*batch_shape, len(self.weight))
        return y if self.bias is None else y + self.bias


class PackedLinear(nn.Module):
    """Linear layer for CPUs with the weight in oneDNN's layout for `rows` input rows. Outputs are float32.

    dtype: of the weight and the products, float32 or bfloat16.
    """

    def __init__(self, linear: nn.Linear, rows: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.dtype = dtype
        self.packed = pack_weight(linear.weight.to(dtype), max(rows, MIN_PACKED_ROWS))
        self.bias = None if linear.bias is None else linear.bias.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return linear_packed(x.to(self.dtype), self.packed, self.bias).float()


class Fp16Linear(nn.Module):
    """Linear layer for x86 CPUs with weights in float16. Inputs, arithmetic and outputs are float32 (FBGEMM).

    Raises UserError for weights that are not finite in float16, because FBGEMM replaces these by finite values.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        if not linear.weight.abs().amax() <= torch.finfo(torch.float16).max:  # also with NaN
            raise UserError("dtype=float16 needs weights within ±65,504, which this model exceeds; set dtype=float32")
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


class Int8Linear(nn.Module):
    """Linear layer for x86 CPUs with weights and inputs in 8-bit integers, and outputs in float32 (FBGEMM).

    Each output has a scale for its weights, and each input row has its own scale, so the result for a row does not
    depend on the other rows. Inputs use 7 of the 8 bits, because on CPUs without VNNI instructions, FBGEMM adds two
    products in 16 bits.
    """

    LEVELS, ZERO_POINT = 63, 64  # inputs are from 1 to 127

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.bias = linear.bias
        scales = linear.weight.abs().amax(dim=1).clamp(min=1e-30) / 127
        with warnings.catch_warnings():  # a future PyTorch will have no quantized tensors
            warnings.filterwarnings("ignore", message=".*quantized tensor creation", category=UserWarning)
            zero_points = torch.zeros(len(scales), dtype=torch.int64)
            quantized = torch.quantize_per_channel(linear.weight, scales, zero_points, axis=0, dtype=torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(quantized, None)

    def forward(self, x: Tensor) -> Tensor:
        scale = (x.abs().amax(dim=-1, keepdim=True) / self.LEVELS).clamp(min=1e-30)
        y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / scale, 1.0, self.ZERO_POINT, self.packed
        )
        y *= scale
        return y if self.bias is None else y + self.bias


class LowPrecisionLinear(nn.Module):
    """Linear layer with weights, inputs and outputs in bfloat16 or float16, as under autocast."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        super().__init__()
        self.weight, self.bias = linear.weight.to(dtype), None if linear.bias is None else linear.bias.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class Bf16CpuLinear(LowPrecisionLinear):
    """Linear layer with weights in bfloat16 and outputs in float32, for CPUs without bfloat16 kernels of oneDNN.

    These are x86 CPUs without AVX-512. Products of several rows are faster in float32 there.
    """

    def forward(self, x: Tensor) -> Tensor:
        is_single_row = x.numel() == x.shape[-1]
        if is_single_row:
            return super().forward(x).float()
        return F.linear(x, self.weight.float(), None if self.bias is None else self.bias.float())


@torch.no_grad()
def convert_linears(model: GPT, dtype: torch.dtype, rows: int) -> GPT:
    """Replace the model's linear layers, in place, by layers that are fast for decoding, with weights in `dtype`.

    rows: number of sequences that are decoded together. The model then returns logits; it can neither be trained nor
    called with targets. A packed output layer is a second copy of the token table if the two were tied.
    Raises UserError if the device does not support the dtype, or if float16 cannot represent a weight.
    """
    candidates = _candidates(dtype, model.wte.weight.device, rows)
    by_shape = defaultdict(list)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                by_shape[child.weight.shape].append((module, name, child))
    for places in by_shape.values():
        build = _fastest(candidates, [linear for _, _, linear in places], rows)
        while places:  # each original layer is freed before the next one is built
            module, name, linear = places.pop()
            setattr(module, name, build(linear))
    return model


def _candidates(dtype: torch.dtype, device: torch.device, rows: int) -> list[BuildLayer]:
    """The implementations for a dtype and device, the usual choice first. Raises UserError if there is none."""
    if device.type != "cpu":
        return [lambda linear: linear if dtype == torch.float32 else LowPrecisionLinear(linear, dtype)]
    if dtype in (torch.float16, torch.int8) and "fbgemm" not in torch.backends.quantized.supported_engines:
        name = str(dtype).removeprefix("torch.")
        raise UserError(f"dtype={name} needs an x86 CPU; set dtype=bfloat16 or float32")
    has_onednn = torch.backends.mkldnn.is_available()
    packed = partial(PackedLinear, rows=rows, dtype=dtype)
    return {
        torch.float32: [*[packed] * has_onednn, SplitLinear, lambda linear: linear],
        torch.bfloat16: [packed if has_onednn and has_bf16_kernels() else partial(Bf16CpuLinear, dtype=dtype)],
        torch.float16: [Fp16Linear],
        torch.int8: [Int8Linear],
    }[dtype]


def _fastest(candidates: list[BuildLayer], linears: list[nn.Linear], rows: int) -> BuildLayer:
    """The candidate that multiplies `rows` rows with layers of one shape in the shortest time."""
    if len(candidates) == 1:
        return candidates[0]
    linears = linears[: max(1, MEASURED_BYTES // linears[0].weight.nbytes)]
    x = torch.ones(rows, linears[0].in_features)
    layers = [[build(linear) for linear in linears] for build in candidates]
    seconds = [math.inf] * len(candidates)
    for _ in range(MEASURED_ROUNDS):
        for index, group in enumerate(layers):
            started = time.perf_counter()
            for layer in group:
                layer(x)
            seconds[index] = min(seconds[index], time.perf_counter() - started)
    best = 0
    for index in range(1, len(candidates)):
        if seconds[index] * MIN_GAIN < seconds[best]:
            best = index
    return candidates[best]
