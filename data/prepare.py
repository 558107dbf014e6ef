"""Prepare data: convert text to token files in data/prepared/<name>-<fingerprint>/, once per text and tokenizer.

    config -> text sources -> split plan -> tokenizer -> token files -> meta.json

The fingerprint is a hash of everything that determines the tokens, so a changed text gets a new folder. A folder is
written as <folder>.partial and renamed when it is complete.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import tiktoken
from filelock import FileLock, Timeout

from common.console import ProgressBar
from common.errors import UserError
from common.files import write_json
from data import tokenizer as tokenizers
from data.config import DataConfig, TokenizerConfig
from data.encode import Journal, encode_split, token_dtype
from data.shards import FORMAT, PreparedData, check_length, read_meta, verify
from data.sources import TextSource, all_files, find_commits, hash_cache, hash_content, pin_commits, resolve_sources
from data.splits import SplitPlan, check_no_leakage, plan_splits, show_progress

PREPARED = Path("data/prepared")  # below the current folder
HASHES = PREPARED / ".hashes"  # see hash_cache
MAX_PARTIAL_AGE_S = 7 * 24 * 3600


def print_line(line: str) -> None:
    print(line.encode(errors="replace").decode(), flush=True)  # file names can contain invalid Unicode


@dataclass(frozen=True)
class Preparation:
    """What to prepare, resolved from the config. spec: tokenizer of another run. If None, a tokenizer is built."""

    label: str
    sources: list[TextSource]
    tokenizer_config: TokenizerConfig
    spec: dict | None
    fingerprint: str

    @classmethod
    def from_config(cls, config: DataConfig, tokenizer_config: TokenizerConfig, spec: dict | None) -> "Preparation":
        """List and hash all files. Raises UserError if a file is missing, or is in both splits."""
        sources = resolve_sources(config)
        check_no_leakage(sources)
        return cls(config.label, sources, tokenizer_config, spec, compute_fingerprint(sources, tokenizer_config, spec))

    @property
    def folder(self) -> Path:
        return PREPARED / f"{self.label}-{self.fingerprint}"

    @property
    def input(self) -> str:
        if len(self.sources) > 1:
            return f"{len(self.sources)} sources ({', '.join(source.name for source in self.sources)})"
        files = self.sources[0].files
        return files[0].address if len(files) == 1 else f"{len(files)} files"

    @property
    def is_remote(self) -> bool:
        return any(file.is_remote for file in all_files(self.sources))


def compute_fingerprint(sources: list[TextSource], tokenizer_config: TokenizerConfig, spec: dict | None) -> str:
    """Hash of everything that determines the tokens."""
    content = [FORMAT, tokenizer_config.name, tokenizer_config.vocab_size, spec]
    for s in sources:
        split = [s.val_documents, s.val_fraction] if s.val_files is None else hash_content(s.val_files, HASHES)
        reading = [s.hub_config, s.revision, s.stream, s.text_column, s.row_is_document, s.max_documents]
        reading += [] if s.prompt_column is None else [s.prompt_column]
        content.append([s.name, hash_content(s.files, HASHES), split, reading])
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def prepare(
    config: DataConfig, tokenizer_config: TokenizerConfig, block_size: int, spec: dict | None = None
) -> PreparedData:
    """Prepare the data of a config, unless this was done before. Returns the prepared data.

    spec: tokenizer of another run. Raises UserError if the text cannot be read or encoded or is shorter than one window
    of block_size + 1 tokens, and if prepared files are damaged.
    """
    return _prepare(Preparation.from_config(config, tokenizer_config, spec), block_size)


def prepare_offline(
    config: DataConfig, tokenizer_config: TokenizerConfig, block_size: int, spec: dict | None = None
) -> PreparedData | None:
    """Like `prepare`, but returns None instead of downloading the text or the vocabulary. Raises UserError."""
    prep = Preparation.from_config(config, tokenizer_config, spec)
    needs_network = prep.is_remote or tokenizers.needs_download(tokenizer_config)
    return None if needs_network and read_meta(prep.folder) is None else _prepare(prep, block_size)


def _prepare(prep: Preparation, block_size: int) -> PreparedData:
    is_new = False
    if read_meta(prep.folder) is None:
        with _lock(prep.folder):
            if read_meta(prep.folder) is None:  # not finished by another process in the meantime
                print_line(f"preparing {prep.label}: {prep.input} -> {prep.folder}")
                _write_folder(prep, block_size)
                is_new = True
    prepared = PreparedData(prep.folder, read_meta(prep.folder), tuple(source.weight for source in prep.sources))
    if not is_new:
        with hash_cache(HASHES) as known:
            verify(prepared, known)
    check_length(prepared.meta["tokens"], block_size)
    return prepared


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Context manager: only one process at a time prepares a folder; the others wait."""
    path = PREPARED / ".locks" / folder.name
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        acquired_lock = lock.acquire(timeout=0)
    except Timeout:
        print_line(f"waiting for another process that is preparing {folder}")
        acquired_lock = lock.acquire()
    with acquired_lock:
        try:
            yield
        finally:
            with suppress(OSError):  # Windows does not remove an open file
                path.unlink()


def _remove_old_partial_folders(partial: Path) -> None:
    """Remove the folders, except `partial`, of preparations that were interrupted a week ago."""
    for folder in set(PREPARED.glob("*.partial")) - {partial}:
        with suppress(OSError):  # another process resumes it (Timeout) or removes it
            if time.time() - folder.stat().st_mtime > MAX_PARTIAL_AGE_S:
                with FileLock(PREPARED / ".locks" / folder.stem, timeout=0):
                    shutil.rmtree(folder)


def _write_folder(prep: Preparation, block_size: int) -> None:
    partial = Path(f"{prep.folder}.partial")
    _remove_old_partial_folders(partial)
    keeps_files = False  # whether finished files are kept after an error
    try:
        with ProgressBar() as bar:
            sources, journal = _load_or_start_journal(prep, partial, bar)
            keeps_files = prep.is_remote  # the network may work again later
            try:
                for split in journal.splits:
                    encode_split(partial, split, sources, journal, bar)
            except KeyboardInterrupt:
                raise KeyboardInterrupt("stopped; the same command resumes after the last finished file") from None
            keeps_files = False
        if compute_fingerprint(prep.sources, prep.tokenizer_config, prep.spec) != prep.fingerprint:
            raise UserError(f"the text of data={prep.label} changed while it was read; run the same command again")
        write_json(partial / "meta.json", _make_meta(prep, journal, block_size))
        (partial / "journal.json").unlink()
        partial.rename(prep.folder)
    except Exception:
        if not keeps_files:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _load_or_start_journal(prep: Preparation, partial: Path, bar: ProgressBar) -> tuple[list[TextSource], Journal]:
    """Returns the sources at their commits, and the journal of an interrupted preparation or a new one."""
    commits = find_commits(prep.sources)
    journal = Journal.load(partial)
    if journal is not None and journal.can_resume(prep.fingerprint, commits):
        print_line("resuming an interrupted preparation after its last finished file")
        return pin_commits(prep.sources, journal.commits), journal
    shutil.rmtree(partial, ignore_errors=True)
    sources = pin_commits(prep.sources, commits)
    plan = plan_splits(sources, bar)
    spec = tokenizers.to_spec(_build_tokenizer(prep, sources, plan, bar))
    journal = Journal(prep.fingerprint, commits, spec, plan.ranges)
    partial.mkdir()
    journal.save(partial)
    return sources, journal


def _build_tokenizer(
    prep: Preparation, sources: list[TextSource], plan: SplitPlan, bar: ProgressBar
) -> tiktoken.Encoding:
    def iter_texts() -> Iterator[str]:
        by_name = {source.name: source for source in sources}
        pieces = (piece for part in plan.ranges for piece in part.iter_text(by_name[part.source]))
        yield from (text for text, *_ in show_progress(pieces, bar, "reading for the vocabulary"))

    has_several_documents = plan.documents != 1  # None: a stream, which can have any number
    corpus = tokenizers.Corpus(iter_texts(), has_several_documents, plan.characters)
    tokenizer = tokenizers.build_tokenizer(corpus, prep.tokenizer_config, prep.spec)
    if has_several_documents and tokenizers.end_of_text(tokenizer) is None:
        bar.print(
            f"the tokenizer of run {prep.tokenizer_config.run} has no {tokenizers.END_OF_TEXT} token, so documents are "
            "joined without a separator"
        )
    return tokenizer


def _make_meta(prep: Preparation, journal: Journal, block_size: int) -> dict:
    """The content of meta.json. Raises UserError if there is too little text."""
    train, val = journal.splits["train"], journal.splits["val"]
    tokenizer = tokenizers.from_spec(journal.tokenizer)
    tokens = {"train": sum(train.tokens.values()), "val": sum(val.tokens.values())}
    check_length(tokens, block_size)
    for source in prep.sources:
        if not train.tokens[source.name]:
            raise UserError(f"data.mix.{source.name} has no training text; remove it, or use a longer text")
    divided = sum(part.ends_within_document for part in journal.ranges)  # counted in both splits
    return {
        "format": FORMAT,
        "fingerprint": prep.fingerprint,
        "dtype": token_dtype(tokenizer, prep.sources),
        "vocab_size": tokenizer.n_vocab,
        "tokens": tokens,
        "bytes": {"train": train.bytes, "val": val.bytes},
        "documents": {"train": train.documents, "val": val.documents},
        "files": train.files | val.files,
        "source": {
            "name": prep.label,
            "input": prep.input,
            "commits": journal.commits,
            "documents": train.documents + val.documents - divided,
        },
        "mix": [{"name": s.name, "train": train.tokens[s.name], "val": val.tokens[s.name]} for s in prep.sources],
        "tokenizer": journal.tokenizer,
    }
