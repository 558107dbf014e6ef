"""Positions of tokens, and rotary position embeddings (RoPE, Su et al., arXiv:2104.09864)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rotary_cos_sin(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles position x 10000^(-2i/D), i < D/2 (RoPE, eq. 15).

    positions (...) -> cosine (..., 1, D/2), sine (..., 1, D/2)
    """
    frequency = 10_000.0 ** (
        -torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    )
    angle = positions.float().unsqueeze(-1) * frequency
    return angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs (i, i + D/2) of queries or keys x (B, T, heads, D), in float32."""
    a, b = x.chunk(2, dim=-1)
    rotated_a = torch.addcmul(a * cos, b, -sin)
    rotated_b = torch.addcmul(a * sin, b, cos)
    return torch.cat((rotated_a, rotated_b), dim=-1)


def positions_in_document(doc_ids: Tensor) -> Tensor:
    """Position of each token in its document, counted from 0: doc_ids (B, T) -> (B, T)."""
    index = torch.arange(doc_ids.shape[1], device=doc_ids.device)
    is_first = F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0), value=True)
    return index - torch.where(is_first, index, 0).cummax(dim=1).values
