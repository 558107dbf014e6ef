"""Encode text into token files, on all cores, in chunks of about a million characters.

A token file (shard) ends at the first chunk boundary after SHARD_TOKENS tokens. The files therefore depend only on the
text and the tokenizer. The journal records the state after each finished file, so that an interrupted preparation
continues there, with identical output.
"""

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from common.console import ProgressBar, format_si
from common.files import write_json
from common.process import cpu_count
from data.fast_bpe import FastBPE
from data.shards import ShardWriter, shard_name
from data.sources import TextSource
from data.splits import SplitRange
from data.tokenizer import encode, end_of_text, from_spec

CHUNK_CHARS = 2**20  # characters that a thread encodes at a time
SHARD_TOKENS = 2**26  # tokens per file; two cores encode them in half a minute
PIECE_OVERHEAD_CHARS = 32  # added to each piece's length, so that a chunk has a bounded number of empty documents


class NamedPiece(NamedTuple):
    """A Piece, and its name for error messages."""

    text: str
    ends_document: bool
    is_prompt: bool
    name: str


@dataclass
class SplitProgress:
    """State of a split after its finished files: where to continue, and the totals for meta.json.

    range_index: index of the current SplitRange. chunks: number of its chunks that are encoded.
    files: {file name: {"tokens", "sha256"}}. tokens: {source: count}. bytes: size of the encoded text.
    documents: number of documents; one that is divided between two splits counts in both.
    """

    range_index: int = 0
    chunks: int = 0
    files: dict[str, dict] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    documents: int = 0


@dataclass
class Journal:
    """State of an unfinished preparation, saved as journal.json.

    commits: {source: commit of its hub data set}. tokenizer: its spec. splits: progress of "train" and "val".
    """

    fingerprint: str
    commits: dict[str, str | None]
    tokenizer: dict
    ranges: list[SplitRange]
    splits: dict[str, SplitProgress] = field(default_factory=lambda: {"train": SplitProgress(), "val": SplitProgress()})

    def save(self, folder: Path) -> None:
        write_json(folder / "journal.json", asdict(self))

    @classmethod
    def load(cls, folder: Path) -> "Journal | None":
        """Read journal.json. Returns None if it is missing or damaged."""
        try:
            journal = cls(**json.loads((folder / "journal.json").read_text()))
            journal.ranges = [SplitRange.from_json(fields) for fields in journal.ranges]
            journal.splits = {split: SplitProgress(**fields) for split, fields in journal.splits.items()}
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            return None
        return journal

    def can_resume(self, fingerprint: str, commits: dict[str, str | None]) -> bool:
        """Whether the text is still the same. A commit of None (unknown, as without a network) is accepted."""
        same_commits = all(commit in (None, self.commits.get(name)) for name, commit in commits.items())
        return self.fingerprint == fingerprint and same_commits


@dataclass(frozen=True)
class EncodedChunk:
    """Token ids of a chunk. documents: number of documents that end in it. bytes: size of the text."""

    ids: np.ndarray
    documents: int
    bytes: int


def token_dtype(tokenizer: tiktoken.Encoding, sources: list[TextSource]) -> str:
    """The dtype of token files: int32 if a source has prompts, whose tokens are stored as ~id = -1 - id."""
    if any(source.prompt_column is not None for source in sources):
        return "int32"
    return "uint16" if tokenizer.n_vocab <= 2**16 else "uint32"


def encode_split(folder: Path, split: str, sources: list[TextSource], journal: Journal, bar: ProgressBar) -> None:
    """Write the token files of a split that are not in the journal yet, and save the journal after each file."""
    tokenizer = from_spec(journal.tokenizer)
    dtype, fast = token_dtype(tokenizer, sources), FastBPE.from_tokenizer(tokenizer)
    by_name = {source.name: source for source in sources}
    progress, ranges = journal.splits[split], [part for part in journal.ranges if part.split == split]
    writer = None
    for part in ranges[progress.range_index :]:
        progress.tokens.setdefault(part.source, 0)
        chunks = split_into_chunks(name_pieces(part, by_name[part.source]))
        remaining = itertools.islice(chunks, progress.chunks, None)
        for chunk in parallel_map(lambda chunk: encode_chunk(tokenizer, fast, chunk, dtype), remaining):
            bar.update(progress.bytes, f"encoding {split}", format_si(progress.bytes, "B"))
            writer = writer or ShardWriter(folder / shard_name(split, len(progress.files)), dtype)
            writer.write(chunk.ids)
            progress.chunks += 1
            progress.tokens[part.source] += len(chunk.ids)
            progress.bytes += chunk.bytes
            progress.documents += chunk.documents
            if writer.tokens >= SHARD_TOKENS:
                progress.files[writer.path.name] = writer.finish()
                journal.save(folder)
                writer = None
        progress.documents += part.ends_within_document
        progress.range_index, progress.chunks = progress.range_index + 1, 0
    if writer is not None:
        progress.files[writer.path.name] = writer.finish()
    journal.save(folder)


def encode_chunk(
    tokenizer: tiktoken.Encoding, fast: FastBPE | None, chunk: list[NamedPiece], dtype: str
) -> EncodedChunk:
    """Encode the pieces of a chunk, with an end-of-text token after each document if the tokenizer has one."""
    end = end_of_text(tokenizer)
    parts, documents, size = [], 0, 0
    for text, ends_document, is_prompt, name in chunk:
        ids = encode(tokenizer, text, name, fast)
        parts.append(~ids if is_prompt else ids)
        documents += ends_document
        size += len(text.encode())
        if ends_document and end is not None:
            parts.append(np.array([end], dtype=np.uint32))
    ids = np.concatenate(parts).view(np.int32)
    if ids.size and (ids.max() >= tokenizer.n_vocab or ids.min() < -tokenizer.n_vocab):
        # NumPy's cast to uint16 would wrap it silently
        raise ValueError(f"a token from {ids.min()} to {ids.max()} is outside the vocabulary of {tokenizer.n_vocab}")
    return EncodedChunk(ids.astype(dtype), documents, size)


def name_pieces(part: SplitRange, source: TextSource) -> Iterator[NamedPiece]:
    """Yield the pieces of a range, each with a name for error messages."""
    document, character = part.start
    for text, ends_document, is_prompt in part.iter_text(source):
        name = f"document {document + 1} of {source.name}"
        name += f", after character {character}," if character else ""
        yield NamedPiece(text, ends_document, is_prompt, name)
        document, character = (document + 1, 0) if ends_document else (document, character + len(text))


def split_into_chunks(pieces: Iterable[NamedPiece]) -> Iterator[list[NamedPiece]]:
    """Group pieces into chunks of at least CHUNK_CHARS characters, so that small documents cost little overhead."""
    chunk, size = [], 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece.text) + PIECE_OVERHEAD_CHARS
        if size >= CHUNK_CHARS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def parallel_map(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Yield function(item) for each item, in order, on all cores. Only a few items are in memory at a time.

    Threads suffice: tiktoken releases Python's global interpreter lock while it encodes.
    """
    workers = cpu_count()
    with ThreadPoolExecutor(workers) as pool:
        pending = deque()
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
