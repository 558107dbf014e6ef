"""Linear and embedding layers without PyTorch's default initialization.

GPT.init_weights initializes all weights. PyTorch's default would be overwritten, takes a second for
GPT-2, and on the meta device it imports torch._dynamo, which takes another one.
"""

from torch import nn


class Linear(nn.Linear):
    """nn.Linear whose weights are not initialized."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """nn.Embedding whose weights are not initialized."""

    def reset_parameters(self) -> None:
        pass
