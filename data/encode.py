"""Encode sources: each source becomes one token file, and its split is an index into that file.

The file has the documents of a source, each with an end-of-text token after it if the tokenizer has one, then those of
its separate validation text. All cores encode, in chunks of a million characters.
"""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from common.console import ProgressBar, format_si, pluralize, print_text
from common.errors import UserError
from common.files import atomic_writer
from common.settings import unescape
from common.system import cpu_count
from data.config import TokenizerConfig
from data.fast_bpe import FastBPE
from data.readers import Piece, iter_pieces
from data.sources import Source, is_table
from data.tokenizer import END_OF_TEXT, build_tokenizer, encode, end_of_text, to_spec

CHUNK_CHARS = 2**20  # characters that a thread encodes at a time
PIECE_OVERHEAD_CHARS = (
    32  # added to each piece's length, so that a chunk has a bounded number of empty documents
)
EMPTY_HASH = 0  # of a document without text


def encode_sources(
    folder: Path, sources: list[Source], config: TokenizerConfig, spec: dict | None
) -> dict:
    """Write the token files of all sources into a folder. Returns the content of meta.json. Raises UserError."""
    has_several_documents = len(sources) > 1 or sources[0].has_several_documents
    tokenizer = build_tokenizer(config, iter_texts(sources), has_several_documents, spec)
    spec = to_spec(tokenizer)
    if has_several_documents and end_of_text(tokenizer) is None:
        problem = f"documents are joined without a separator, because the vocabulary has no {END_OF_TEXT} token"
        print_text(
            f"{problem}; a model that should stop needs the vocabulary of a run on several documents"
        )
    has_prompts = any(source.config.prompt_column is not None for source in sources)
    dtype = "int32" if has_prompts else "uint16" if tokenizer.n_vocab <= 2**16 else "uint32"
    parts: dict[str, list[dict]] = {"train": [], "val": []}
    hashes: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    for source in sources:
        file = TokenFile(source, tokenizer, dtype)
        with atomic_writer(folder / f"{source.name}.bin") as out:
            file.write(out)
        first, stop = file.choose_validation()
        parts["val"].append(file.describe(first, stop))
        parts["train"].append(
            file.describe(0, first) if first else file.describe(stop, len(file.ends))
        )
        hashes["val"].append(np.array(file.hashes[first:stop]))
        hashes["train"].append(np.delete(np.array(file.hashes), slice(first, stop)))
    _report_copies(np.concatenate(hashes["train"]), np.concatenate(hashes["val"]))
    counts = ("tokens", "bytes", "documents")
    totals = {
        key: {split: sum(part[key] for part in parts[split]) for split in parts} for key in counts
    }
    return {"dtype": dtype, "vocab_size": tokenizer.n_vocab, **totals, **parts, "tokenizer": spec}


def _report_copies(train_hashes: np.ndarray, val_hashes: np.ndarray) -> None:
    """Print a line if validation documents that are not empty are also in the training text."""
    copies = int((np.isin(val_hashes, train_hashes) & (val_hashes != EMPTY_HASH)).sum())
    if copies:
        held_out = pluralize(len(val_hashes), "validation document")
        verb = "is" if copies == 1 else "are"
        print_text(
            f"{copies:,} of {held_out} {verb} also in the training text; remove the copies, or set data.val_path"
        )


def iter_texts(sources: list[Source]) -> Iterator[str]:
    """Yield all text of the sources, including separate validation text, to train a vocabulary."""
    for source in sources:
        for is_validation in (False, True):
            for chunk in iter_chunks(source, is_validation, "reading"):
                yield from (piece.text for piece in chunk)


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


class EncodedPiece(NamedTuple):
    """Facts about an encoded piece of a document."""

    num_tokens: int
    num_bytes: int  # of text that is not a prompt
    num_markers: int  # occurrences of <|endoftext|> as text
    content_hash: int
    ends_document: bool


class TokenFile:
    """Writer of a source's token file.

    ends, sizes: tokens, and bytes of text, up to the end of each document. hashes: a hash of each document's tokens.
    """

    def __init__(self, source: Source, tokenizer: tiktoken.Encoding, dtype: str):
        self.source = source
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.fast = FastBPE.from_tokenizer(tokenizer)
        end = end_of_text(tokenizer)
        self.separator = np.array([] if end is None else [end], np.uint32)
        self.ends = array("q")
        self.sizes = array("q")
        self.hashes = array("q")

    def write(self, out: Any) -> None:
        """Write all documents. Raises UserError."""
        tokens = size = markers = 0
        content_hash = EMPTY_HASH
        for is_validation in (False, True):
            if is_validation:
                self.train_documents = len(self.ends)
            for ids, pieces in parallel_map(
                self.encode_chunk, iter_chunks(self.source, is_validation, "encoding")
            ):
                out.write(ids)
                for piece in pieces:
                    tokens += piece.num_tokens
                    size += piece.num_bytes
                    markers += piece.num_markers
                    if piece.content_hash != EMPTY_HASH:
                        content_hash = hash((content_hash, piece.content_hash))
                    if piece.ends_document:
                        self.ends.append(tokens)
                        self.sizes.append(size)
                        self.hashes.append(content_hash)
                        content_hash = EMPTY_HASH
        name, separator = self.source.name, self.source.config.separator
        if separator is not None:
            print_text(
                f"{name} has {pluralize(len(self.ends), 'document')}, divided by {unescape(separator)!r}"
            )
        elif markers > 1 and not all(map(is_table, self.source.files)):
            advice = (
                f"set data.separator='{END_OF_TEXT}' to divide a text file into documents there"
            )
            print_text(
                f"{name} contains {END_OF_TEXT} {markers:,} times as ordinary text; {advice}"
            )

    def encode_chunk(self, chunk: list[Piece]) -> tuple[np.ndarray, list[EncodedPiece]]:
        """Encode a chunk. Returns all token ids, and the facts about each piece."""
        parts: list[np.ndarray] = []
        pieces = []
        for text, ends_document, is_prompt in chunk:
            ids = encode(self.tokenizer, text, self.source.name, self.fast)
            num_tokens = len(ids)
            parts.append(
                ~ids if is_prompt else ids
            )  # a prompt's tokens, which are never targets, are stored as ~id
            if ends_document:
                parts.append(self.separator)
                num_tokens += len(self.separator)
            num_bytes = 0 if is_prompt else len(text.encode())
            content_hash = hash(ids.tobytes()) if len(ids) else EMPTY_HASH
            pieces.append(
                EncodedPiece(
                    num_tokens, num_bytes, text.count(END_OF_TEXT), content_hash, ends_document
                )
            )
        return np.concatenate(parts).view(np.int32).astype(
            self.dtype
        ), pieces  # ~id in uint32 has the bits of -1 - id

    def choose_validation(self) -> tuple[int, int]:
        """First and last + 1 of the documents to hold out. A single document is cut in two. Raises UserError."""
        config = self.source.config
        documents = len(self.ends)
        size = self.sizes[-1]
        if self.source.val_files:
            return self.train_documents, documents
        if config.val_documents is not None and config.val_documents < documents:
            return 0, config.val_documents
        if config.val_documents is not None or (
            documents == 1 and config.prompt_column is not None
        ):
            advice = (
                "set a smaller data.val_documents, or data.val_fraction or data.val_path instead"
            )
            raise UserError(
                f"{self.source.name} has too few documents ({documents}) to hold some out; {advice}"
            )
        if documents == 1:
            self.ends.insert(0, int(self.ends[0] * (1 - config.val_fraction)))
            self.sizes.insert(0, int(size * (1 - config.val_fraction)))
            self.hashes.insert(0, EMPTY_HASH)
            return 1, 2
        first = max(1, bisect_right(self.sizes, size - max(1, size * config.val_fraction)))
        share = 1 - self.sizes[first - 1] / size
        if not config.val_fraction / 2 <= share <= 2 * config.val_fraction:
            wanted = f"instead of data.val_fraction={config.val_fraction:g}"
            advice = "because documents are not divided; set data.val_path"
            print_text(f"{share:.1%} of {self.source.name} is held out {wanted}, {advice}")
        return first, documents

    def describe(self, first: int, stop: int) -> dict:
        """The part of the file with documents first to stop - 1, as in meta.json."""
        start, size = (self.ends[first - 1], self.sizes[first - 1]) if first else (0, 0)
        counts = {"tokens": self.ends[stop - 1] - start, "bytes": self.sizes[stop - 1] - size}
        return {
            "file": f"{self.source.name}.bin",
            "start": start,
            **counts,
            "documents": stop - first,
        }


def parallel_map(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Yield function(item) for each item, in order, on all cores. Only a few items are in memory at a time."""
    with ThreadPoolExecutor(
        cpu_count()
    ) as pool:  # tiktoken releases Python's global interpreter lock
        pending = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 2 * cpu_count():
                yield pending.popleft().result()
        yield from (future.result() for future in pending)
