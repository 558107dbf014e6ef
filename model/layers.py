"""Linear and embedding layers without PyTorch's default initialization, n-grams, norm, positions.

GPT.init_weights initializes all weights. PyTorch's default would be overwritten, takes a second for
GPT-2, and on the meta device it imports torch._dynamo, which takes another one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

HASH_PRIME = 2**31 - 1
HASH_FACTOR = 1_566_083_941  # a hash is below HASH_PRIME, so hash x HASH_FACTOR fits into int64


class Linear(nn.Linear):
    """nn.Linear whose weights are not initialized."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """nn.Embedding whose weights are not initialized."""

    def reset_parameters(self) -> None:
        pass


class NgramEmbedding(nn.Module):
    """Sum of the embeddings of the 2-gram, ..., max_ngram-gram that end at each token.

    fastText (Bojanowski et al., arXiv:1607.04606) hashes n-grams of characters in this way, and BLT
    (Pagnoni et al., arXiv:2412.09871) n-grams of bytes.

    All n-grams are hashed into one table of table_size rows, so n-grams may collide. A padding id
    replaces tokens before the first one and tokens of other documents.
    """

    def __init__(self, max_ngram: int, table_size: int, C: int):
        super().__init__()
        self.max_ngram = max_ngram
        self.table = Embedding(table_size, C)

    def ngram_hashes(
        self, tokens: Tensor, doc_ids: Tensor | None, previous_tokens: Tensor | None = None
    ) -> Tensor:
        """Table rows of the n-grams that end at each token: (B, T) -> (B, T, max_ngram - 1).

        doc_ids (B, T): document of each token; by default, all tokens belong to one.
        previous_tokens (B, max_ngram - 1): tokens before the first one, -1 where there is none; by
            default all -1.
        """
        T = tokens.shape[1]
        max_distance = self.max_ngram - 1
        if previous_tokens is None:
            previous_tokens = tokens.new_full((tokens.shape[0], max_distance), -1)
        context = torch.cat((previous_tokens, tokens), dim=1) + 1  # 0 is the padding id
        value = tokens  # hash of the 1-gram, then of the 2-gram, ...
        hashes = []
        for distance in range(1, self.max_ngram):
            start = max_distance - distance
            earlier = context[:, start : start + T]  # the token `distance` before each token
            if doc_ids is not None:
                earlier_doc_ids = F.pad(doc_ids, (distance, 0))[:, :T]
                earlier = earlier.where(earlier_doc_ids == doc_ids, 0)
            value = (value * HASH_FACTOR + earlier) % HASH_PRIME
            hashes.append(value)
        return torch.stack(hashes, dim=-1) % self.table.num_embeddings

    def forward(
        self, tokens: Tensor, doc_ids: Tensor | None, previous_tokens: Tensor | None = None
    ) -> Tensor:
        """N-gram embeddings to add to the token embeddings: (B, T) -> (B, T, C)."""
        rows = self.ngram_hashes(tokens, doc_ids, previous_tokens).flatten(0, 1)
        summed = F.embedding_bag(rows, self.table.weight, mode="sum")  # (B T, C)
        return summed.view(*tokens.shape, -1)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm that is fast on CPUs, too."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.eps, self.weight).type_as(x)


def rms_norm(x: Tensor, eps: float | None = None, weight: Tensor | None = None) -> Tensor:
    """Divide x (..., C) by its root mean square over the C channels, and multiply by the weight.

    eps: added to the mean square. By default, the machine epsilon of the dtype.
    weight (C): by default, ones.
    On CPUs, the result of half precision is float32, as with autocast on GPUs. Values that overflow
    give nan there. First derivatives only.
    """
    if x.device.type != "cpu":
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    if torch.is_grad_enabled():
        y = _RMSNorm.apply(x, eps)
    else:  # a call of an autograd function takes longer than the norm of one token
        y, _ = _divide_by_rms(x, eps)
    return y if weight is None else y * weight


def _divide_by_rms(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """rms_norm without weight, and the scale 1 / rms(x) (..., 1), in few passes over memory.

    F.rms_norm has no fused kernel for CPUs in torch 2.15.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean_square = norm.square() / x.shape[-1]
    # nan instead of zero after an overflow: a run that has diverged must not look trained
    scale = (mean_square + eps).rsqrt().masked_fill(mean_square.isinf(), torch.nan)
    return x * scale, scale


class _RMSNorm(torch.autograd.Function):
    """rms_norm without weight, with its own gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> Tensor:
        y, scale = _divide_by_rms(x, eps)
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor, None]:
        """dx = (dy - y mean(y dy)) / rms(x)"""
        y, scale = ctx.saved_tensors
        projection = (grad_y * y).mean(dim=-1, keepdim=True)
        return torch.addcmul(grad_y, y, projection, value=-1).mul_(scale), None


def apply_softcap(x: Tensor, cap: float | None) -> Tensor:
    """Elementwise cap tanh(x / cap). Returns x if cap is None."""
    return x if cap is None else cap * (x / cap).tanh()


def rotary_cos_sin(positions: Tensor, R: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles position x 10000^(-2i/R), i < R/2.

    Rotary position embeddings (RoPE, Su et al., arXiv:2104.09864, eq. 15).

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

    doc_ids (B, T): document of each token. None means one document.
    """
    previous = F.pad(x, (0, 0, 0, 0, 1, -1))  # prepend zeros, and remove the last token
    if doc_ids is None:
        return previous
    return previous.masked_fill(_is_first(doc_ids)[..., None, None], 0)


def _is_first(doc_ids: Tensor) -> Tensor:
    """Whether each token is the first one of its document: doc_ids (B, T) -> (B, T)."""
    return F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0), value=True)
