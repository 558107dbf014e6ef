"""Generation engine: generates samples of many prompts in a batch.

A sample does not depend on the other samples. Each sequence has a row of the KV cache. When a
sequence ends, the next prompt gets its row, so the batch stays full.

Past block_size, the cache is a sliding window. Learned positions end there: when a sequence reaches
block_size, the model reads the last half of its context again, from position 0.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from common.errors import UserError
from common.settings import check
from data.tokenizer import Tokenizer, end_of_text
from generation.config import SamplingConfig
from generation.kv_cache import KVCache
from generation.sampling import IncrementalDetokenizer, sample_next_token
from model.gpt import GPT


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, at least one, and the seed of its sample."""

    tokens: list[int]
    seed: int


class Sequence:
    """A prompt with its sample so far. index: number of sequences that were added before it."""

    def __init__(self, index: int, prompt: Prompt):
        self.index = index
        self.tokens = list(prompt.tokens)
        self.generator = torch.Generator().manual_seed(prompt.seed)
        self.cached = 0  # number of positions in the KV cache

    def last_tokens(self, n: int) -> list[int]:
        """The last n tokens, after -1 for each missing token."""
        tokens = self.tokens[-n:]
        return [-1] * (n - len(tokens)) + tokens


class Engine:
    """Generates one token per step for up to `batch_size` sequences of at most `max_length` tokens.

    The model must be in eval mode. Raises UserError for sampling settings that are out of range.
    """

    def __init__(self, model: GPT, sampling: SamplingConfig, batch_size: int, max_length: int):
        check(sampling)
        self.model = model
        self.sampling = sampling
        self.block_size = model.config.block_size
        self.cache = KVCache(model, batch_size, max_length)
        self.num_added = 0
        self.sequences: list[Sequence] = []  # in the order of the rows of the cache

    @torch.inference_mode()
    def add(self, prompts: list[Prompt]) -> None:
        """Start a sequence for each prompt.

        The model reads the last block_size tokens of a longer prompt.
        """
        first_row = len(self.sequences)
        for prompt in prompts:
            self.sequences.append(Sequence(self.num_added, prompt))
            self.num_added += 1
        self._prefill(first_row, self.sequences[first_row:], self.block_size)

    @torch.inference_mode()
    def step(self) -> list[int]:
        """Generate one token for each sequence, and return them.

        Raises UserError if the logits are NaN.
        """
        if self.model.wpe is not None:
            for row, sequence in enumerate(self.sequences):
                if sequence.cached == self.block_size:  # all learned positions are used
                    self._prefill(row, [sequence], max(1, self.block_size // 2))
        last_tokens = torch.tensor(
            [sequence.last_tokens(self.model.config.max_ngram) for sequence in self.sequences],
            device=self.cache.device,
        )
        positions = [sequence.cached for sequence in self.sequences]
        logits = self.model.logits(self.cache.decode_step(last_tokens, positions))  # (B, V)
        draws = [torch.rand(1, generator=sequence.generator) for sequence in self.sequences]
        uniform = torch.cat(draws).to(self.cache.device)  # (B)
        tokens = sample_next_token(logits, self.sampling, uniform).tolist()
        if max(tokens) >= self.model.vocab_size:  # see sample_next_token
            raise UserError(
                "the model's logits are NaN, so its training has diverged; "
                "set another run or checkpoint"
            )
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.tokens.append(token)
            sequence.cached += 1
        return tokens

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """Remove a sequence. The last sequence takes its row."""
        self.cache.copy_row(len(self.sequences) - 1, row)
        self.sequences[row] = self.sequences[-1]
        self.sequences.pop()

    def _prefill(self, first_row: int, sequences: list[Sequence], max_tokens: int) -> None:
        """Read the last `max_tokens` tokens of sequences, except the newest token of each.

        The next step reads the newest token, and returns the token after it.
        """
        parts = [sequence.tokens[-max_tokens:-1] for sequence in sequences]
        self.cache.prefill(first_row, parts)
        for sequence, part in zip(sequences, parts, strict=True):
            sequence.cached = len(part)


@dataclass(frozen=True)
class TextChunk:
    """New text of a sample. It is empty while a character is incomplete."""

    index: int  # of the prompt
    text: str
    n_tokens: int  # of this sample so far
    # "stop" (a stop string), "end" (an end-of-text token) or "length"; None: not finished
    finish_reason: str | None = None


def generate(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: list[Prompt],
    sampling: SamplingConfig,
    batch_size: int,
) -> Iterator[TextChunk]:
    """Generate a sample of each prompt, batch_size at a time, and yield text as it is generated.

    Samples end at an end-of-text token if the tokenizer has one. The model must be in eval mode.
    """
    if sampling.max_new_tokens == 0:
        return
    max_length = max(len(prompt.tokens) for prompt in prompts) + sampling.max_new_tokens
    engine = Engine(model, sampling, min(batch_size, len(prompts)), max_length)
    end_token = end_of_text(tokenizer)
    detokenizers = [IncrementalDetokenizer(tokenizer, sampling, end_token) for _ in prompts]
    while engine.sequences or engine.num_added < len(prompts):
        num_free = batch_size - len(engine.sequences)
        new = prompts[engine.num_added : engine.num_added + num_free]
        if new:
            engine.add(new)
        tokens = engine.step()
        # From the last row, because the last sequence moves to the row of a finished one.
        for row in reversed(range(len(tokens))):
            index = engine.sequences[row].index
            text, finish_reason = detokenizers[index].push(tokens[row])
            if finish_reason is not None:
                engine.remove(row)
            yield TextChunk(index, text, detokenizers[index].n_tokens, finish_reason)


def in_prompt_order(chunks: Iterable[TextChunk]) -> Iterator[TextChunk]:
    """Yield the chunks of the first sample as they arrive, then of the second, and so on."""
    waiting: dict[int, deque[TextChunk]] = defaultdict(deque)  # by index of the prompt
    current = 0
    for arrived in chunks:
        waiting[arrived.index].append(arrived)
        while waiting[current]:
            chunk = waiting[current].popleft()
            yield chunk
            if chunk.finish_reason is not None:
                current += 1
