"""Linear layer with 8-bit integers for decoding on x86 CPUs. N outputs; a weight is (N, inputs)."""

import warnings

import torch
from torch import Tensor, nn

from common.errors import UserError

LEVELS = 63  # inputs are from ZERO_POINT - LEVELS = 1 to ZERO_POINT + LEVELS = 127
ZERO_POINT = 64
MIN_SCALE = 1e-30  # of rows that are zero


class Int8Linear(nn.Module):
    """Linear layer with weights and inputs in 8-bit integers, and outputs in float32 (FBGEMM).

    Each output and each input row has its own scale, so the result for a row does not depend on the
    other rows. Inputs use 7 of the 8 bits, because on CPUs without VNNI, FBGEMM adds two products
    in 16 bits. Raises UserError if the CPU is not x86.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            raise UserError("dtype=int8 needs an x86 CPU; set dtype=bfloat16 or float32")
        self.bias = linear.bias
        scales = linear.weight.abs().amax(dim=1).clamp(min=MIN_SCALE) / 127  # (N)
        zero_points = torch.zeros(len(scales), dtype=torch.int64)
        with warnings.catch_warnings():
            # A future PyTorch will have no quantized tensors.
            warnings.filterwarnings("ignore", ".*quantized tensor creation", UserWarning)
            quantized = torch.quantize_per_channel(
                linear.weight, scales, zero_points, axis=0, dtype=torch.qint8
            )
        self.packed_weight = torch.ops.quantized.linear_prepack(quantized, None)

    def forward(self, x: Tensor) -> Tensor:
        scale = (x.abs().amax(dim=-1, keepdim=True) / LEVELS).clamp(min=MIN_SCALE)
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        y = multiply(x / scale, 1.0, ZERO_POINT, self.packed_weight)
        if self.bias is None:
            return y * scale
        return torch.addcmul(self.bias, y, scale)  # one pass over y instead of two
