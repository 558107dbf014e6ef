"""Tokens on disk, as they are found: a folder with train.bin, val.bin and meta.json, made by data/prepare.py."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

from common.errors import UserError
from data import tokenizer
from data.shards import ShardedTokens

FORMAT = 2


@dataclass(frozen=True)
class Prepared:
    """Tokens on disk. meta: what meta.json says of them. weights: of each of the texts in meta["parts"], in a mix."""

    folder: Path
    meta: dict
    weights: tuple[float, ...] = (1.0,)

    @property
    def encoding(self) -> tiktoken.Encoding:
        return tokenizer.from_spec(self.meta["tokenizer"])

    def tokens(self, split: str) -> ShardedTokens:
        """The ids of "train" or "val"."""
        return ShardedTokens(self.folder, split, self.meta["tokens"][split], self.meta["shard"], self.meta["dtype"])

    @property
    def train_parts(self) -> list[tuple[int, int]]:
        """Where the ids of each text are in "train": (first, how many)."""
        return [tuple(part["train"]) for part in self.meta["parts"]]


def read_meta(folder: Path) -> dict | None:
    """meta.json of a prepared folder; None where there is none. Raises UserError where it, or a file, is damaged."""
    if not folder.exists():
        return None
    anew = f"remove that folder ({folder}), and it is made anew"
    try:
        meta = json.loads((folder / "meta.json").read_text())
        found = meta["format"]
        sizes = (
            {}
            if found != FORMAT
            else {
                folder / name: file["tokens"] * np.dtype(meta["dtype"]).itemsize for name, file in meta["files"].items()
            }
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"{folder / 'meta.json'} is missing or damaged; {anew}") from None
    if found != FORMAT:
        whose = "a newer trilGPT" if isinstance(found, int) and found > FORMAT else "another trilGPT"
        raise UserError(f"{folder / 'meta.json'} has format {found}, of {whose}; use that one, or {anew}")
    for path, size in sizes.items():
        has = path.stat().st_size if path.exists() else 0
        if has != size:
            raise UserError(f"{path} has {has:,} bytes where {size:,} were written; {anew}")
    return meta


def verify(prepared: Prepared) -> str:
    """Reads all of the token files, and says so. Raises UserError where one is not what was written."""
    for name, file in prepared.meta["files"].items():
        with open(prepared.folder / name, "rb") as f:
            if hashlib.file_digest(f, "sha256").hexdigest() != file["sha256"]:
                raise UserError(
                    f"{prepared.folder / name} was altered since it was written (its hash is another); remove that "
                    f"folder ({prepared.folder}), and it is made anew"
                )
    return f"verified: {', '.join(prepared.meta['files'])} are what was written"


def check_length(tokens: dict[str, int], block_size: int) -> None:
    """Raises UserError where a split of so many tokens cannot fill one window, or has nothing to predict."""
    if tokens["train"] < block_size + 1:
        shorter = f"set model.block_size={tokens['train'] - 1}, or " if tokens["train"] > 2 else ""
        raise UserError(
            f"the training text has {tokens['train']} tokens, and one window takes model.block_size + 1 = "
            f"{block_size + 1}; {shorter}use a longer text or smaller tokens (tokenizer=char)"
        )
    if tokens["val"] < 2:
        raise UserError(
            f"the validation text has {tokens['val']} tokens, too few to predict one; set a larger "
            "data.val_fraction, or use a longer text"
        )
