"""Generation engine: generates samples of many prompts in a batch. A sample does not depend on the others.

Each sequence has a row of the KV cache. When a sequence ends, the next prompt gets its row, so the batch stays full.

Past block_size, the cache is a sliding window. Learned positions end there: when a sequence reaches block_size, the
model reads the last half of its context again, from position 0.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

import tiktoken
import torch

from common.errors import UserError
from common.settings import check
from data.tokenizer import end_of_text
from generation.config import SamplingConfig
from generation.detokenizer import IncrementalDetokenizer
from generation.kv_cache import KVCache
from generation.sampling import sample_next_token
from model.gpt import GPT


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, at least one, and the seed of its sample."""

    tokens: list[int]
    seed: int


@dataclass
class Sequence:
    """A prompt and its sample so far. cached: number of positions in the KV cache."""

    tokens: list[int]
    generator: torch.Generator
    cached: int = 0


class Engine:
    """Generates one token per step for up to `batch_size` sequences of at most `max_length` tokens.

    The model must be in eval mode. Raises UserError for sampling settings that are out of range.
    """

    def __init__(self, model: GPT, sampling: SamplingConfig, batch_size: int, max_length: int):
        check(sampling)
        self.model, self.sampling, self.block_size = model, sampling, model.config.block_size
        self.cache = KVCache(model, batch_size, min(max_length, self.block_size))
        self.sequences: list[Sequence] = []  # the sequence at index i has row i of the cache

    @torch.inference_mode()
    def add(self, prompts: list[Prompt]) -> None:
        """Start a sequence for each prompt. The model reads the last block_size tokens of a longer prompt."""
        first = len(self.sequences)
        self.sequences += [
            Sequence(list(p.tokens), torch.Generator().manual_seed(p.seed)) for p in prompts
        ]
        self._prefill(first, self.sequences[first:], self.block_size)

    def _prefill(self, first_row: int, sequences: list[Sequence], max_tokens: int) -> None:
        """Read the last `max_tokens` tokens of sequences, except the newest token, which the next step reads."""
        parts = [sequence.tokens[-max_tokens:-1] for sequence in sequences]
        self.cache.prefill(first_row, parts)
        for sequence, part in zip(sequences, parts, strict=True):
            sequence.cached = len(part)

    @torch.inference_mode()
    def step(self) -> list[int]:
        """Generate one token for each sequence, and return them. Raises UserError if the logits are NaN."""
        for row, sequence in enumerate(self.sequences):
            if (
                self.model.wpe is not None and sequence.cached == self.block_size
            ):  # all learned positions are used
                self._prefill(row, [sequence], max(1, self.block_size // 2))
        n, V, device = self.model.config.max_ngram, self.model.vocab_size, self.cache.device
        last_tokens = torch.tensor(
            [[-1] * (n - len(s.tokens)) + s.tokens[-n:] for s in self.sequences], device=device
        )
        x = self.cache.decode_step(last_tokens, [s.cached for s in self.sequences])
        uniform = torch.cat([torch.rand(1, generator=s.generator) for s in self.sequences]).to(
            device
        )
        new = sample_next_token(self.model.logits(x), self.sampling, uniform).tolist()
        if max(new) >= V:  # see sample_next_token
            raise UserError(
                "the model's logits are NaN, so its training has diverged; set another run or checkpoint"
            )
        for sequence, token in zip(self.sequences, new, strict=True):
            sequence.tokens.append(token)
            sequence.cached += 1
        return new

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """Remove a sequence. The last sequence takes its row."""
        for layer in self.cache.layers:
            layer.copy_row(len(self.sequences) - 1, row)
        self.sequences[row] = self.sequences[-1]
        self.sequences.pop()


@dataclass(frozen=True)
class TextChunk:
    """New text of the sample of prompt `index`. n_tokens: number of tokens of this sample so far.

    finish_reason: "stop" (a stop string), "end" (an end-of-text token) or "length"; None if the sample is not finished
    """

    index: int
    text: str
    n_tokens: int
    finish_reason: str | None = None


def generate(
    model: GPT,
    tokenizer: tiktoken.Encoding,
    prompts: list[Prompt],
    sampling: SamplingConfig,
    batch_size: int,
) -> Generator[TextChunk]:
    """Generate a sample of each prompt, batch_size at a time, and yield text as it is generated.

    Samples end at an end-of-text token if the tokenizer has one. The model is in eval mode until the generator ends.
    """
    if sampling.max_new_tokens == 0:
        yield from (TextChunk(index, "", 0, "length") for index in range(len(prompts)))
        return
    max_length = (
        max((len(prompt.tokens) for prompt in prompts), default=0) + sampling.max_new_tokens
    )
    engine = Engine(model, sampling, min(batch_size, len(prompts)), max_length)
    end_token, was_training, waiting = (
        end_of_text(tokenizer),
        model.training,
        deque(enumerate(prompts)),
    )
    running: list[
        tuple[int, IncrementalDetokenizer]
    ] = []  # prompt index and detokenizer of each row of the engine
    model.eval()
    try:
        while waiting or running:
            new = [waiting.popleft() for _ in range(min(len(waiting), batch_size - len(running)))]
            if new:
                engine.add([prompt for _, prompt in new])
                running += [
                    (index, IncrementalDetokenizer(tokenizer, sampling, end_token))
                    for index, _ in new
                ]
            tokens = engine.step()
            for row in reversed(
                range(len(running))
            ):  # from the end, because `remove` moves the last sequence
                index, detokenizer = running[row]
                text, finish_reason = detokenizer.push(tokens[row])
                if finish_reason is not None:
                    engine.remove(row)
                    running[row] = running[-1]
                    running.pop()
                if text or finish_reason is not None:
                    yield TextChunk(index, text, detokenizer.n_tokens, finish_reason)
    finally:
        model.train(was_training)
