"""How linear layers are computed while text is made: few rows at a time, so that reading the weights takes the time.

M rows, the tokens that go through at once; a weight is (N, K), outputs x inputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from model.gpt import GPT

MAX_ROWS = 64  # rows up to which a product is split
NUM_CHUNKS = 16


class ChunkedLinear(nn.Module):
    """On a CPU: for few rows the weight goes to the cores in parts, as a batch of products.

    Left to itself the library shares so slim a product badly: for one row it takes GPT-2's weights twice the time that
    reading them does (EXPERIMENTS.md).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight, weight.new_zeros(len(weight)) if bias is None else bias
        (N, K), left = weight.shape, len(weight) % NUM_CHUNKS
        self.rest = slice(N - left, N) if left else None  # rows that are left over
        self.parts = weight[: N - left].view(NUM_CHUNKS, N // NUM_CHUNKS, K).mT
        self.biases = self.bias[: N - left].view(NUM_CHUNKS, 1, N // NUM_CHUNKS)

    def forward(self, x: Tensor) -> Tensor:
        *shape, K = x.shape
        M = x.numel() // K
        if M > MAX_ROWS:
            return F.linear(x, self.weight, self.bias)
        x = x.reshape(1, M, K)
        y = torch.baddbmm(self.biases, x.expand(NUM_CHUNKS, M, K), self.parts)  # (PARTS, M, N / PARTS)
        if M > 1:
            y = y.transpose(0, 1)
        y = y.reshape(*shape, -1)
        if self.rest is None:
            return y
        return torch.cat((y, F.linear(x.view(*shape, K), self.weight[self.rest], self.bias[self.rest])), dim=-1)


class Fp16Linear(nn.Module):
    """On an x86 CPU: weights in float16, read in half the time; the arithmetic and the results are float32 (FBGEMM)."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


class LowPrecisionLinear(nn.Module):
    """Weights, what they are multiplied with, and results in bfloat16 or float16, as under autocast."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype):
        super().__init__()
        self.weight, self.bias = weight.to(dtype), None if bias is None else bias.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class Bf16CpuLinear(LowPrecisionLinear):
    """For more rows than one in float32, which a CPU without instructions for bfloat16 multiplies far faster."""

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == x.shape[-1] or torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return super().forward(x).float()
        return F.linear(x, self.weight.float(), None if self.bias is None else self.bias.float())


@torch.no_grad()
def convert_linears(model: GPT, dtype: torch.dtype) -> GPT:
    """The same model, on its device, with linear layers that are fast for few rows, their weights in `dtype`.

    It can no longer be trained. Raises UserError where the device cannot do it.
    """
    on_cpu = model.wte.weight.device.type == "cpu"
    if on_cpu and dtype == torch.float16 and "fbgemm" not in torch.backends.quantized.supported_engines:
        raise UserError("dtype=float16 on a CPU is for x86 alone; set dtype=bfloat16 or float32")
    if not on_cpu and dtype == torch.float32:
        return model
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, _layer(child.weight, child.bias, dtype, on_cpu))
    return model


def _layer(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, on_cpu: bool) -> nn.Module:
    if on_cpu and dtype != torch.bfloat16:
        return ChunkedLinear(weight, bias) if dtype == torch.float32 else Fp16Linear(weight, bias)
    return (Bf16CpuLinear if on_cpu else LowPrecisionLinear)(weight, bias, dtype)
