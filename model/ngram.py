"""Hashed n-gram embeddings: each token also gets the embeddings of the 2-gram, 3-gram, ... that end at it.

fastText (Bojanowski et al., arXiv:1607.04606) hashes n-grams of characters in this way. BLT (Pagnoni et al.,
arXiv:2412.09871) hashes n-grams of bytes. B batch, T time, C channels = n_embd.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.startup import empty_embedding


class NgramEmbedding(nn.Module):
    """Sum of the embeddings of the 2-gram, ..., max_ngram-gram that end at each token: tokens (B, T) -> (B, T, C).

    All n-grams are hashed into one table of table_size rows, so n-grams may collide. A padding id replaces tokens
    before the first one and tokens of other documents.
    """

    PRIME, FACTOR = 2**31 - 1, 1_566_083_941  # a hash is below PRIME, so hash x FACTOR fits into int64

    def __init__(self, max_ngram: int, table_size: int, C: int):
        super().__init__()
        self.max_ngram = max_ngram
        self.table = empty_embedding(table_size, C)

    def ngram_hashes(self, tokens: Tensor, doc_ids: Tensor | None, previous_tokens: Tensor | None = None) -> Tensor:
        """Table rows of the n-grams that end at each token: tokens (B, T) -> (B, T, max_ngram - 1).

        doc_ids (B, T): document of each token; by default, all tokens belong to one.
        previous_tokens (B, max_ngram - 1): tokens before the first one, -1 where there is none; by default all -1.
        """
        T, offset = tokens.shape[1], self.max_ngram - 1
        if previous_tokens is None:
            previous_tokens = tokens.new_full((tokens.shape[0], offset), -1)
        context = torch.cat((previous_tokens, tokens), dim=1) + 1  # 0 is the padding id
        value, values = tokens, []
        for distance in range(1, self.max_ngram):
            earlier = context[:, offset - distance : offset - distance + T]
            if doc_ids is not None:
                earlier = earlier.where(F.pad(doc_ids, (distance, 0))[:, :T] == doc_ids, 0)
            value = (value * self.FACTOR + earlier) % self.PRIME
            values.append(value)
        return torch.stack(values, dim=-1) % self.table.num_embeddings

    def forward(self, tokens: Tensor, doc_ids: Tensor | None, previous_tokens: Tensor | None = None) -> Tensor:
        rows = self.ngram_hashes(tokens, doc_ids, previous_tokens)
        return F.embedding_bag(rows.flatten(0, 1), self.table.weight, mode="sum").view(*tokens.shape, -1)
