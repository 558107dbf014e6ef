"""Fixtures of the attention tests."""

import pytest
from torch.nn.attention import flex_attention


@pytest.fixture(autouse=True)
def _uncompiled_flex(request, monkeypatch):
    """Run FlexAttention uncompiled, because compiling takes seconds per mask.

    Tests marked `compiles` do compile.
    """
    if "compiles" not in request.keywords:
        monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        monkeypatch.setattr(
            "model.attention.backends._compiled_flex", lambda: flex_attention.flex_attention
        )
