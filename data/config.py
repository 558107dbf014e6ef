"""Types and rules of the config groups `data` and `tokenizer`. Their values are in configs/."""

from dataclasses import dataclass
from math import inf
from typing import Any

from common.errors import UserError, format_value

# These keys are set for each source of a mix, never for the mix.
SOURCE_KEYS = ("path", "val_path", "val_documents", "val_fraction", "max_documents", "text_column")
HUB_KEYS = ("repo", "config", "split", "revision", "val_split", "stream")


@dataclass
class DataConfig:
    """What to read, what to hold out for validation, and how to mix several sources.

    source: name of a function in data/sources.py. path: local files to read instead of that source.
    path, val_path: a file, a folder, a pattern such as texts/*.txt, or a list of them.
    url: with source=url, the address of a file.
    repo, config, split, revision: with source=hub, a data set of the Hugging Face hub. None: the data set's default.
    stream: read a hub data set from the network on demand, without a copy on the disk.
    text_column: name of the text column in a table (a hub data set, or a .parquet, .jsonl or .csv file).
    row_is_document: True: each row of a table is a document. False: a table is one document.
    max_documents: read at most this many documents; None: all.

    The first of these keys that is set decides what is held out for validation: val_path (separate files) or val_split
    (a separate split); val_documents (number of documents from the start); val_fraction (the last fraction of the
    text, in complete documents if there are several).

    mix: sources to mix, by name. weight: share of the training windows, relative to the other sources of the mix.
    document_mask: tokens attend only to their own document, and positions restart with each document.
    """

    name: str
    source: str
    path: Any
    url: str | None
    repo: str | None
    config: str | None
    split: str | None
    revision: str | None
    stream: bool
    text_column: str | None
    row_is_document: bool
    max_documents: int | None
    val_path: Any
    val_split: str | None
    val_documents: int | None
    val_fraction: float | None
    mix: dict[str, "DataConfig"]
    weight: float
    document_mask: bool

    def __post_init__(self):
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise UserError(
                f"data.val_fraction={self.val_fraction} must be between 0 and 1; set it to 0.1, for example"
            )
        for key in ("val_documents", "max_documents"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise UserError(f"data.{key}={getattr(self, key)} must be at least 1; set it to 1000 or null")
        if not 0 < self.weight < inf:
            raise UserError(f"weight={self.weight:g} in data.mix must be greater than 0; set it to 1.0, for example")
        if self.source == "mix" and not self.mix:
            raise UserError("data=mix has no sources; list them in a YAML file (docs/data.md, Mix sources)")
        self._check_paths()
        if self.max_documents is not None:
            self._check_max_documents()
        if self.source != "hub":
            used = ", ".join(f"data.{key}={format_value(getattr(self, key))}" for key in HUB_KEYS if getattr(self, key))
            if used:
                raise UserError(
                    f"{used} works only with data=hub; set data=hub too, or data.val_path=FILE to hold out a file"
                )
        if self.mix:
            self._check_mix()
            return
        for key, example in (("text_column", "text"), ("val_fraction", "0.1")):
            if getattr(self, key) is None:
                raise UserError(f"data.{key} is not set; set data.{key}={example}, for example")
        if self.path is None:
            self._check_source()

    def _check_paths(self) -> None:
        for key in ("path", "val_path"):
            value = getattr(self, key)
            paths = value if isinstance(value, list) else [value]
            if value is not None and not (paths and all(isinstance(path, str) and path for path in paths)):
                raise UserError(f"data.{key}={value} is not a path; set a file, a folder, a pattern or a list of them")

    def _check_max_documents(self) -> None:
        if not self.row_is_document:
            raise UserError(
                f"data.max_documents={self.max_documents} needs data.row_is_document=true, because a table is one "
                "document otherwise; remove one of the two settings"
            )
        held_out = 0 if self.val_path or self.val_split else self.val_documents or 0
        if self.max_documents <= held_out:
            raise UserError(
                f"data.max_documents={self.max_documents} leaves no training documents after "
                f"data.val_documents={held_out}; set a smaller data.val_documents"
            )

    def _check_mix(self) -> None:
        for key in SOURCE_KEYS:
            if getattr(self, key) is not None:
                raise UserError(f"data.{key} does not apply to a mix; set data.mix.NAME.{key} instead")
        for name, source in self.mix.items():
            if source.mix:
                raise UserError(f"data.mix.{name} is itself a mix; list its sources directly in data.mix")
            if source.document_mask:
                raise UserError(f"data.mix.{name}.document_mask applies to the mix; set data.document_mask instead")

    def _check_source(self) -> None:
        if self.source == "text":
            raise UserError(
                "data=text has no input; set data.path=FILE, a folder or a pattern (data.mix.NAME.path in a mix)"
            )
        if self.source == "url" and not (self.url or "").startswith(("http://", "https://")):
            raise UserError(
                f"data.url={format_value(self.url)} is not a URL; set one that begins with https://, or data.path=FILE"
            )
        if self.source == "hub":
            for key, example in (("repo", "OWNER/NAME"), ("split", "train")):
                if not getattr(self, key):
                    raise UserError(f"data=hub needs data.{key}; set data.{key}={example}, or data.path=FILE")
            if self.stream and not (self.val_split or self.val_documents):
                raise UserError(
                    "data.stream=true cannot hold out a fraction, because the length of a stream is unknown; set "
                    "data.val_documents=1000 or data.val_split"
                )

    @property
    def label(self) -> str:
        """Name of the data in runs and folders; "text" if data.path replaces the default source."""
        return "text" if self.path is not None and self.name == "python_stdlib" else self.name

    @property
    def mixed(self) -> dict[str, "DataConfig"]:
        """The sources of the mix by name; without a mix, this config alone."""
        return self.mix or {self.label: self}


@dataclass
class TokenizerConfig:
    """name: a function in data/tokenizer.py. vocab_size: maximum size of a trained vocabulary (bpe).

    run: with name=run, the run whose tokenizer is used.
    """

    name: str
    vocab_size: int | None
    run: str | None

    def __post_init__(self):
        if self.vocab_size is not None and not 0 < self.vocab_size <= 10**6:
            raise UserError(f"tokenizer.vocab_size={self.vocab_size} is out of range; set 1024 or 32768, for example")
        if self.name == "bpe" and (self.vocab_size or 0) <= 256:
            raise UserError(
                f"tokenizer.vocab_size={format_value(self.vocab_size)} has no room for the 256 byte tokens; "
                "set 512 or more, or tokenizer=byte"
            )
        if self.name != "bpe" and self.vocab_size is not None:
            raise UserError(
                f"tokenizer={self.name} has no adjustable size; remove tokenizer.vocab_size, or set tokenizer=bpe"
            )
        if (self.name == "run") != (self.run is not None):
            raise UserError(
                "tokenizer=run needs tokenizer.run and vice versa; set both: tokenizer=run tokenizer.run=NAME"
            )
