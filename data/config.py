"""Config of the data and the tokenizer: each line has a key, its type, default, limits and meaning."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from common.errors import UserError
from common.run_dir import check_path_component
from common.settings import Rule, setting

# These keys are set for each source of a mix, never for the mix.
SOURCE_KEYS = ("path", "val_path", "val_documents", "val_fraction", "max_documents", "text_column", "prompt_column")
SOURCE_KEYS += ("text_bytes",)
HUB_KEYS = ("repo", "config", "split", "revision", "val_split", "stream")

MAX_COUNT = 10**15


@dataclass
class DataConfig:
    """What to read, what to hold out for validation, and how to mix several sources."""

    name: str = "python_stdlib"
    source: str = "python_stdlib"  # function in data/sources.py
    path: Any = None  # files to read instead: a file, a folder, a pattern such as texts/*.txt, a URL, or a list of them
    url: str | None = None  # source=url: address of a file
    repo: str | None = None  # source=hub: data set of the Hugging Face hub
    config: str | None = None  # source=hub: configuration of the data set; None: its default
    split: str | None = None  # source=hub
    revision: str | None = None  # source=hub; None: the main branch
    stream: bool = False  # source=hub: read from the network on demand, without a copy on the disk
    text_column: str | None = "text"  # column of a table (hub data set, .parquet, .jsonl or .csv) with the text
    prompt_column: str | None = None  # column of prompts, which text_column completes; prompts are never targets
    row_is_document: bool = True  # each row of a table is a document; False: a table is one document
    max_documents: int | None = setting(None, 1, MAX_COUNT)  # None: all
    # Held out for validation, by the first of these keys that is set:
    val_path: Any = None  # separate files
    val_split: str | None = None  # separate split of a hub data set
    val_documents: int | None = setting(None, 1, MAX_COUNT)  # number of documents from the start
    val_fraction: float | None = setting(0.1, above=0, below=1)  # the last fraction of the text, in complete documents
    text_bytes: int | None = setting(None, 1, MAX_COUNT)  # approximate size of a text that is not on this machine
    mix: dict[str, "DataConfig"] = field(default_factory=dict)  # sources to mix, by name (docs/data.md)
    weight: float = setting(1.0, above=0)  # in a mix: share of the training windows, relative to the other sources
    document_mask: bool = False  # tokens attend only to their own document, and positions restart with it

    def rules(self, section: str) -> Iterator[Rule]:
        for name, source in self.mix.items():
            key = f"data.mix.{name}"
            if source.mix:
                raise UserError(f"{key} is itself a mix; list its sources directly in data.mix")
            if source.document_mask:
                raise UserError(f"{key}.document_mask is a setting of the mix; set data.document_mask instead")
        for key in ("path", "val_path"):
            value = getattr(self, key)
            paths = value if isinstance(value, list) else [value]
            is_valid = value is None or (len(paths) > 0 and all(isinstance(path, str) and path for path in paths))
            yield key, is_valid, "is not a path; set a file, a folder, a pattern or a list of them"
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
        yield "val_fraction", self.val_fraction is not None, "is missing; set 0.1, for example"
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
    """Config of the tokenizer."""

    name: str = "bpe"  # function in data/tokenizer.py
    vocab_size: int | None = setting(2048, 1, 10**6)  # maximum size of a trained vocabulary (bpe); None for the others
    run: str | None = None  # name=run: the run whose tokenizer is used

    def rules(self, section: str) -> Iterator[Rule]:
        is_trained = self.name == "bpe"
        unused = f"does not apply to tokenizer={self.name}; set tokenizer.vocab_size=null, or tokenizer=bpe"
        yield "vocab_size", is_trained or self.vocab_size is None, unused
        has_bytes = not is_trained or (self.vocab_size or 0) > 256
        yield "vocab_size", has_bytes, "has no room for the 256 byte tokens; set 512 or more, or tokenizer=byte"
        has_run = (self.name == "run") == (self.run is not None)
        yield (
            "run",
            has_run,
            f"does not fit tokenizer={self.name}; set tokenizer=run and tokenizer.run=NAME, or neither",
        )


@dataclass
class PrepareConfig:
    """Config of prepare.py."""

    preset: str | None = None  # the preset that has set the size of the vocabulary (configs/preset.py)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    inspect: bool = False  # print sizes and samples of tokenized text
    verify: bool = False  # compare all token files with their SHA-256

    def rules(self, section: str) -> list[Rule]:
        check_path_component("data.name", self.data.name)
        return []
