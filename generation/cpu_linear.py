"""Linear layers for decoding. A decode step multiplies few rows, so reading the weights takes most of the time.

On a CPU, weights are stored in the layout of oneDNN (float32, bfloat16) or FBGEMM (int8), with which
docs/experiments/generation.md measures the fastest products. N outputs; a weight is (N, inputs).
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from model.attention.torch_internals import has_bf16_kernels, linear_packed, pack_weight
from model.gpt import GPT

MIN_PACKED_SIZE = (
    2**19
)  # weights x rows (up to 8); smaller products are faster without the packed layout
MIN_PACKED_ROWS = 4  # with the layout for a single row, oneDNN is slower, also for that row


class InferenceLinear(nn.Module):
    """Linear layer with weights and products in `dtype`. Outputs are float32 on a CPU, else `dtype` as in autocast.

    rows: number of input rows. The weight is stored in oneDNN's layout for them; None: in the ordinary layout.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, rows: int | None = None):
        super().__init__()
        weight = linear.weight.to(dtype)
        self.weight = weight if rows is None else pack_weight(weight, max(rows, MIN_PACKED_ROWS))
        self.dtype, self.multiply = dtype, F.linear if rows is None else linear_packed
        self.bias = None if linear.bias is None else linear.bias.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.multiply(x.to(self.dtype), self.weight, self.bias)
        return y.float() if y.device.type == "cpu" else y


class Int8Linear(nn.Module):
    """Linear layer for x86 CPUs with weights and inputs in 8-bit integers, and outputs in float32 (FBGEMM).

    Each output and each input row has its own scale, so the result for a row does not depend on the other rows. Inputs
    use 7 of the 8 bits, because on CPUs without VNNI, FBGEMM adds two products in 16 bits. Raises UserError elsewhere.
    """

    LEVELS, ZERO_POINT = 63, 64  # inputs are from 1 to 127

    def __init__(self, linear: nn.Linear):
        super().__init__()
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            raise UserError("dtype=int8 needs an x86 CPU; set dtype=bfloat16 or float32")
        self.bias = linear.bias
        scales = linear.weight.abs().amax(dim=1).clamp(min=1e-30) / 127  # (N,)
        with warnings.catch_warnings():  # a future PyTorch will have no quantized tensors
            warnings.filterwarnings(
                "ignore", message=".*quantized tensor creation", category=UserWarning
            )
            zero_points = torch.zeros(len(scales), dtype=torch.int64)
            quantized = torch.quantize_per_channel(
                linear.weight, scales, zero_points, axis=0, dtype=torch.qint8
            )
        self.packed = torch.ops.quantized.linear_prepack(quantized, None)

    def forward(self, x: Tensor) -> Tensor:
        scale = (x.abs().amax(dim=-1, keepdim=True) / self.LEVELS).clamp(min=1e-30)
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        y = multiply(x / scale, 1.0, self.ZERO_POINT, self.packed) * scale
        return y if self.bias is None else y + self.bias


@torch.no_grad()
def replace_linears(model: GPT, dtype: torch.dtype, rows: int) -> GPT:
    """Replace the model's linear layers, in place, by layers that are fast for decoding, with weights in `dtype`.

    rows: number of sequences that are decoded together.
    The model still returns logits, but cannot be trained or called with targets. With a tied head, the packed weights
    are a second copy of the token table. Raises UserError for int8 on a CPU that is not x86.
    """
    is_cpu = model.wte.weight.device.type == "cpu"
    has_kernels = dtype == torch.float32 or (dtype == torch.bfloat16 and has_bf16_kernels())
    can_pack = is_cpu and has_kernels and torch.backends.mkldnn.is_available()
    for parent in [module for module in model.modules() if not isinstance(module, nn.Linear)]:
        for name, linear in [
            child for child in parent.named_children() if isinstance(child[1], nn.Linear)
        ]:
            if is_cpu and dtype == torch.int8:
                setattr(parent, name, Int8Linear(linear))
            elif can_pack and linear.weight.numel() * min(rows, 8) >= MIN_PACKED_SIZE:
                setattr(parent, name, InferenceLinear(linear, dtype, rows))
            elif dtype != torch.float32:
                setattr(parent, name, InferenceLinear(linear, dtype))
    return model
