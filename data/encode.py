"""Pieces of text to token ids on disk, on all cores, a shard at a time."""

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from common.files import atomic_write
from common.system import cpu_count
from data import tokenizer
from data.config import DataConfig
from data.fast_bpe import FastBPE
from data.progress import PrepareProgress
from data.shards import ShardWriter
from data.splits import SplitRange

CHUNK = 2**20  # characters that a thread encodes at a time
PIECE_SIZE = 32  # characters that a piece counts for beside its own, for none is without weight
PlacedPiece = tuple[str, bool, str]  # a piece, and where it is


@dataclass(frozen=True)
class Encoded:
    """A chunk of text as ids; lengths: (tokens, whether a document ends) of each piece; and its bytes of text."""

    ids: np.ndarray
    lengths: list[tuple[int, bool]]
    bytes: int


def token_dtype(encoding: tiktoken.Encoding) -> str:
    return "uint16" if encoding.n_vocab <= 2**16 else "uint32"


def encode_split(
    folder: Path, split: str, config: DataConfig, parts: list[SplitRange], encoding: tiktoken.Encoding, journal: dict,
    show: PrepareProgress,
) -> None:  # fmt: skip
    """Write the ids of a split's parts, end to end, behind the shards that the journal has, and tell it so.

    journal["splits"][split] comes to hold, as of the last chunk that was begun: part and chunk, which come next, skip,
    how many of that chunk's ids are in finished shards already; and what is known of all before: files, ranges (each
    text's first id, and how many), bytes, documents, and longest, the tokens of the longest document.
    """
    fresh = {"part": 0, "chunk": 0, "skip": 0, "tokens": 0, "files": {}, "ranges": {}, "bytes": 0, "documents": 0,
             "longest": 0, "open": 0}  # fmt: skip
    state, dtype = journal["splits"].setdefault(split, fresh), token_dtype(encoding)
    writer = ShardWriter(folder, split, dtype, journal["shard"], state["files"])
    total = sum(part.bytes for part in parts) if all(part.bytes is not None for part in parts) else None
    show.begin(f"encoding {split}", total, state["bytes"])

    fast = FastBPE.of(encoding)

    def encode(chunk: list[PlacedPiece]) -> Encoded:
        return _encode(encoding, fast, chunk, dtype)

    for part in parts[state["part"] :]:
        state["ranges"].setdefault(part.name, [state["tokens"], 0])
        pieces = itertools.islice(chunks(placed(part, config)), state["chunk"], None)
        for encoded in parallel_map(encode, pieces):
            skip = state["skip"]
            for used in writer.add(encoded.ids[skip:]):
                state["skip"] = skip + used
                atomic_write(folder / "journal.json", json.dumps(journal).encode())
            state["skip"] = 0
            state["chunk"] += 1
            _count(state, part.name, encoded)
            show.add(encoded.bytes)
        if state["open"]:  # a document that validation goes on with
            _close(state)
        state["part"], state["chunk"] = state["part"] + 1, 0
    writer.finish()
    atomic_write(folder / "journal.json", json.dumps(journal).encode())


def _count(state: dict, name: str, encoded: Encoded) -> None:
    state["tokens"] += len(encoded.ids)
    state["ranges"][name][1] += len(encoded.ids)
    state["bytes"] += encoded.bytes
    for length, ends in encoded.lengths:
        state["open"] += length
        if ends:
            _close(state)


def _close(state: dict) -> None:
    state["documents"], state["longest"] = state["documents"] + 1, max(state["longest"], state["open"])
    state["open"] = 0


def _encode(encoding: tiktoken.Encoding, fast: FastBPE | None, chunk: list[PlacedPiece], dtype: str) -> Encoded:
    end = tokenizer.end_of_text(encoding)
    parts, lengths, size = [], [], 0
    for text, ends, where in chunk:
        ids = tokenizer.encode(encoding, text, where, fast)
        parts.append(ids)
        if ends and end is not None:
            parts.append(np.array([end], dtype=np.uint32))
        lengths.append((len(ids), ends))
        size += len(text.encode())
    ids = np.concatenate(parts)
    if ids.size and ids.max() >= encoding.n_vocab:  # a cast to uint16 would wrap it silently into another token
        raise ValueError(f"token {ids.max()} lies outside the vocabulary of {encoding.n_vocab}")
    return Encoded(ids.astype(dtype), lengths, size)


def placed(part: SplitRange, config: DataConfig) -> Iterator[PlacedPiece]:
    """The pieces of a part, each with what to call it."""
    document, character = part.start
    for text, ends in part.pieces(config):
        yield (
            text,
            ends,
            f"document {document + 1} of {part.name}" + f", behind character {character}," * (character > 0),
        )
        document, character = (document + 1, 0) if ends else (document, character + len(text))


def chunks(pieces: Iterable[PlacedPiece]) -> Iterator[list[PlacedPiece]]:
    """Pieces, CHUNK characters or a little more at a time, so that many small ones cost no more than a few."""
    chunk, size = [], 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece[0]) + PIECE_SIZE
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def parallel_map(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """function(item) of each, in order, on all cores. Only a few are held at a time.

    In threads: tiktoken lets go of Python's lock while it encodes.
    """
    workers = cpu_count()
    with ThreadPoolExecutor(workers) as pool:
        waiting = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
