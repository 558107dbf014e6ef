"""All private PyTorch names that the model needs, each with the public API that would replace it.

They were checked with torch 2.13. Imports are local: torch._dynamo and torch._inductor take 1.5 s
or more, and most commands do not compile.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend


def select_sdpa_kernel(*args, **kwargs) -> SDPBackend:
    """Kernel that scaled_dot_product_attention would run with these arguments.

    Private: torch._fused_sdp_choice, checked with 2.13. Replace it with a public query for any
    device. torch.backends.cuda.can_use_flash_attention is none: it rejects every CPU tensor.
    Raises RuntimeError if no kernel can run.
    """
    if args[0].device.type == "mps":  # has one kernel, and no function that reports it
        if not torch.backends.cuda.math_sdp_enabled():
            raise RuntimeError("it has the math kernel only")
        return SDPBackend.MATH
    return SDPBackend(torch._fused_sdp_choice(*args, **kwargs))


def disable_attention_fusion() -> None:
    """Keep Inductor from replacing PyTorch's math kernel with a fused one, in this process.

    Private: torch._inductor.fx_passes.fuse_attention._sfdp_init, checked with 2.13. Replace it with
    a setting that turns Inductor's attention patterns off.
    """
    from torch._inductor.fx_passes import fuse_attention

    if not callable(getattr(fuse_attention, "_sfdp_init", None)):
        raise RuntimeError(
            "this PyTorch registers Inductor's attention patterns elsewhere: "
            "update torch_internals.py"
        )
    fuse_attention._sfdp_init = lambda *_: None


def raise_recompile_limit(limit: int) -> None:
    """Let torch.compile recompile a function at least `limit` times.

    Private: torch._dynamo.config, checked with 2.13. Replace it with
    torch.compiler.config.recompile_limit when all supported versions have it.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(limit, torch._dynamo.config.recompile_limit)


def is_triton_available() -> bool:
    """Whether torch.compile can generate GPU kernels.

    Private: torch.utils._triton, checked with 2.13. Replace it with a public query.
    """
    from torch.utils._triton import has_triton

    return has_triton()


def has_bf16_kernels() -> bool:
    """Whether oneDNN has bfloat16 kernels for this CPU.

    Private: torch.ops.mkldnn, checked with 2.13. Replace it with a query in torch.backends.mkldnn.
    """
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_weight(weight: Tensor, rows: int) -> Tensor:
    """Copy a float32 weight (N, K) into oneDNN's layout for `rows` input rows.

    Private: torch.ops.mkldnn, checked with 2.13. Replace it with a public function.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def linear_packed(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear by oneDNN, with an ordinary weight or one from `pack_weight`.

    Private: torch.ops.mkldnn, checked with 2.13. Replace it with a public function.
    """
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
