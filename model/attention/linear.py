"""Linear attention (Katharopoulos et al., arXiv:2006.16236): time and memory grow with T, not T^2.

The softmax is replaced by a product of features, phi(q).phi(k), which are positive:

    y_i = sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j),  j <= i        (eq. 4 and 8)

Therefore phi(q_i) can be taken out of both sums. There are three forms, equal up to rounding:

    quadratic   linear_attention_scores: the definition, with all T x T weights
    chunked     linear_attention, for training and prompts: weights within a chunk, and a state for
                the earlier chunks
    recurrent   linear_attention_step, for decoding: the state phi(K)^T [V, 1] replaces the KV cache

All forms compute in float32 or float64, also under autocast. model/attention/__init__.py has the
notation.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.backends import NO_FLOAT64, attention_mask, repeat_kv
from model.attention.support import NON_SOFTMAX, Backend, Support

CHUNK = 64  # tokens; 32 to 128 are equally fast


def feature_map(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1 (eq. 7), in float32 or float64.

    Computed without the cancellation that makes elu(x) + 1 zero for x < -17 in float32.
    """
    x = at_least_float32(x)
    return F.relu(x) + x.clamp(max=0).exp()


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def append_one(v: Tensor) -> Tensor:
    """Append a channel of ones to the values: (..., Dv) -> (..., Dv + 1), in float32 or float64.

    A weighted sum of the result also contains the sum of the weights.
    """
    return F.pad(at_least_float32(v), (0, 1), value=1.0)


def linear_attention_scores(
    q: Tensor, k: Tensor, *, window=None, positions=None, doc_ids=None, softcap=None
) -> Tensor:
    """log phi(q).phi(k) -> (B, H, Tq, Tk). Their softmax is the weights. Masked scores are -inf.

    softcap: ignored; there are no scores to bound.
    """
    queries = feature_map(q).transpose(1, 2)  # (B, H, Tq, D)
    keys = repeat_kv(feature_map(k), q.shape[2]).permute(0, 2, 3, 1)  # (B, H, D, Tk)
    masks = {"window": window, "positions": positions, "doc_ids": doc_ids}
    is_visible = attention_mask(q.shape[1], k.shape[1], **masks, device=q.device)
    return (queries @ keys).log().masked_fill(~is_visible, -torch.inf)


def linear_attention(
    q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0, softcap=None
) -> Tensor:
    """Linear attention in chunks; T queries and T keys. Raises ValueError for masks and dropout."""
    is_plain = window is None and positions is None and doc_ids is None and softcap is None
    if not is_plain or dropout_p > 0:
        raise ValueError(
            "linear attention does not support windows, positions, documents, dropout and softcaps"
        )
    _, T, H, _ = q.shape
    Dv = v.shape[3]
    chunk = min(T, CHUNK)
    with torch.autocast(q.device.type, enabled=False):
        queries = split_chunks(feature_map(q), chunk)
        keys = split_chunks(repeat_kv(feature_map(k), H), chunk)
        values = split_chunks(repeat_kv(append_one(v), H), chunk)
        states = keys.mT @ values  # one per chunk, (B, H, T / chunk, D, Dv + 1)
        # Sum over all earlier chunks. cumsum() - states would round with later tokens.
        states = F.pad(states.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))
        y = (queries @ keys.mT).tril() @ values + queries @ states
        y = y.flatten(2, 3)[:, :, :T].transpose(1, 2)  # (B, T, H, Dv + 1)
        return (y[..., :Dv] / y[..., Dv:]).to(v.dtype)


def split_chunks(x: Tensor, chunk: int) -> Tensor:
    """(B, T, H, D) -> (B, H, T / chunk, chunk, D), padded with zeros."""
    x = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk))
    return x.unflatten(2, (-1, chunk))


def linear_attention_state(k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """State phi(K)^T [V, 1] of the first `lengths` (B, 1) tokens.

    k (B, T, G, D), v (B, T, G, Dv) -> (B, G, D, Dv + 1)
    """
    with torch.autocast(k.device.type, enabled=False):
        is_read = torch.arange(k.shape[1], device=k.device) < lengths  # (B, T)
        keys = feature_map(k) * is_read[..., None, None]
        return keys.permute(0, 2, 3, 1) @ append_one(v).transpose(1, 2)


def linear_attention_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Add a token to the state, in place, and attend to all tokens so far.

    q (B, 1, H, D), k (B, 1, G, D), v (B, 1, G, Dv) -> (B, 1, H, Dv)
    state (B, G, D, Dv + 1): from linear_attention_state; zeros before the first token.
    """
    B, _, G, D = k.shape
    with torch.autocast(q.device.type, enabled=False):
        state += feature_map(k)[:, 0].unsqueeze(3) * append_one(v)[:, 0].unsqueeze(2)
        y = feature_map(q).view(B, G, -1, D) @ state  # (B, G, H / G, Dv + 1)
        return (y[..., :-1] / y[..., -1:]).reshape(B, 1, q.shape[2], -1).to(v.dtype)


# To add attention of another type, register it in NON_SOFTMAX like this, and add its name to
# ATTENTION_TYPES in model/config.py.
SUPPORT = Support(dropout=False, softcap=False, window=False, document_mask=False, positions=False)
NON_SOFTMAX["linear"] = Backend(
    "linear",
    linear_attention,
    on={"cpu": SUPPORT, "cuda": SUPPORT, "mps": replace(SUPPORT, dtypes=NO_FLOAT64)},
    attention_type="linear",
)
