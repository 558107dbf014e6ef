"""Linear attention (Katharopoulos et al., arXiv:2006.16236): time and memory grow with T, not T^2.

The softmax is replaced by a product of features, phi(q).phi(k), which are positive:

    y_i = sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j),  j <= i        (eq. 4 and 8)

Therefore phi(q_i) can be taken out of both sums. Training and prompts use chunks: weights within a
chunk, and the state phi(K)^T [V, 1] for the earlier chunks. Decoding computes the weights of one
query for the keys in the KV cache, as softmax attention does.

Both compute in float32 or float64, also under autocast. model/attention/__init__.py has the
notation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.backends import NO_FLOAT64, attention_mask, repeat_kv
from model.attention.support import NON_SOFTMAX, AttentionType, Support

CHUNK = 64  # tokens; 32 to 128 are equally fast


def feature_map(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1 (eq. 7), in float32 or float64.

    Computed without the cancellation that makes elu(x) + 1 zero for x < -17 in float32.
    """
    x = at_least_float32(x)
    return F.relu(x) + x.clamp(max=0).exp()


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear_attention_scores(
    q: Tensor, k: Tensor, *, window=None, positions=None, doc_ids=None, softcap=None
) -> Tensor:
    """log phi(q).phi(k) -> (B, H, Tq, Tk). Their softmax is the weights. Masked scores are -inf.

    softcap: ignored; there are no scores to bound.
    """
    queries = feature_map(q).transpose(1, 2)  # (B, H, Tq, D)
    keys = repeat_kv(feature_map(k), q.shape[2]).permute(0, 2, 3, 1)  # (B, H, D, Tk)
    is_visible = attention_mask(
        q.shape[1], k.shape[1], window=window, positions=positions, doc_ids=doc_ids, device=q.device
    )
    return (queries @ keys).log().masked_fill(~is_visible, -torch.inf)


def linear_attention(
    q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0, softcap=None
) -> Tensor:
    """Linear attention. Raises ValueError for windows, documents, dropout and softcaps."""
    if window is not None or doc_ids is not None or softcap is not None or dropout_p > 0:
        raise ValueError(
            "linear attention does not support windows, documents, dropout and softcaps"
        )
    with torch.autocast(q.device.type, enabled=False):
        if positions is None and q.shape[1] == k.shape[1]:
            y = _attend_in_chunks(q, k, v)
        else:  # decoding
            weights = linear_attention_scores(q, k, positions=positions).softmax(-1)
            y = weights @ repeat_kv(at_least_float32(v), q.shape[2]).transpose(1, 2)
        return y.transpose(1, 2).to(v.dtype)


def _attend_in_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal linear attention of T queries and T keys -> (B, H, T, Dv)."""
    _, T, H, _ = q.shape
    chunk = min(T, CHUNK)
    # A channel of ones: a weighted sum of the values also contains the sum of the weights.
    v = F.pad(at_least_float32(v), (0, 1), value=1.0)
    queries = split_chunks(feature_map(q), chunk)
    keys = split_chunks(repeat_kv(feature_map(k), H), chunk)
    values = split_chunks(repeat_kv(v, H), chunk)
    states = keys.mT @ values  # one per chunk, (B, H, T / chunk, D, Dv + 1)
    # Sum over all earlier chunks. cumsum() - states would round with later tokens.
    states = F.pad(states.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))
    y = (queries @ keys.mT).tril() @ values + queries @ states
    y = y.flatten(2, 3)[:, :, :T]  # (B, H, T, Dv + 1)
    return y[..., :-1] / y[..., -1:]


def split_chunks(x: Tensor, chunk: int) -> Tensor:
    """(B, T, H, D) -> (B, H, T / chunk, chunk, D), padded with zeros."""
    x = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk))
    return x.unflatten(2, (-1, chunk))


def linear_attention_keys(D: int, T: int) -> int:
    """Keys per query with which softmax attention takes as many FLOPs as linear attention.

    These are the keys of a chunk, plus D: products with the state take 4 D Dv FLOPs per head and
    query, and products within a chunk 2 (D + Dv) per key.
    """
    return min(T, CHUNK) + D


# To add attention of another type, register it in NON_SOFTMAX like this, and add its name to
# ATTENTION_TYPES in model/config.py.
LACKS = ("dropout", "softcaps", "windows", "document masks")
NON_SOFTMAX["linear"] = AttentionType(
    "linear",
    linear_attention,
    on={
        "cpu": Support(lacks=LACKS),
        "cuda": Support(lacks=LACKS),
        "mps": Support(NO_FLOAT64, lacks=LACKS),
    },
    key="model.attention_type",
    scores=linear_attention_scores,
    count_keys=linear_attention_keys,
)
