"""Prepare data: convert text to token files in data/prepared/<name>-<fingerprint>/.

This is done once per text and tokenizer. The fingerprint is a hash of everything that determines
the tokens, so a changed text gets a new folder. The folder has a token file (data/token_files.py),
and meta.json with the tokenizer and the range of each split in the file.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from common.console import pluralize, print_text
from common.errors import UserError
from common.files import new_folder, read_file, write_json
from data.config import DataConfig, TokenizerConfig
from data.encode import encode_source
from data.sources import hash_source, is_remote, resolve_source
from data.token_files import Tokens, to_token_ids
from data.tokenizer import END_OF_TEXT, OPENAI_SIZES, Tokenizer, find_start_token, from_spec

FORMAT = 5  # of prepared folders; a part of the fingerprint
START_TOKENS = 2**20  # of the training text, in which the token before a document is searched
PREPARED = Path("data/prepared")  # below the current folder


@dataclass(frozen=True)
class PreparedData:
    """A prepared folder. meta: the content of meta.json. text_hash: equal for all tokenizers."""

    folder: Path
    meta: dict
    text_hash: str

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return from_spec(self.meta["tokenizer"])

    @cached_property
    def train(self) -> Tokens:
        return Tokens(self.folder, self.meta, "train")

    @cached_property
    def val(self) -> Tokens:
        return Tokens(self.folder, self.meta, "val")


def prepare(
    config: DataConfig,
    tokenizer: TokenizerConfig,
    block_size: int,
    spec: dict | None = None,
    offline: bool = False,
) -> PreparedData | None:
    """Prepare the data of a config, unless this was done before.

    spec: the tokenizer of another run.
    offline: return None instead of downloading the text or the vocabulary.
    Raises UserError if the text cannot be read or encoded, or is shorter than a window, or if
    prepared files are damaged.
    """
    source = resolve_source(config)
    if spec is not None:
        # the start token of the other run was chosen for its own text
        spec = spec.copy()
        spec.pop("start", None)
    text_hash = hash_source(source)
    fingerprint = hash_json([FORMAT, tokenizer.name, tokenizer.vocab_size, spec, text_hash])
    folder = PREPARED / f"{config.name}-{fingerprint}"
    if not folder.exists():
        files = source.files + source.val_files
        if offline and (tokenizer.name in OPENAI_SIZES or any(map(is_remote, files))):
            return None
        # another process can have finished the folder in the meantime
        with suppress(FileExistsError), new_folder(folder) as unfinished:
            meta = {"name": config.name, "fingerprint": fingerprint}
            print_text(f"preparing {config.name}: {pluralize(len(files), 'file')} -> {folder}")
            meta |= encode_source(unfinished, source, tokenizer, spec)
            write_json(unfinished / "meta.json", meta | {"checksum": hash_json(meta)})
    prepared = PreparedData(folder, read_meta(folder), text_hash)
    _check_lengths(prepared, block_size)
    saved_spec = prepared.meta["tokenizer"]
    if END_OF_TEXT not in saved_spec["special"]:
        saved_spec["start"] = find_start_token(
            saved_spec, to_token_ids(prepared.train[:START_TOKENS])
        )
    return prepared


def hash_json(content: list | dict) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def read_meta(folder: Path) -> dict:
    """Read meta.json of a prepared folder, and check its checksum and the sizes of the token files.

    Raises UserError if a file is damaged or missing.
    """

    def parse(content: bytes) -> dict:
        meta = json.loads(content)
        checksum = meta.pop("checksum", None)
        files = {part["file"] for part in meta["train"] + meta["val"]}
        size = sum((folder / file).stat().st_size for file in files)
        expected_size = sum(meta["tokens"].values()) * np.dtype(meta["dtype"]).itemsize
        if checksum not in (None, hash_json(meta)) or size != expected_size:  # None: old version
            raise ValueError("wrong checksum or size")
        return meta

    return read_file(
        folder / "meta.json", parse, f"remove {folder}, and run the same command again"
    )


def _check_lengths(prepared: PreparedData, block_size: int) -> None:
    """Raise UserError unless there is a training window, and a validation target with text."""
    train = prepared.meta["tokens"]["train"]
    val = prepared.meta["tokens"]["val"]
    val_bytes = prepared.meta["bytes"]["val"]
    if train <= block_size or val < 2 or val_bytes == 0:
        raise UserError(
            f"{train} training tokens and {val} validation tokens of {val_bytes} bytes of text are "
            f"too few: at least model.block_size + 1 = {block_size + 1}, 2 and 1 are needed; use a "
            "longer text, hold out another part, or set a smaller model.block_size or "
            "tokenizer.vocab_size"
        )
