"""Types and rules of the config groups `data` and `tokenizer`. Their values are in configs/."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from common.errors import check_settings

# These keys are set for each source of a mix, never for the mix.
SOURCE_KEYS = ("path", "val_path", "val_documents", "val_fraction", "max_documents", "text_column", "prompt_column")
SOURCE_KEYS += ("text_bytes",)
HUB_KEYS = ("repo", "config", "split", "revision", "val_split", "stream")

MAX_COUNT = 10**15


@dataclass
class DataConfig:
    """What to read, what to hold out for validation, and how to mix several sources.

    source: name of a function in data/sources.py. path: files to read instead of that source.
    path, val_path: a file, a folder, a pattern such as texts/*.txt, a URL, or a list of them.
    url: with source=url, the address of a file.
    repo, config, split, revision: with source=hub, a data set of the Hugging Face hub. None: the data set's default.
    stream: read a hub data set from the network on demand, without a copy on the disk.
    text_column: name of the text column in a table (a hub data set, or a .parquet, .jsonl or .csv file).
    prompt_column: name of the column with prompts, which text_column completes. Prompts are inputs, but never targets.
    row_is_document: True: each row of a table is a document. False: a table is one document.
    max_documents: read at most this many documents; None: all.

    The first of these keys that is set decides what is held out for validation: val_path (separate files) or val_split
    (a separate split); val_documents (number of documents from the start); val_fraction (the last fraction of the
    text, in complete documents if there are several).

    text_bytes: approximate size of a text that is not on this machine, for text_size=auto. None: unknown.
    mix: sources to mix, by name. weight: share of the training windows, relative to the other sources.
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
    prompt_column: str | None
    row_is_document: bool
    max_documents: int | None
    val_path: Any
    val_split: str | None
    val_documents: int | None
    val_fraction: float | None
    text_bytes: int | None
    mix: dict[str, "DataConfig"]
    weight: float
    document_mask: bool

    def check(self, section: str = "data") -> None:
        """Check this section and the sources of a mix. section: its key, for messages. Raises UserError."""
        check_settings(section, self, self._rules(section))
        for name, source in self.mix.items():
            in_mix = [
                ("source", not source.mix, "is itself a mix; list its sources directly in data.mix"),
                ("document_mask", not source.document_mask, "is a setting of the mix; set data.document_mask instead"),
            ]
            check_settings(f"data.mix.{name}", source, in_mix)
            source.check(f"data.mix.{name}")

    def _rules(self, section: str) -> Iterator[tuple[str, bool, str]]:
        """Yield the rules for check_settings: key, whether its value is valid, requirement."""
        for key in ("path", "val_path"):
            value = getattr(self, key)
            paths = value if isinstance(value, list) else [value]
            is_valid = value is None or (len(paths) > 0 and all(isinstance(path, str) and path for path in paths))
            yield key, is_valid, "is not a path; set a file, a folder, a pattern or a list of them"
        for key in ("val_documents", "max_documents", "text_bytes"):
            value = getattr(self, key)
            is_valid = value is None or 1 <= value <= MAX_COUNT
            yield key, is_valid, f"must be at least 1 and at most {MAX_COUNT:,}; set {section}.{key}=1000 or null"
        yield "weight", 0 < self.weight < inf, "must be greater than 0; set it to 1.0, for example"
        if self.max_documents is not None:
            held_out = 0 if self.val_path or self.val_split else self.val_documents or 0
            yield (
                "max_documents",
                self.row_is_document,
                f"needs {section}.row_is_document=true: otherwise a table is one document",
            )
            yield (
                "max_documents",
                self.max_documents > held_out,
                f"leaves no training documents after {section}.val_documents={held_out}; set a smaller val_documents",
            )
        for key in HUB_KEYS:
            is_valid = self.source == "hub" or not getattr(self, key)
            hub = "data=hub" if section == "data" else f"hub@{section.removeprefix('data.')} in the defaults"
            remedy = f"set {section}.val_path=FILE to hold out a file" if key == "val_split" else "remove this key"
            yield key, is_valid, f"works only with {hub}; set that too, or {remedy}"

        # a mix, whose sources have their own settings
        if self.source == "mix" or self.mix:
            yield "source", bool(self.mix), "has no sources; list them in a YAML file (docs/data.md, Mix sources)"
            for key in SOURCE_KEYS:
                yield key, getattr(self, key) is None, f"does not apply to a mix; set data.mix.NAME.{key} instead"
            return

        # one source
        is_fraction = self.val_fraction is not None and 0 < self.val_fraction < 1
        yield "val_fraction", is_fraction, f"must be between 0 and 1; set {section}.val_fraction=0.1, for example"
        yield "text_column", bool(self.text_column), f"names no column; set {section}.text_column=text"
        if self.prompt_column is not None:
            is_other = self.prompt_column not in ("", self.text_column)
            fix = f"set another column, or {section}.prompt_column=null"
            yield "prompt_column", is_other, f"must name a column other than {section}.text_column; {fix}"
            yield "prompt_column", self.row_is_document, f"needs {section}.row_is_document=true; set that, or null"
        if self.path is not None:
            return
        yield "path", self.source != "text", f"is missing; set {section}.path=FILE"
        if self.source == "url":
            is_url = (self.url or "").startswith(("http://", "https://"))
            yield "url", is_url, f"is not a URL; set one that begins with https://, or {section}.path=FILE"
        if self.source == "hub":
            yield "repo", bool(self.repo), f"names no data set; set {section}.repo=OWNER/NAME, or {section}.path=FILE"
            yield "split", bool(self.split), f"names no split; set {section}.split=train, or {section}.path=FILE"
            yield (
                "stream",
                bool(not self.stream or self.val_split or self.val_documents),
                "cannot hold out a fraction, because the length of a stream is unknown; "
                f"set {section}.val_documents=1000 or {section}.val_split",
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
    """Config of the tokenizer.

    name: a function in data/tokenizer.py. vocab_size: maximum size of a trained vocabulary (bpe). run: with name=run,
    the run whose tokenizer is used.
    """

    name: str
    vocab_size: int | None
    run: str | None

    def __post_init__(self):
        size, is_bpe = self.vocab_size, self.name == "bpe"
        unused = f"does not apply to tokenizer={self.name}; remove tokenizer.vocab_size, or set tokenizer=bpe"
        rules = [
            ("vocab_size", size is None or 0 < size <= 10**6, "is out of range; set 1024 or 32768, for example"),
            ("vocab_size", is_bpe or size is None, unused),
            (
                "vocab_size",
                not is_bpe or (size or 0) > 256,
                "has no room for the 256 byte tokens; set 512 or more, or tokenizer=byte",
            ),
            (
                "run",
                (self.name == "run") == (self.run is not None),
                f"does not fit tokenizer={self.name}; set both tokenizer=run and tokenizer.run=NAME, or neither",
            ),
        ]
        check_settings("tokenizer", self, rules)
