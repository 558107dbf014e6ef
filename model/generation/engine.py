"""Texts that a model continues: many side by side, each as it would be alone.

Rows of the cache hold the texts that grow, however long each is. One that ends gives its row to the next, so that a
long list keeps the machine busy to the end. Past block_size there are two ways: with rotary positions a text slides on,
each token seeing the last block_size ones (or the layer's window) by what the cache kept of them; with learned
positions, which end there, the last half of block_size is read anew, from position 0, whenever the room is used up.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import tiktoken
import torch
from torch import Tensor

from common.errors import UserError
from model.attention import BACKENDS
from model.generation.config import SamplingConfig
from model.generation.cuda_graph import CudaGraphStep
from model.generation.detokenizer import IncrementalDetokenizer
from model.generation.kv_cache import KVCache
from model.generation.sampling import sample_next_token
from model.gpt import GPT


@dataclass(frozen=True)
class Prompt:
    """What a text begins with, one token or more, and the number that decides its draws."""

    tokens: list[int]
    seed: int


@dataclass
class Sequence:
    """A text as it grows. tokens: all of it; length: how many the cache holds."""

    tokens: list[int]
    random: torch.Generator
    length: int = field(default=0)


class Engine:
    """Adds a token to each of up to `rows` texts at a time. longest: tokens that the longest of them may come to.

    The model is to be in eval mode. graphs: on CUDA, where launching a step's many small kernels takes longer than they
    do, whether to record steps and replay them. Raises UserError for settings that are out of range.
    """

    def __init__(self, model: GPT, sampling: SamplingConfig, rows: int, longest: int, graphs: bool = False):
        sampling.check()
        self.model, self.sampling, self.block_size = model, sampling, model.config.block_size
        self.slides = model.wpe is None
        self.cache = KVCache(model, rows, min(longest, self.block_size))
        self.device = self.cache.device
        self.rows: list[Sequence] = []
        self.seen = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(rows, model.vocab_size, dtype=torch.bool, device=self.device)
        self.recorded = CudaGraphStep(self._advance, rows, self.device) if graphs and self._takes_masks() else None

    def _takes_masks(self) -> bool:
        """Whether this is CUDA, and attention takes there the mask that a step of fixed shapes needs, as it is."""
        if self.device.type != "cuda":
            return False
        attends = {getattr(block.attn.attend, "func", block.attn.attend) for block in self.model.blocks}
        used = [each for each in BACKENDS.values() if each.attend in attends]
        return all(each.on["cuda"].positions and not each.needs_compiler for each in used)

    @torch.inference_mode()
    def add(self, prompts: list[Prompt]) -> None:
        """Begin a text behind each prompt, of which the last block_size tokens are read."""
        first = len(self.rows)
        for row, prompt in enumerate(prompts, start=first):
            self.rows.append(Sequence(list(prompt.tokens), torch.Generator().manual_seed(prompt.seed)))
            if self.seen is not None:
                self.seen[row] = False
                self.seen[row, torch.tensor(prompt.tokens, device=self.device)] = True
        self._read(range(first, len(self.rows)), self.block_size)

    def _read(self, rows: range, most: int) -> None:
        """Put the last `most` tokens of `rows` into the cache, but the newest, which the next step adds."""
        parts = [self.rows[row].tokens[-most:-1] for row in rows]
        if any(parts):
            self.cache.begin(rows, parts)
        for row, part in zip(rows, parts, strict=True):
            self.rows[row].length = len(part)

    @torch.inference_mode()
    def step(self) -> list[int]:
        """A token more for each text -> those tokens."""
        if not self.slides:
            full = [i for i, row in enumerate(self.rows) if row.length == self.block_size]
            for rows in [range(len(self.rows))] if len(full) == len(self.rows) else [range(i, i + 1) for i in full]:
                self._read(rows, max(1, self.block_size // 2))
        past = self.model.config.max_ngram
        recent = torch.tensor([[-1] * (past - len(row.tokens)) + row.tokens[-past:] for row in self.rows])
        at = torch.tensor([row.length for row in self.rows])
        uniform = torch.cat([torch.rand(1, generator=row.random) for row in self.rows])
        lengths = {row.length for row in self.rows}
        reach = min(max(lengths) + 1, self.block_size)
        if self.recorded is not None:
            chosen = self.recorded(recent, at, uniform, reach)
        else:
            common = lengths.pop() if len(lengths) == 1 else None
            inputs = (each.to(self.device) for each in (recent, at, uniform))
            chosen = self._advance(*inputs, reach, common)
        new = chosen.tolist()
        if max(new) >= self.model.vocab_size:  # no number is below a probability that is none
            raise UserError("the model's logits are not numbers, its training diverged; set another run or checkpoint")
        for row, token in zip(self.rows, new, strict=True):
            row.tokens.append(token)
            row.length += 1
        return new

    def _advance(self, recent: Tensor, at: Tensor, uniform: Tensor, reach: int, common: int | None = None) -> Tensor:
        """The next tokens (n). uniform (n): see model/sampling.py; the rest: see Cache.go_on."""
        x = self.cache.go_on(recent, at, common, reach)
        logits = self.model.lm_head(x)[:, : self.model.vocab_size]  # (n, V)
        seen = None
        if self.seen is not None:
            seen = self.seen[: len(recent)].scatter_(1, recent[:, -1:], True)
        return sample_next_token(logits, self.sampling, uniform, seen)

    @torch.inference_mode()
    def drop(self, row: int) -> None:
        """Forget a text. The last one takes its place."""
        last = len(self.rows) - 1
        if row != last:
            self.cache.move(last, row)
            if self.seen is not None:
                self.seen[row] = self.seen[last]
            self.rows[row] = self.rows[last]
        self.rows.pop()


@dataclass(frozen=True)
class TextChunk:
    """Some text more of prompt `index`. ended: None while it goes on, and then, with no text after it, why:

    "stop" (a stop string), "end" (the model's own end of text) or "length" (max_new_tokens). tokens: made so far.
    """

    index: int
    text: str
    tokens: int
    ended: str | None = None


def generate(
    model: GPT, encoding: tiktoken.Encoding, prompts: list[Prompt], sampling: SamplingConfig, *, end: int | None,
    rows: int, graphs: bool = False,
) -> Iterator[TextChunk]:  # fmt: skip
    """The texts behind each prompt, as they are made, `rows` at a time; each one's last Piece says why it ended.

    end: the id that ends a text; None: the tokenizer has none. graphs: see Engine. The model is in eval mode for it.
    """
    if sampling.max_new_tokens == 0:
        yield from (TextChunk(index, "", 0, "length") for index in range(len(prompts)))
        return
    longest = max((len(prompt.tokens) for prompt in prompts), default=0) + sampling.max_new_tokens
    decoder = Engine(model, sampling, min(rows, len(prompts)), longest, graphs)
    waiting, growing = deque(enumerate(prompts)), []  # growing: of each of the decoder's rows, (index, its stream)
    was_training = model.training
    model.eval()
    try:
        while waiting or growing:
            new = [waiting.popleft() for _ in range(min(len(waiting), rows - len(growing)))]
            if new:
                decoder.add([prompt for _, prompt in new])
                growing += [(index, IncrementalDetokenizer(encoding, sampling)) for index, _ in new]
            tokens = decoder.step()
            for row in reversed(range(len(growing))):  # the last first: it takes the place of one that is dropped
                index, stream = growing[row]
                text, ended = stream.push(tokens[row], end)
                if ended:
                    decoder.drop(row)
                    growing[row] = growing[-1]
                    growing.pop()
                if text or ended:
                    yield TextChunk(index, text, stream.tokens, ended)
    finally:
        decoder.recorded = None  # it refers to the decoder, and graphs hold memory
        model.train(was_training)
