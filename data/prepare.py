"""Text to tokens on disk, once: data/prepared/<name>-<fingerprint>/ holds train.bin, val.bin and meta.json.

The fingerprint covers everything that decides the tokens, so that a changed text is never trained on stale ones.
A folder is written under another name and renamed when it is whole; what has its name can be trusted.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tiktoken
from filelock import FileLock

from data import sources, tokenizer
from data.config import DataConfig, TokenizerConfig
from errors import UserError

FORMAT = 1
ROOT = Path("data/prepared")  # below the folder where the command is typed


@dataclass(frozen=True)
class Prepared:
    """Tokens on disk. meta: format, fingerprint, dtype, counts, tokenizer spec, source, sha256 of the files."""

    folder: Path
    meta: dict

    @property
    def encoding(self) -> tiktoken.Encoding:
        return tokenizer.from_spec(self.meta["tokenizer"])

    def tokens(self, split: str) -> np.ndarray:
        """The ids of "train" or "val", memory-mapped and read-only."""
        return np.memmap(self.folder / f"{split}.bin", dtype=self.meta["dtype"], mode="r")


def prepare(
    config: DataConfig, wanted: TokenizerConfig, block_size: int, say: Callable[[str], None] = print
) -> Prepared:
    """The prepared data that `config` and `wanted` describe, made now if it is not there yet.

    Raises UserError where the text cannot be read or encoded, or has no window of block_size + 1 tokens.
    """
    files = sources.files(config)
    fingerprint, folder = _place(files, config, wanted)
    if _read_meta(folder) is None:
        ROOT.mkdir(parents=True, exist_ok=True)
        with FileLock(ROOT / ".lock"):  # where two processes want the same text, one works and the other waits
            if _read_meta(folder) is None:
                what = files[0] if len(files) == 1 else f"{len(files)} files"
                say(f"preparing {config.name}: {what} -> {folder}")
                documents = sources.read(files, config)
                encoding = tokenizer.build(documents, wanted)
                splits = {
                    split: _encode_all(encoding, texts)
                    for split, texts in split_documents(documents, config.val_fraction).items()
                }
                check_length({split: len(ids) for split, ids in splits.items()}, block_size)
                source = {"name": config.name, "files": len(files), "first": files[0], "documents": len(documents)}
                _write(folder, splits, encoding, {"fingerprint": fingerprint, "source": source})
    meta = _read_meta(folder)
    check_length(meta["tokens"], block_size)
    return Prepared(folder, meta)


def prepare_offline(config: DataConfig, wanted: TokenizerConfig, block_size: int) -> Prepared | None:
    """As `prepare`, but None where it would take a download, of the text or of the vocabulary. Raises UserError."""
    files = sources.files(config)
    _, folder = _place(files, config, wanted)
    download = any(map(sources.is_remote, files)) or wanted.name in tokenizer.DOWNLOADED
    return None if download and _read_meta(folder) is None else prepare(config, wanted, block_size)


def _place(files: list[str], config: DataConfig, wanted: TokenizerConfig) -> tuple[str, Path]:
    """The fingerprint of all that decides the tokens, and the folder for them."""
    decides = [FORMAT, sources.digest(files, config), asdict(wanted), config.val_fraction]
    fingerprint = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:12]
    return fingerprint, ROOT / f"{config.name}-{fingerprint}"


def _read_meta(folder: Path) -> dict | None:
    """meta.json of a prepared folder; None where it is missing or the token files are not as long as it says."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        sizes = {split: (folder / f"{split}.bin").stat().st_size for split in meta["tokens"]}
        wanted = {split: count * np.dtype(meta["dtype"]).itemsize for split, count in meta["tokens"].items()}
    except (OSError, ValueError, KeyError):
        return None
    return meta if sizes == wanted else None


def split_documents(documents: Sequence[str], val_fraction: float) -> dict[str, list[str]]:
    """The end is for validation: whole documents where there are several, else the last characters of the one."""
    if len(documents) == 1:
        cut = int(len(documents[0]) * (1 - val_fraction))
        return {"train": [documents[0][:cut]], "val": [documents[0][cut:]]}
    wanted, first = sum(map(len, documents)) * val_fraction, len(documents) - 1
    held_out = len(documents[first])
    while first > 1 and held_out < wanted:
        first -= 1
        held_out += len(documents[first])
    return {"train": list(documents[:first]), "val": list(documents[first:])}


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


def check_short_text(config: DataConfig, wanted: TokenizerConfig, block_size: int) -> None:
    """check_length, ahead of everything, where it is quick: a small file of one's own is tokenized here and now.

    A table is not: its reader takes as long to import as torch, and its size says little about its text's.
    """
    if config.path is None:
        return
    (file,) = sources.files(config)
    if sources.is_table(file):
        return
    size = os.path.getsize(file)
    if size > 64 * 1024:
        check_length({"train": size, "val": 2}, block_size)  # a token is a byte at the least
        return
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(sources.where_not_utf8([file], error)) from None
    if not text:
        raise UserError(f"{file} holds no text; set data.path to a file that does")
    splits = split_documents([text], config.val_fraction)
    encoding = tokenizer.build([text], wanted)
    check_length({name: len(_encode_all(encoding, texts)) for name, texts in splits.items()}, block_size)


def _encode_all(encoding: tiktoken.Encoding, documents: Sequence[str]) -> np.ndarray:
    """Ids of all documents end to end, each followed by the end-of-text token where there are several."""
    end = tokenizer.end_of_text(encoding)
    parts = []
    for document in documents:
        parts.append(tokenizer.encode(encoding, document))
        if end is not None:
            parts.append(np.array([end], dtype=np.uint32))
    return np.concatenate(parts)


def _write(folder: Path, splits: dict[str, np.ndarray], encoding: tiktoken.Encoding, about: dict) -> None:
    dtype = "uint16" if encoding.n_vocab <= 2**16 else "uint32"
    partial = Path(f"{folder}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    sha256 = {}
    for split, ids in splits.items():
        if ids.max() >= encoding.n_vocab:  # a cast to uint16 would wrap it silently into another token
            raise ValueError(f"token {ids.max()} lies outside the vocabulary of {encoding.n_vocab}")
        raw = ids.astype(dtype).tobytes()
        _write_whole(partial / f"{split}.bin", raw)
        sha256[split] = hashlib.sha256(raw).hexdigest()
    meta = about | {
        "format": FORMAT,
        "dtype": dtype,
        "vocab_size": encoding.n_vocab,
        "tokens": {split: len(ids) for split, ids in splits.items()},
        "sha256": sha256,
        "tokenizer": tokenizer.to_spec(encoding),
    }
    _write_whole(partial / "meta.json", json.dumps(meta).encode())
    shutil.rmtree(folder, ignore_errors=True)  # a damaged one, or it would have been used
    partial.rename(folder)


def _write_whole(path: Path, content: bytes) -> None:
    with open(path, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
