"""Config of the data and the tokenizer: each key has its type, default, limits and meaning."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.settings import Rule, check_path_component, setting

HUB_KEYS = ("repo", "config", "split", "revision", "val_split", "stream")
MAX_COUNT = 10**15


@dataclass
class DataConfig:
    """What to read, and what to hold out for validation."""

    name: str = "text"
    source: str = "text"  # function in data/sources.py
    # Files to read instead of the source: a file, a folder, a pattern such as texts/*.txt, a URL,
    # or a list of them.
    path: Any = None
    # source=hub: data set of the Hugging Face hub, its configuration (None: its default), split and
    # revision (None: the main branch).
    repo: str | None = None
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    stream: bool = False  # source=hub: read from the network on demand, without a copy on the disk
    # Column of a table (hub data set, .parquet, .jsonl, .csv, .tsv) that contains the text.
    text_column: str = "text"
    # Column of prompts, which text_column completes. Prompts are never targets.
    prompt_column: str | None = None
    # Each row of a table is a document. False: a table is one document.
    row_is_document: bool = True
    # String between the documents of a text file, such as \\n. None: a file is one document.
    separator: str | None = None
    max_documents: int | None = setting(None, 1, MAX_COUNT)  # None reads all
    # Held out for validation, by the first of these keys that is set: separate files, a separate
    # split of a hub data set, a number of documents from the start, or the last fraction of the
    # text, in complete documents.
    val_path: Any = None
    val_split: str | None = None
    val_documents: int | None = setting(None, 1, MAX_COUNT)
    val_fraction: float = setting(0.1, above=0, below=1)
    # Approximate size of a text that is not on this machine.
    text_bytes: int | None = setting(None, 1, MAX_COUNT)
    # Tokens attend only to their own document, and positions restart with it.
    document_mask: bool = False

    @property
    def label(self) -> str:
        """Name that is shown. A local file or folder that replaces a remote data set has its own.

        `name` stays, because it is a part of fingerprints.
        """
        is_remote = self.text_bytes or self.repo
        if not is_remote or not isinstance(self.path, str) or ":" in self.path:  # URL, or hub:
            return self.name
        name = re.sub(r"(\.[A-Za-z]\w*)+$", "", Path(self.path).name)  # .txt.gz
        # it is also a part of the run's name
        return name if re.fullmatch(r"\w[\w.-]{0,59}", name, re.ASCII) else self.name

    def rules(self, section: str) -> Iterator[Rule]:
        check_path_component(f"{section}.name", self.name)
        for key in HUB_KEYS:
            is_valid = self.source == "hub" or not getattr(self, key)
            yield key, is_valid, "works only with data=hub; set both or neither"
        is_document = self.row_is_document and self.prompt_column != self.text_column
        yield (
            "prompt_column",
            is_document or self.prompt_column is None,
            "needs another column as text_column, and row_is_document=true; or set null",
        )
        yield "separator", self.separator != "", "must not be empty; set a string, or null"
        has_path = self.path is not None or self.source != "text"
        yield "path", has_path, f"is missing; set {section}.path"
        has_repo = bool(self.repo) or self.path is not None or self.source != "hub"
        yield "repo", has_repo, f"is missing; set {section}.repo"


def python_stdlib() -> DataConfig:
    """The default data: the source code of Python's standard library."""
    return DataConfig(name="python_stdlib", source="python_stdlib")


@dataclass
class TokenizerConfig:
    """Config of the tokenizer."""

    name: str = "bpe"  # function in data/tokenizer.py
    # Maximum size of a trained vocabulary (bpe). None for the others.
    vocab_size: int | None = setting(2048, 1, 10**6)
    run: str | None = None  # name=run: the run whose tokenizer is used

    def rules(self, section: str) -> Iterator[Rule]:
        if self.name == "bpe":
            is_valid = self.vocab_size is not None and self.vocab_size > 256
            yield "vocab_size", is_valid, "must be above 256, the number of bytes"
        else:
            yield "vocab_size", self.vocab_size is None, f"is not for {self.name}; set null"
        is_valid = (self.name == "run") == (self.run is not None)
        yield "run", is_valid, "and tokenizer=run need each other; set both"
