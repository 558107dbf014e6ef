"""Text to tokens on disk, once: data/prepared/<name>-<fingerprint>/ holds train.bin, val.bin and meta.json.

The fingerprint covers everything that decides the tokens, so that a changed text is never trained on stale ones.
A folder is written under another name and renamed when it is whole; what has its name can be trusted. Killed at any
moment, the same command goes on behind the last shard that was finished, and comes to the same bytes.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import tiktoken
from filelock import FileLock, Timeout

from common.errors import UserError
from common.files import atomic_write
from data import sources, tokenizer
from data.config import DataConfig, TokenizerConfig
from data.encode import encode_split, token_dtype
from data.files import content_hash
from data.prepared import FORMAT, Prepared, check_length, read_meta
from data.progress import PrepareProgress
from data.shards import SHARD
from data.splits import SplitRange, TextStats, check_no_leakage, plan_splits
from data.text import slice_documents

ROOT = Path("data/prepared")  # below the folder where the command is typed
Say = Callable[[str], None]


def _print(line: str) -> None:
    print(line.encode(errors="replace").decode(), flush=True)  # at once, also into a log; a name may be any bytes


def prepare(
    config: DataConfig, wanted: TokenizerConfig, block_size: int, say: Say = _print,
    spec: dict | None = None, shard: int = SHARD,
) -> Prepared:  # fmt: skip
    """The prepared data that `config` and `wanted` describe, made now if it is not there yet.

    spec: the tokenizer itself, where it is another run's. Raises UserError where the text cannot be read or encoded,
    or has no window of block_size + 1 tokens, and where what was prepared is damaged.
    """
    fingerprint, folder = _place(config, wanted, spec)
    if read_meta(folder) is None:
        with _alone(folder, say):  # where two processes want the same text, one works and the other waits
            if read_meta(folder) is None:
                say(f"preparing {config.label}: {_what(config)} -> {folder}")
                about = {"fingerprint": fingerprint, "shard": shard, "revisions": sources.revisions(config)}
                _make(folder, config, wanted, block_size, say, spec, about)
    meta = read_meta(folder)
    check_length(meta["tokens"], block_size)
    return Prepared(folder, meta, tuple(part.weight for part in config.parts.values()))


def prepare_offline(
    config: DataConfig, wanted: TokenizerConfig, block_size: int, spec: dict | None = None
) -> Prepared | None:
    """As `prepare`, but None where it would take a download, of the text or of the vocabulary. Raises UserError."""
    _, folder = _place(config, wanted, spec)
    remote = any(place.is_remote for place in sources.all_places(config))
    if (remote or tokenizer.needs_download(wanted)) and read_meta(folder) is None:
        return None
    return prepare(config, wanted, block_size, spec=spec)


def _place(config: DataConfig, wanted: TokenizerConfig, spec: dict | None) -> tuple[str, Path]:
    """The fingerprint of all that decides the tokens, and the folder for them."""
    decides = [FORMAT, wanted.name, wanted.vocab_size, spec]
    read = {}
    for name, part in config.parts.items():
        try:
            places, held_out = sources.list_sources(part), sources.held_out(part)
        except UserError as error:
            raise UserError(f"data.mix.{name}: {error}" if config.mix else error) from None
        rest = [part.val_documents, part.val_fraction] if held_out is None else content_hash(held_out, ROOT / ".hashes")
        read[name] = places, held_out
        reads = [part.config, part.revision, part.stream, part.text_column, part.row_is_document, part.max_documents]
        decides.append([name, content_hash(places, ROOT / ".hashes"), rest, reads])
    check_no_leakage(read)
    fingerprint = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:12]
    return fingerprint, ROOT / f"{config.label}-{fingerprint}"


def _what(config: DataConfig) -> str:
    if config.mix:
        return f"{len(config.parts)} text{'s' * (len(config.parts) > 1)} ({', '.join(config.parts)})"
    places = sources.list_sources(config)
    return places[0].address if len(places) == 1 else f"{len(places)} files"


@contextmanager
def _alone(folder: Path, say: Say):
    """No other process is in here with the same folder."""
    locks = ROOT / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / folder.name)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process prepares {folder}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(
    folder: Path, config: DataConfig, wanted: TokenizerConfig, block_size: int, say: Say, spec: dict | None, about: dict
) -> None:
    partial, journal = Path(f"{folder}.partial"), None
    try:
        with PrepareProgress(say) as show:
            journal = _begun(partial, config, about)
            if journal is None:
                parts = plan_splits(config, show)
                encoding = _build(config, wanted, parts, show, spec)
                journal = about | {"parts": [asdict(part) for part in parts], "splits": {}}
                partial.mkdir()
                atomic_write(partial / "tokenizer.json", json.dumps(tokenizer.to_spec(encoding)).encode())
                atomic_write(partial / "journal.json", json.dumps(journal).encode())
            else:
                say("going on where it was stopped")
            parts = [SplitRange.from_plain(each) for each in journal["parts"]]
            _write(partial, config, parts, journal, show)
        if _place(config, wanted, spec)[0] != about["fingerprint"]:
            raise UserError(f"the text of data={config.label} changed while it was read; start again")
        _conclude(partial, config, parts, journal, block_size)
        for name in ("journal.json", "tokenizer.json"):
            (partial / name).unlink()
        partial.rename(folder)
    except KeyboardInterrupt:
        if journal is None:
            raise
        raise KeyboardInterrupt("stopped; the same command goes on behind the last file that is finished") from None
    except BaseException:
        # Of a text that comes from the network what is finished is kept: the network may be back soon.
        under_way = journal is not None and journal["splits"] and not journal["splits"].get("val", {}).get("files")
        if not (under_way and any(place.is_remote for place in sources.all_places(config))):
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _begun(partial: Path, config: DataConfig, about: dict) -> dict | None:
    """The journal of a preparation that was killed; None: there is none to go on with."""
    try:
        journal = json.loads((partial / "journal.json").read_text())
        before, now = journal["revisions"], about["revisions"]
        same = all(now[name] in (None, before[name]) for name in now)  # None: no network to ask
        if same and all(journal[key] == about[key] for key in ("fingerprint", "shard")):
            sources.pin_revisions(config, before)
            return journal
    except (OSError, ValueError, KeyError):
        pass
    shutil.rmtree(partial, ignore_errors=True)
    return None


class _Texts:
    """All texts of all parts, which can be gone through again and again."""

    def __init__(self, config: DataConfig, parts: list[SplitRange], show: PrepareProgress):
        self.config, self.parts, self.show = config, parts, show

    def __iter__(self):
        self.show.begin("reading for the vocabulary", sum(part.characters or 0 for part in self.parts) or None)
        for part in self.parts:
            for text, _ in self.show.through(part.pieces(self.config)):
                yield text


def _build(
    config: DataConfig, wanted: TokenizerConfig, parts: list[SplitRange], show: PrepareProgress, spec: dict | None
) -> tiktoken.Encoding:
    known = all(part.documents is not None for part in parts)
    several = not known or sum(part.documents for part in parts if not part.continues) > 1
    characters = sum(part.characters for part in parts) if known else None
    encoding = tokenizer.build(tokenizer.Corpus(_Texts(config, parts, show), several, characters), wanted, spec)
    if several and tokenizer.end_of_text(encoding) is None:
        show.say(f"documents follow one another unmarked, as the tokenizer of run {wanted.run} has no "
                 f"{tokenizer.END_OF_TEXT}: it was made of one text")  # fmt: skip
    return encoding


def _write(partial: Path, config: DataConfig, parts: list[SplitRange], journal: dict, show: PrepareProgress) -> None:
    """Encode all parts into the folder, behind the shards that the journal has."""
    encoding = tokenizer.from_spec(json.loads((partial / "tokenizer.json").read_text()))
    for split in ("train", "val"):
        encode_split(partial, split, config, [part for part in parts if part.split == split], encoding, journal, show)


def _conclude(partial: Path, config: DataConfig, parts: list[SplitRange], journal: dict, block_size: int) -> None:
    """Write meta.json. Raises UserError where there is too little text."""
    splits, spec = journal["splits"], json.loads((partial / "tokenizer.json").read_text())
    encoding = tokenizer.from_spec(spec)
    tokens = {split: sum(splits[split]["ranges"][name][1] for name in config.parts) for split in splits}
    check_length(tokens, block_size)
    empty = [name for name in config.parts if not splits["train"]["ranges"][name][1]]
    if empty:
        raise UserError(f"data.mix.{empty[0]} has no text to train on; leave it out, or name a longer one")
    meta = {
        "format": FORMAT,
        "fingerprint": journal["fingerprint"],
        "dtype": token_dtype(encoding),
        "vocab_size": encoding.n_vocab,
        "shard": journal["shard"],
        "tokens": tokens,
        "files": {name: file for split in splits.values() for name, file in split["files"].items()},
        "bytes": {split: splits[split]["bytes"] for split in splits},
        "documents": {split: splits[split]["documents"] for split in splits},
        "longest": max(splits[split]["longest"] for split in splits),
        "source": {
            "name": config.label,
            "what": _what(config),
            "revisions": journal["revisions"],
            "documents": sum(splits[split]["documents"] for split in splits) - sum(part.continues for part in parts),
        },
        "parts": [{"name": name} | {split: splits[split]["ranges"][name] for split in splits} for name in config.parts],
        "tokenizer": spec,
    }
    atomic_write(partial / "meta.json", json.dumps(meta).encode())


def check_short_text(config: DataConfig, wanted: TokenizerConfig, block_size: int) -> None:
    """check_length, ahead of everything, where it is quick: a small file of one's own is tokenized here and now.

    A table is not: its reader takes as long to import as torch, and its size says little about its text's.
    """
    for part in config.parts.values():
        if part.val_path is not None:
            sources.held_out(part)
        places = sources.list_sources(part) if part.path is not None else []
    if config.mix or len(places) != 1 or places[0].kind != "text" or places[0].is_compressed:
        return
    size = os.path.getsize(places[0].address)
    if size > 64 * 1024:
        check_length({"train": size, "val": 2}, block_size)  # a token is a byte at the least
    elif wanted.name != "run" and config.val_path is None:
        pieces = list(sources.iter_text(places, config))
        if not pieces[0][0]:
            raise UserError(f"{places[0].address} holds no text; set data.path to a file that does")
        cut, _ = TextStats().add(pieces).find_val_cut(config.val_fraction)
        encoding = tokenizer.build(tokenizer.Corpus([pieces[0][0]], several=False), wanted)
        splits = {"train": slice_documents(pieces, (0, 0), cut), "val": slice_documents(pieces, cut, None)}
        counts = {name: sum(len(tokenizer.encode(encoding, text)) for text, _ in part) for name, part in splits.items()}
        check_length(counts, block_size)
