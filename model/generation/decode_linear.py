"""Linear layers for decoding. A decode step multiplies few rows, so reading the weights takes most of the time.

M input rows, K inputs, N outputs; a weight is (N, K). docs/experiments/generation.md has the measurements.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from model.attention.torch_internals import has_bf16_kernels
from model.gpt import GPT

MAX_ROWS = 64  # inputs with more rows use one product instead of chunks
NUM_CHUNKS = 16


class ChunkedLinear(nn.Module):
    """float32 linear layer for CPUs: for few rows, a batched product of NUM_CHUNKS chunks of the weight.

    F.linear takes up to twice as long for one row, because it does not divide the work evenly among the cores.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        N, K = weight.shape
        self.weight, self.bias = weight, weight.new_zeros(N) if bias is None else bias
        chunk_size = N // NUM_CHUNKS
        self.remainder_start = chunk_size * NUM_CHUNKS  # the outputs from this index on are in no chunk
        self.weight_chunks = weight[: self.remainder_start].view(NUM_CHUNKS, chunk_size, K).mT
        self.bias_chunks = self.bias[: self.remainder_start].view(NUM_CHUNKS, 1, chunk_size)

    def forward(self, x: Tensor) -> Tensor:
        *batch_shape, K = x.shape
        M = x.numel() // K
        if M > MAX_ROWS:
            return F.linear(x, self.weight, self.bias)
        x = x.reshape(1, M, K)
        y = torch.baddbmm(self.bias_chunks, x.expand(NUM_CHUNKS, M, K), self.weight_chunks)  # (chunks, M, chunk_size)
        if M > 1:
            y = y.transpose(0, 1)
        y = y.reshape(*batch_shape, -1)
        if self.remainder_start == len(self.weight):
            return y
        remainder = F.linear(
            x.view(*batch_shape, K), self.weight[self.remainder_start :], self.bias[self.remainder_start :]
        )
        return torch.cat((y, remainder), dim=-1)


class Fp16Linear(nn.Module):
    """Linear layer for x86 CPUs with weights in float16. Inputs, arithmetic and outputs are float32 (FBGEMM)."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


class LowPrecisionLinear(nn.Module):
    """Linear layer with weights, inputs and outputs in bfloat16 or float16, as under autocast."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype):
        super().__init__()
        self.weight, self.bias = weight.to(dtype), None if bias is None else bias.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class Bf16CpuLinear(LowPrecisionLinear):
    """Linear layer for CPUs with weights in bfloat16 and outputs in float32.

    Where oneDNN has no bfloat16 kernels (x86 CPUs without AVX-512), products of several rows are faster in float32.
    """

    def forward(self, x: Tensor) -> Tensor:
        is_single_row = x.numel() == x.shape[-1]
        if is_single_row or has_bf16_kernels():
            return super().forward(x).float()
        return F.linear(x, self.weight.float(), None if self.bias is None else self.bias.float())


@torch.no_grad()
def convert_linears(model: GPT, dtype: torch.dtype) -> GPT:
    """Replace the model's linear layers, in place, by layers that are fast for decoding, with weights in `dtype`.

    The model can no longer be trained. Raises UserError if the device does not support the dtype.
    """
    on_cpu = model.wte.weight.device.type == "cpu"
    if on_cpu and dtype == torch.float16 and "fbgemm" not in torch.backends.quantized.supported_engines:
        raise UserError("dtype=float16 needs an x86 CPU; set dtype=bfloat16 or float32")
    if not on_cpu and dtype == torch.float32:
        return model
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, _convert(child, dtype, on_cpu))
    return model


def _convert(linear: nn.Linear, dtype: torch.dtype, on_cpu: bool) -> nn.Module:
    if not on_cpu:
        return LowPrecisionLinear(linear.weight, linear.bias, dtype)
    if dtype == torch.bfloat16:
        return Bf16CpuLinear(linear.weight, linear.bias, dtype)
    return (ChunkedLinear if dtype == torch.float32 else Fp16Linear)(linear.weight, linear.bias)
