"""Encode a source: convert its documents to a token file (data/token_files.py).

The file has the documents of the source, then the documents of its validation files. If the
tokenizer has an end-of-text token, it follows each document. A split is a range of documents in
the file. All cores encode, in chunks of a million characters.
"""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
import tiktoken

from common.console import ProgressBar, format_si, print_text
from common.errors import UserError
from common.files import atomic_writer
from common.process import cpu_count
from data.config import TokenizerConfig
from data.readers import Piece, iter_pieces
from data.sources import Source
from data.tokenizer import END_OF_TEXT, build_tokenizer, encode, end_of_text, to_spec

CHUNK_CHARS = 2**20  # characters that a thread encodes at a time
# Added to each piece's length, so that a chunk has a limited number of empty documents.
PIECE_OVERHEAD_CHARS = 32


def encode_source(folder: Path, source: Source, config: TokenizerConfig, spec: dict | None) -> dict:
    """Write the token file of a source into a folder.

    config: the tokenizer to build from the text.
    spec: the tokenizer of another run, which is used instead.
    Returns the content of meta.json. Raises UserError.
    """
    tokenizer = build_tokenizer(
        config, iter_texts(source, config.name), source.has_several_documents, spec
    )
    if source.has_several_documents and end_of_text(tokenizer) is None:
        print_text(
            "documents are joined without a separator, because the vocabulary has no "
            f"{END_OF_TEXT} token; a model that should stop needs the vocabulary of a run on "
            "several documents"
        )
    dtype = "uint16" if tokenizer.n_vocab <= 2**16 else "uint32"
    if source.config.prompt_column is not None:
        dtype = "int32"  # see data/token_files.py
    file = TokenFile(source, tokenizer, dtype)
    with atomic_writer(folder / file.name) as out:
        file.write(out)
    meta = {"dtype": dtype, "vocab_size": tokenizer.n_vocab, "tokenizer": to_spec(tokenizer)}
    splits = {split: file.describe(documents) for split, documents in file.hold_out().items()}
    for key in ("tokens", "bytes", "documents"):
        meta[key] = {split: part[key] for split, part in splits.items()}
    for split, part in splits.items():
        meta[split] = [part]  # a list, as in earlier versions
    return meta


def iter_texts(source: Source, tokenizer: str) -> Iterator[str]:
    """Yield the text that a vocabulary is trained on.

    Only char, which needs all characters, also reads the separate validation files.
    """
    splits = [False, True] if tokenizer == "char" else [False]
    for is_validation in splits:
        for chunk in iter_chunks(source, is_validation, "reading"):
            for piece in chunk:
                yield piece.text
    print_text(f"building the {tokenizer} vocabulary")  # silent, and up to a minute for bpe


def iter_chunks(source: Source, is_validation: bool, verb: str) -> Iterator[list[Piece]]:
    """Yield the pieces of a source in lists of about CHUNK_CHARS characters.

    Documents without text and prompt are skipped, except in the default data.

    verb: what the progress bar shows.
    """
    chunk = []
    size = 0
    done = 0
    is_inside = False  # a document that has text
    # The default data has empty files, which runs of earlier versions have as documents.
    keeps_empty = source.config.source == "python_stdlib"
    with ProgressBar(source.text_bytes) as bar:
        for piece in iter_pieces(source, is_validation):
            is_inside = is_inside or piece.text != "" or keeps_empty
            if not is_inside:
                continue
            is_inside = not piece.ends_document
            chunk.append(piece)
            size += len(piece.text) + PIECE_OVERHEAD_CHARS
            done += len(piece.text)
            if size >= CHUNK_CHARS:
                yield chunk
                bar.show(done, f"{verb} {source.config.name}", f"{format_si(done)} characters")
                chunk = []
                size = 0
    if chunk:
        yield chunk


class TokenFile:
    """Writer of a source's token file.

    token_starts: index of the first token of each document, and the number of all tokens.
    byte_starts: likewise, in bytes of text without prompts.
    """

    def __init__(self, source: Source, tokenizer: tiktoken.Encoding, dtype: str):
        self.source = source
        self.name = f"{source.config.name}.bin"
        self.tokenizer = tokenizer
        end = end_of_text(tokenizer)
        self.end_of_text = np.array([] if end is None else [end], np.uint32)
        self.dtype = dtype
        self.token_starts = array("q", [0])
        self.byte_starts = array("q", [0])

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.token_starts) - 1

    def write(self, out: IO[bytes]) -> None:
        """Write all documents. Raises UserError."""
        self._write_documents(out, is_validation=False)
        self.train_documents = len(self)  # the documents of separate validation files follow
        self._write_documents(out, is_validation=True)

    def _write_documents(self, out: IO[bytes], is_validation: bool) -> None:
        tokens = self.token_starts[-1]
        size = self.byte_starts[-1]
        chunks = iter_chunks(self.source, is_validation, "encoding")
        for chunk, values, counts in parallel_map(self.encode_chunk, chunks):
            out.write(values)
            for piece, num_tokens in zip(chunk, counts, strict=True):
                tokens += num_tokens
                if not piece.is_prompt:
                    size += len(piece.text.encode())
                if piece.ends_document:
                    self.token_starts.append(tokens)
                    self.byte_starts.append(size)

    def encode_chunk(self, chunk: list[Piece]) -> tuple[list[Piece], np.ndarray, list[int]]:
        """Encode a chunk. Returns it, the values to store, and the number of tokens per piece."""
        parts: list[np.ndarray] = []
        counts = []
        for piece in chunk:
            ids = encode(self.tokenizer, piece.text, self.source.config.name)
            # as int32, ~ids are the values of a prompt in a token file
            parts.append(~ids if piece.is_prompt else ids)
            counts.append(len(ids))
            if piece.ends_document:
                parts.append(self.end_of_text)
                counts[-1] += len(self.end_of_text)
        return chunk, np.concatenate(parts).astype(self.dtype), counts

    def hold_out(self) -> dict[str, range]:
        """The documents of the splits "train" and "val". Call it once: it cuts a single document.

        Raises UserError if a split has no document.
        """
        config = self.source.config
        if self.source.val_files:
            val = range(self.train_documents, len(self))
        elif config.val_documents is not None:
            val = range(min(config.val_documents, len(self)))
        elif len(self) == 1 and config.prompt_column is None:
            # divide the only document into two
            share = 1 - config.val_fraction  # of the tokens, and roughly of the bytes
            self.token_starts.insert(1, int(self.token_starts[1] * share))
            self.byte_starts.insert(1, int(self.byte_starts[1] * share))
            val = range(1, 2)
        else:
            val = range(self._find_held_out(), len(self))
        train = range(val.stop, len(self)) if val.start == 0 else range(val.start)
        if not train or not val:
            raise UserError(
                f"{self.source.config.name} has too few documents ({len(self)}) to hold some out; "
                "set a smaller data.val_documents, or data.val_fraction or data.val_path instead"
            )
        return {"train": train, "val": val}

    def _find_held_out(self) -> int:
        """The first of the documents to hold out: the last data.val_fraction of the text, or more.

        The first document of all is never held out.
        """
        size = self.byte_starts[-1]
        held_out_size = max(1, size * self.source.config.val_fraction)
        return max(1, bisect_right(self.byte_starts, size - held_out_size) - 1)

    def describe(self, documents: range) -> dict:
        """The part of the file with these documents, as in meta.json."""
        start = self.token_starts[documents.start]
        return {
            "file": self.name,
            "start": start,
            "tokens": self.token_starts[documents.stop] - start,
            "bytes": self.byte_starts[documents.stop] - self.byte_starts[documents.start],
            "documents": len(documents),
        }


def parallel_map(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Yield function(item) for each item, in order, on all cores. Few items are in memory."""
    with ThreadPoolExecutor(cpu_count()) as pool:  # tiktoken releases the global interpreter lock
        pending = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 2 * cpu_count():
                yield pending.popleft().result()
        for future in pending:
            yield future.result()
