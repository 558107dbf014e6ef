"""Random inputs for attention tests."""

import torch

from model import AttentionConfig
from model.attention import (
    AttentionRequest,
)

CPU = torch.device("cpu")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NEED = AttentionRequest(B=2, Tq=16, Tk=16, H=4, G=2, D=8, Dv=8, dtype=torch.float32, device=CPU, grad=True)


def choose(name, kernels=None, impl=None):
    return AttentionConfig(name, kernels, impl)


def random_qkv(need: AttentionRequest, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(need.device, need.dtype).requires_grad_(need.grad)

    B, Tq, Tk, G = need.B, need.Tq, need.Tk, need.G
    return draw(B, Tq, need.H, need.D), draw(B, Tk, G, need.D), draw(B, Tk, G, need.Dv)


def random_masks(need: AttentionRequest, seed=0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    positions = doc_ids = None
    if need.document_mask:
        doc_ids = torch.randint(0, 4, (need.B, need.Tk), generator=generator).sort(dim=1).values.to(need.device)
    if need.positions:
        positions = torch.randint(0, need.Tk, (need.B, need.Tq), generator=generator).to(need.device)
    return {"window": need.window, "doc_ids": doc_ids, "positions": positions}
