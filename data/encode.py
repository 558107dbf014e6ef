"""Encode sources: each source becomes one token file, and its split is an index into that file.

The file has the documents of a source, each with an end-of-text token after it if the tokenizer has one, then those of
its separate validation text. All cores encode, in chunks of a million characters.
"""

import itertools
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from common.console import ProgressBar, format_si
from common.errors import UserError
from common.files import atomic_writer
from common.process import cpu_count
from data.config import TokenizerConfig
from data.fast_bpe import FastBPE
from data.readers import Piece, iter_pieces
from data.sources import Source
from data.tokenizer import build_tokenizer, encode, end_of_text, to_spec

CHUNK_CHARS = 2**20  # characters that a thread encodes at a time
PIECE_OVERHEAD_CHARS = 32  # added to each piece's length, so that a chunk has a bounded number of empty documents


def encode_sources(folder: Path, sources: list[Source], config: TokenizerConfig, spec: dict | None) -> dict:
    """Write the token files of all sources into a folder. Returns the content of meta.json. Raises UserError."""
    readings = itertools.starmap(iter_chunks, itertools.product(sources, (False, True), ["reading"]))
    texts = (piece.text for chunks in readings for chunk in chunks for piece in chunk)
    tokenizer = build_tokenizer(config, texts, len(sources) > 1 or sources[0].has_several_documents, spec)
    spec = to_spec(tokenizer)
    has_prompts = any(source.config.prompt_column is not None for source in sources)
    dtype = "int32" if has_prompts else "uint16" if tokenizer.n_vocab <= 2**16 else "uint32"
    parts: dict[str, list[dict]] = {"train": [], "val": []}
    for source in sources:
        file = TokenFile(source, tokenizer, dtype)
        with atomic_writer(folder / f"{source.name}.bin") as out:
            file.write(out)
        first, stop = file.choose_validation()
        parts["val"].append(file.describe(first, stop))
        parts["train"].append(file.describe(0, first) if first else file.describe(stop, len(file.ends)))
    counts = ("tokens", "bytes", "documents")
    totals = {key: {split: sum(part[key] for part in parts[split]) for split in parts} for key in counts}
    return {"dtype": dtype, "vocab_size": tokenizer.n_vocab, **totals, **parts, "tokenizer": spec}


def iter_chunks(source: Source, is_validation: bool, verb: str) -> Iterator[list[Piece]]:
    """Yield a source's pieces in chunks of at least CHUNK_CHARS characters. verb: what the progress bar shows."""
    chunk, size, done = [], 0, 0
    with ProgressBar(source.text_bytes) as bar:
        for piece in iter_pieces(source, is_validation):
            chunk.append(piece)
            size += len(piece.text) + PIECE_OVERHEAD_CHARS
            if size >= CHUNK_CHARS:
                yield chunk
                done += sum(len(piece.text) for piece in chunk)
                bar.show(done, f"{verb} {source.name}", f"{format_si(done)} characters")
                chunk, size = [], 0
    if chunk:
        yield chunk


class TokenFile:
    """Writer of a source's token file."""

    def __init__(self, source: Source, tokenizer: tiktoken.Encoding, dtype: str):
        self.source, self.tokenizer, self.dtype = source, tokenizer, dtype
        self.fast, end = FastBPE.from_tokenizer(tokenizer), end_of_text(tokenizer)
        self.separator = np.array([] if end is None else [end], np.uint32)
        self.ends, self.sizes = array("q"), array("q")  # tokens, and bytes of text, up to the end of each document

    def write(self, out: Any) -> None:
        """Write all documents. Raises UserError."""
        tokens = size = 0
        for is_validation in (False, True):
            if is_validation:
                self.train_documents = len(self.ends)
            for ids, lengths in parallel_map(self.encode_chunk, iter_chunks(self.source, is_validation, "encoding")):
                out.write(ids)
                for num_tokens, num_bytes, ends_document in lengths:
                    tokens, size = tokens + num_tokens, size + num_bytes
                    if ends_document:
                        self.ends.append(tokens)
                        self.sizes.append(size)

    def encode_chunk(self, chunk: list[Piece]) -> tuple[np.ndarray, list[tuple[int, int, bool]]]:
        """Encode a chunk. Returns all token ids, and for each piece: tokens, bytes, whether its document ends."""
        parts, lengths = [], []
        for text, ends_document, is_prompt in chunk:
            ids = encode(self.tokenizer, text, self.source.name, self.fast)
            # a prompt's tokens, which are never targets, are stored as ~id = -1 - id
            parts += [~ids if is_prompt else ids, self.separator[:ends_document]]
            num_bytes = 0 if is_prompt else len(text.encode())
            lengths.append((len(ids) + len(parts[-1]), num_bytes, ends_document))
        return np.concatenate(parts).view(np.int32).astype(self.dtype), lengths  # ~id in uint32 has the bits of -1 - id

    def choose_validation(self) -> tuple[int, int]:
        """First and last + 1 of the documents to hold out. A single document is cut in two. Raises UserError."""
        config, documents, size = self.source.config, len(self.ends), self.sizes[-1]
        if self.source.val_files:
            return self.train_documents, documents
        if config.val_documents is not None and config.val_documents < documents:
            return 0, config.val_documents
        if config.val_documents is not None or (documents == 1 and config.prompt_column is not None):
            advice = "set a smaller data.val_documents, or data.val_fraction or data.val_path instead"
            raise UserError(f"{self.source.name} has too few documents ({documents}) to hold some out; {advice}")
        if documents == 1:
            self.ends.insert(0, int(self.ends[0] * (1 - config.val_fraction)))
            self.sizes.insert(0, int(size * (1 - config.val_fraction)))
            return 1, 2
        first = max(1, bisect_right(self.sizes, size - max(1, size * config.val_fraction)))
        if (share := 1 - self.sizes[first - 1] / size) > 2 * config.val_fraction:
            print(f"{share:.0%} of {self.source.name} is held out: documents are not divided; set data.val_path")
        return first, documents

    def describe(self, first: int, stop: int) -> dict:
        """The part of the file with documents first to stop - 1, as in meta.json."""
        start, size = (self.ends[first - 1], self.sizes[first - 1]) if first else (0, 0)
        counts = {"tokens": self.ends[stop - 1] - start, "bytes": self.sizes[stop - 1] - size}
        return {"file": f"{self.source.name}.bin", "start": start, **counts, "documents": stop - first}


def parallel_map(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Yield function(item) for each item, in order, on all cores. Only a few items are in memory at a time."""
    with ThreadPoolExecutor(cpu_count()) as pool:  # tiktoken releases Python's global interpreter lock
        pending = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 2 * cpu_count():
                yield pending.popleft().result()
        yield from (future.result() for future in pending)
