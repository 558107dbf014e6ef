"""Hashed n-gram embeddings: each token also gets the embeddings of the n-grams that end at it.

fastText (Bojanowski et al., arXiv:1607.04606) hashes n-grams of characters in this way, and BLT
(Pagnoni et al., arXiv:2412.09871) n-grams of bytes. B batch, T time, C channels = n_embd.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.layers import Embedding

HASH_PRIME = 2**31 - 1
HASH_FACTOR = 1_566_083_941  # a hash is below HASH_PRIME, so hash x HASH_FACTOR fits into int64


class NgramEmbedding(nn.Module):
    """Sum of the embeddings of the 2-gram, ..., max_ngram-gram that end at each token.

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
