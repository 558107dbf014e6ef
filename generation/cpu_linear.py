"""Linear layers for decoding, in float32, bfloat16, float16 or int8.

A decode step multiplies few rows, so reading the weights takes most of the time. On a CPU, float32
and bfloat16 weights are stored in the layout of oneDNN. For one row in float32, MKL reads ordinary
weights faster. docs/experiments/generation.md has the measurements.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from model.attention.torch_internals import has_bf16_kernels, linear_packed, pack_weight
from model.gpt import GPT

MIN_PACKED_SIZE = 2**19  # weights x rows (up to 8); smaller products are faster without packing
MIN_PACKED_ROWS = 4  # with the layout for a single row, oneDNN is slower, also for that row
PARTS = 16  # of a weight in SingleRowLinear; on two cores, 2 to 16 parts take the same time


class InferenceLinear(nn.Module):
    """Linear layer with weights and products in `dtype`.

    Outputs are float32 on a CPU. Elsewhere they have `dtype`, as with autocast.

    packed_rows: number of input rows for which oneDNN's layout is made; None: the ordinary layout.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, packed_rows: int | None = None):
        super().__init__()
        self.dtype = dtype
        self.multiply = F.linear
        self.bias = None if linear.bias is None else linear.bias.to(dtype)
        weight = linear.weight.to(dtype)
        if packed_rows is not None:
            weight = pack_weight(weight, max(packed_rows, MIN_PACKED_ROWS))
            self.multiply = linear_packed
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.multiply(x.to(self.dtype), self.weight, self.bias)
        return y.float() if y.device.type == "cpu" else y


class SingleRowLinear(nn.Module):
    """Linear layer in float32 for decoding one sequence on a CPU. N outputs, K inputs.

    F.linear multiplies a single row with one thread, which cannot use all of the memory bandwidth.
    A batched product of PARTS equal parts of the weight uses all threads.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight.contiguous()
        self.bias = linear.bias
        self.num_divided = len(self.weight) // PARTS * PARTS

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() != x.shape[-1]:  # a prompt
            return linear_packed(x, self.weight, self.bias)
        parts = self.weight[: self.num_divided].unflatten(0, (PARTS, -1))  # (PARTS, N / PARTS, K)
        # .T: a column with the strides of reshape(-1, 1) takes ten times as long
        column = x.reshape(1, -1).T
        y = torch.bmm(parts, column.expand(PARTS, -1, 1)).flatten()
        if self.num_divided < len(self.weight):
            y = torch.cat((y, (self.weight[self.num_divided :] @ column).flatten()))
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], -1)


@torch.no_grad()
def replace_linears(model: GPT, dtype: torch.dtype, rows: int) -> GPT:
    """Replace the linear layers of a model, in place, by layers for decoding with weights in dtype.

    rows: number of sequences that are decoded together.
    The model still returns logits, but it cannot be trained or called with targets. With a tied
    head, packed weights are a second copy of the token table.
    Raises UserError for int8 if the CPU is not x86.
    """
    # Names only: a list of the layers would keep all old weights in memory until the end.
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    is_single_row = dtype == torch.float32 and rows == 1 and torch.backends.mkl.is_available()
    for name in names:
        layer = model.get_submodule(name)
        is_packed = can_pack(layer.weight, dtype, rows)
        if dtype == torch.int8:
            layer = Int8Linear(layer)
        elif is_packed and is_single_row:
            layer = SingleRowLinear(layer)
        elif is_packed or dtype != torch.float32:
            layer = InferenceLinear(layer, dtype, rows if is_packed else None)
        model.set_submodule(name, layer)
    return model


def can_pack(weight: Tensor, dtype: torch.dtype, rows: int) -> bool:
    """Whether oneDNN has kernels for a weight, and is faster than F.linear for `rows` rows."""
    has_kernels = dtype == torch.float32 or (dtype == torch.bfloat16 and has_bf16_kernels())
    is_large = weight.numel() * min(rows, 8) >= MIN_PACKED_SIZE
    is_available = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    return has_kernels and is_large and is_available


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
