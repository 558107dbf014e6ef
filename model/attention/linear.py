"""Linear attention (Katharopoulos et al., arXiv:2006.16236): time and memory grow with T instead of T^2.

The softmax is replaced by a product of features, phi(q).phi(k), which are positive:

    y_i = sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j),  j <= i        (eq. 4 and 8)

Therefore phi(q_i) can be taken out of both sums. There are three forms, which are equal up to rounding:

    quadratic   linear_attention_scores: the definition, with all T x T weights
    chunked     linear_attention, for training and prompts: weights within a chunk, a state for the earlier chunks
    recurrent   linear_attention_step, for decoding: the state phi(K)^T [V, 1] replaces the KV cache

All forms compute in float32 or float64, also under autocast. model/attention/__init__.py has the notation.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.backends import ALL_DEVICES, attention_mask, repeat_kv
from model.attention.support import backend

CHUNK = 64  # tokens; 32 to 128 are equally fast
NO_MASKS = {
    "dropout": False,
    "softcap": False,
    "window": False,
    "document_mask": False,
    "positions": False,
}


def feature_map(x: Tensor) -> Tensor:
    """elu(x) + 1 (eq. 7), without the cancellation that makes it zero for x < -17 in float32."""
    return F.relu(x) + x.clamp(max=0).exp()


def linear_attention_scores(
    q: Tensor, k: Tensor, *, window=None, positions=None, doc_ids=None, softcap=None
) -> Tensor:
    """log phi(q).phi(k) -> (B, H, Tq, Tk); their softmax is the weights. Masked scores are -inf."""
    scores = _features(q).transpose(1, 2) @ repeat_kv(_features(k), q.shape[2]).permute(0, 2, 3, 1)
    masks = {"window": window, "positions": positions, "doc_ids": doc_ids}
    visible = attention_mask(q.shape[1], k.shape[1], **masks, device=q.device)
    return scores.log().masked_fill(~visible, -torch.inf)


@backend(
    on={device: replace(support, **NO_MASKS) for device, support in ALL_DEVICES.items()},
    attention_type="linear",
)
def linear_attention(
    q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0, softcap=None
) -> Tensor:
    """Linear attention in chunks; T queries and T keys. Raises ValueError for masks and dropout."""
    if not (window is positions is doc_ids is softcap is None) or dropout_p > 0:
        raise ValueError(
            "linear attention does not support windows, positions, documents, dropout and softcaps"
        )
    T, H, Dv, dtype = q.shape[1], q.shape[2], v.shape[3], v.dtype
    with torch.autocast(q.device.type, enabled=False):
        chunk = min(T, CHUNK)
        q, k, v = (
            _split_chunks(x, chunk)
            for x in (_features(q), repeat_kv(_features(k), H), repeat_kv(_append_one(v), H))
        )
        states = k.mT @ v  # one per chunk, (B, H, T / chunk, D, Dv + 1)
        # Sum over all earlier chunks. cumsum() - states would round with later tokens.
        states = F.pad(states.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))
        y = (q @ k.mT).tril() @ v + q @ states  # (B, H, T / chunk, chunk, Dv + 1)
        y = y.flatten(2, 3)[:, :, :T].transpose(1, 2)
        return (y[..., :Dv] / y[..., Dv:]).to(dtype)


def linear_attention_state(k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """State phi(K)^T [V, 1] of the first `lengths` (B, 1) tokens.

    k (B, T, G, D), v (B, T, G, Dv) -> (B, G, D, Dv + 1)
    """
    with torch.autocast(k.device.type, enabled=False):
        is_read = torch.arange(k.shape[1], device=k.device) < lengths  # (B, T)
        k = _features(k) * is_read[..., None, None]
        return k.permute(0, 2, 3, 1) @ _append_one(v).transpose(1, 2)


def linear_attention_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Add a token to the state, in place, and attend to all tokens so far: q (B, 1, H, D) -> (B, 1, H, Dv).

    k (B, 1, G, D), v (B, 1, G, Dv). state (B, G, D, Dv + 1): see linear_attention_state; zeros before the first token.
    """
    B, _, G, D = k.shape
    with torch.autocast(q.device.type, enabled=False):
        state += _features(k)[:, 0].unsqueeze(3) * _append_one(v)[:, 0].unsqueeze(2)
        y = _features(q).view(B, G, -1, D) @ state  # (B, G, H / G, Dv + 1)
        return (y[..., :-1] / y[..., -1:]).reshape(B, 1, q.shape[2], -1).to(v.dtype)


def _features(x: Tensor) -> Tensor:
    return feature_map(x.to(torch.promote_types(x.dtype, torch.float32)))


def _append_one(v: Tensor) -> Tensor:
    """Append a channel of ones to the values: with it, a weighted sum also contains the sum of the weights."""
    return F.pad(v.to(torch.promote_types(v.dtype, torch.float32)), (0, 1), value=1.0)


def _split_chunks(x: Tensor, chunk: int) -> Tensor:
    """(B, T, H, D) -> (B, H, T / chunk, chunk, D), padded with zeros."""
    return F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk)).unflatten(2, (-1, chunk))
