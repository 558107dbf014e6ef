"""Prepare data: convert text to token files in data/prepared/<name>-<fingerprint>/, once per text and tokenizer.

The fingerprint is a hash of everything that determines the tokens, so a changed text gets a new folder. SOURCE.bin has
the token ids of a source: little-endian uint16, or uint32 for a vocabulary of more than 65,536 tokens, or int32 with
prompts, whose tokens are stored as ~id. meta.json has the range of each split in each file.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from common.console import print_text
from common.errors import TrainingFailed, UserError
from common.files import new_folder, write_json
from data.config import DataConfig, TokenizerConfig
from data.encode import encode_sources
from data.sources import hash_sources, is_remote, resolve_sources
from data.tokenizer import END_OF_TEXT, OPENAI_SIZES, Tokenizer, find_start_token, from_spec

FORMAT = 5  # of prepared folders; a part of the fingerprint
START_TOKENS = 2**20  # of the training text, in which the token before a document is searched
PREPARED = Path("data/prepared")  # below the current folder


class Tokens:
    """Token ids in parts of files. tokens[a:b] reads them; mapped pages would count as memory of this process."""

    def __init__(self, folder: Path, meta: dict, parts: list[dict]):
        self.folder, self.parts = folder, parts
        self.dtype, self.vocab_size = np.dtype(meta["dtype"]), meta["vocab_size"]
        self.starts = [
            0,
            *accumulate(part["tokens"] for part in parts),
        ]  # of the parts, and the end of the last one

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        pieces = [np.empty(0, self.dtype)]
        for first, part in zip(self.starts, self.parts, strict=False):
            skipped = max(0, start - first)
            count = min(stop - first, part["tokens"]) - skipped
            if count > 0:
                path, offset = (
                    self.folder / part["file"],
                    (part["start"] + skipped) * self.dtype.itemsize,
                )
                ids = np.fromfile(path, self.dtype, count, offset=offset)
                if len(ids) < count or ids.max() >= self.vocab_size or ids.min() < -self.vocab_size:
                    raise TrainingFailed(
                        f"{path} is damaged; remove its folder, and run the same command again"
                    )
                pieces.append(ids)
        return np.concatenate(pieces)

    def read_ring(self, start: int, count: int) -> np.ndarray:
        """Read `count` tokens from `start`. The first token follows the last one."""
        ids = self[start % len(self) : start % len(self) + count]
        while len(ids) < count:
            ids = np.concatenate([ids, self[: count - len(ids)]])
        return ids


@dataclass(frozen=True)
class PreparedData:
    """A prepared folder. meta: the content of meta.json. weights: the weight of each source in a mix."""

    folder: Path
    meta: dict
    weights: tuple[float, ...] = (1.0,)

    @property
    def tokenizer(self) -> Tokenizer:
        return from_spec(self.meta["tokenizer"])

    @property
    def train(self) -> list[Tokens]:  # of each source
        return [Tokens(self.folder, self.meta, [part]) for part in self.meta["train"]]

    @property
    def val(self) -> Tokens:  # of all sources
        return Tokens(self.folder, self.meta, self.meta["val"])


def prepare(
    config: DataConfig,
    tokenizer: TokenizerConfig,
    block_size: int,
    spec: dict | None = None,
    offline: bool = False,
) -> PreparedData | None:
    """Prepare the data of a config, unless this was done before.

    spec: tokenizer of another run. offline: return None instead of downloading the text or the vocabulary.
    Raises UserError if the text cannot be read or encoded, is shorter than a window, or if prepared files are damaged.
    """
    sources = resolve_sources(config)
    if spec is not None:  # of another run; the start is chosen for this text
        spec = {key: value for key, value in spec.items() if key != "start"}
    content = [FORMAT, tokenizer.name, tokenizer.vocab_size, spec, hash_sources(sources)]
    folder = PREPARED / f"{config.name}-{hash_json(content)}"
    if not folder.exists():
        files = [file for source in sources for file in source.files + source.val_files]
        if offline and (tokenizer.name in OPENAI_SIZES or any(map(is_remote, files))):
            return None
        # another process can have finished it in the meantime
        with suppress(FileExistsError), new_folder(folder) as unfinished:
            text = f"{len(files):,} files" if len(files) > 1 else files[0]
            print_text(f"preparing {config.name}: {text} -> {folder}")
            meta = {"name": config.name, "fingerprint": hash_json(content)}
            meta |= encode_sources(unfinished, sources, tokenizer, spec)
            if hash_sources(sources) != content[-1]:
                raise UserError(
                    f"the text of {config.name} changed while it was read; run the command again"
                )
            write_json(unfinished / "meta.json", meta | {"checksum": hash_json(meta)})
    prepared = PreparedData(
        folder, read_meta(folder), tuple(source.config.weight for source in sources)
    )
    train, val = prepared.meta["tokens"]["train"], prepared.meta["tokens"]["val"]
    if train < block_size + 1 or val < 2 or not all(map(len, prepared.train)):
        shorter = f"set model.block_size={train - 1}, or " if 2 < train <= block_size else ""
        needed = f"model.block_size + 1 = {block_size + 1} and 2"
        longer = "use a longer text"
        if (
            tokenizer.name == "bpe"
        ):  # the vocabulary of a text with many repetitions has long tokens
            longer += ", a smaller tokenizer.vocab_size, or tokenizer=char"
        raise UserError(
            f"{train} training and {val} validation tokens are below {needed}; {shorter}{longer}"
        )
    spec = prepared.meta["tokenizer"]
    if END_OF_TEXT not in spec["special"]:
        ids = prepared.train[0][:START_TOKENS].astype(np.int64)
        spec["start"] = find_start_token(spec, np.maximum(ids, ~ids))  # ~id: a token of a prompt
    return prepared


def hash_json(content: list | dict) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def read_meta(folder: Path) -> dict:
    """Read meta.json of a prepared folder, and check the sizes of its files. Raises UserError if one is damaged."""
    with suppress(Exception):  # a damaged file can raise anything
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        checksum, files = (
            meta.pop("checksum", None),
            {part["file"] for part in meta["train"] + meta["val"]},
        )
        size = (
            sum((folder / file).stat().st_size for file in files) / np.dtype(meta["dtype"]).itemsize
        )
        if checksum in (None, hash_json(meta)) and size == sum(
            meta["tokens"].values()
        ):  # None: an earlier version
            return meta
    raise UserError(
        f"{folder} has damaged or missing files; remove the folder, and run the same command again"
    )
