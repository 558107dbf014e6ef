"""Softcap: keeps scores or logits between -cap and cap (Gemma 2, arXiv:2408.00118, section 2)."""

from torch import Tensor


def apply_softcap(x: Tensor, cap: float | None) -> Tensor:
    """Elementwise cap tanh(x / cap). Returns x if cap is None."""
    return x if cap is None else cap * (x / cap).tanh()
