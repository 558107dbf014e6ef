"""Positions of tokens, and rotary position embeddings (RoPE, Su et al., arXiv:2104.09864)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rotary_cos_sin(positions: Tensor, R: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles position x 10000^(-2i/R), i < R/2 (RoPE, eq. 15).

    R: number of channels to rotate.
    positions (...) -> cosine (..., 1, R/2), sine (..., 1, R/2)
    """
    frequency = 10_000.0 ** (-torch.arange(0, R, 2, device=positions.device).float() / R)
    angle = positions.float().unsqueeze(-1) * frequency
    return angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R channels of queries or keys x (B, T, heads, D), in float32.

    cos, sin (..., R/2): from rotary_cos_sin. The pairs are the channels (i, i + R/2).
    """
    half = cos.shape[-1]
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    rotated_a = torch.addcmul(a * cos, b, -sin)
    rotated_b = torch.addcmul(a * sin, b, cos)
    return torch.cat((rotated_a, rotated_b, rest), dim=-1)


def positions_in_document(doc_ids: Tensor) -> Tensor:
    """Position of each token in its document, counted from 0: doc_ids (B, T) -> (B, T)."""
    index = torch.arange(doc_ids.shape[1], device=doc_ids.device)
    return index - torch.where(_is_first(doc_ids), index, 0).cummax(dim=1).values


def previous_in_document(x: Tensor, doc_ids: Tensor | None) -> Tensor:
    """x of the previous token, zero for the first token of a document: x (B, T, heads, D).

    doc_ids (B, T): document of each token; None: all are of one document.
    """
    previous = F.pad(x, (0, 0, 0, 0, 1, -1))  # prepend zeros, and remove the last token
    if doc_ids is None:
        return previous
    return previous.masked_fill(_is_first(doc_ids)[..., None, None], 0)


def _is_first(doc_ids: Tensor) -> Tensor:
    """Whether each token is the first one of its document: doc_ids (B, T) -> (B, T)."""
    return F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0), value=True)
