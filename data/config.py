"""Config of the data and the tokenizer: each line has a key, its type, default, limits and meaning."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from common.settings import Rule, check_path_component, setting

MIX_KEYS = (
    "name",
    "source",
    "mix",
    "document_mask",
    "weight",
)  # of a mix itself; its sources have the other keys
HUB_KEYS = ("repo", "config", "split", "revision", "val_split", "stream")
MAX_COUNT = 10**15


@dataclass
class DataConfig:
    """What to read, what to hold out for validation, and how to mix several sources."""

    name: str = "text"
    source: str = "text"  # function in data/sources.py
    path: Any = None  # files to read instead: a file, a folder, a pattern such as texts/*.txt, a URL, or a list of them
    repo: str | None = None  # source=hub: data set of the Hugging Face hub
    config: str | None = None  # source=hub: configuration of the data set; None: its default
    split: str | None = None  # source=hub
    revision: str | None = None  # source=hub; None: the main branch
    stream: bool = False  # source=hub: read from the network on demand, without a copy on the disk
    text_column: str = "text"  # column of a table (hub data set, .parquet, .jsonl, .csv, .tsv)
    prompt_column: str | None = (
        None  # column of prompts, which text_column completes; prompts are never targets
    )
    row_is_document: bool = (
        True  # each row of a table is a document; False: a table is one document
    )
    separator: str | None = (
        None  # string between the documents of a text file, such as \\n; None: one document
    )
    max_documents: int | None = setting(None, 1, MAX_COUNT)  # None: all
    # Held out for validation, by the first of these keys that is set:
    val_path: Any = None  # separate files
    val_split: str | None = None  # separate split of a hub data set
    val_documents: int | None = setting(None, 1, MAX_COUNT)  # number of documents from the start
    val_fraction: float = setting(
        0.1, above=0, below=1
    )  # the last fraction of the text, in complete documents
    text_bytes: int | None = setting(
        None, 1, MAX_COUNT
    )  # approximate size of a text that is not on this machine
    mix: dict[str, "DataConfig"] = field(
        default_factory=dict
    )  # sources to mix, by name (docs/data.md)
    weight: float = setting(
        1.0, above=0
    )  # in a mix: share of the training windows, relative to the other sources
    document_mask: bool = (
        False  # tokens attend only to their own document, and positions restart with it
    )

    def rules(self, section: str) -> Iterator[Rule]:
        check_path_component(f"{section}.name", self.name)
        if self.source == "mix" or self.mix:
            yield (
                "mix",
                bool(self.mix),
                "has no sources; list them in a YAML file (docs/data.md, Mix sources)",
            )
            for entry in fields(self):
                is_valid = entry.name in MIX_KEYS or getattr(self, entry.name) == entry.default
                yield (
                    entry.name,
                    is_valid,
                    f"does not apply to a mix; set data.mix.NAME.{entry.name} instead",
                )
            for name in self.mix:
                check_path_component("data.mix", name)
            return
        yield (
            "document_mask",
            section == "data" or not self.document_mask,
            "is for all sources; set data.document_mask",
        )
        for key in HUB_KEYS:
            yield (
                key,
                self.source == "hub" or not getattr(self, key),
                "works only with data=hub; set both or neither",
            )
        has_column = self.prompt_column != self.text_column and (
            self.row_is_document or self.prompt_column is None
        )
        yield (
            "prompt_column",
            has_column,
            "needs another column as text_column, and row_is_document=true; or set null",
        )
        yield "separator", self.separator != "", "must not be empty; set a string, or null"
        required = {"text": "path", "hub": "repo"}.get(self.source)
        if self.path is None and required is not None:
            yield required, bool(getattr(self, required)), f"is missing; set {section}.{required}"

    @property
    def mixed(
        self,
    ) -> dict[str, "DataConfig"]:  # the sources by name; without a mix, this config alone
        return self.mix or {self.name: self}


def python_stdlib() -> DataConfig:
    """The default data: the source code of Python's standard library."""
    return DataConfig(name="python_stdlib", source="python_stdlib")


@dataclass
class TokenizerConfig:
    """Config of the tokenizer."""

    name: str = "bpe"  # function in data/tokenizer.py
    vocab_size: int | None = setting(
        2048, 1, 10**6
    )  # maximum size of a trained vocabulary (bpe); None for the others
    run: str | None = None  # name=run: the run whose tokenizer is used

    def rules(self, section: str) -> Iterator[Rule]:
        is_valid = (self.vocab_size or 0) > 256 if self.name == "bpe" else self.vocab_size is None
        advice = (
            "must be above 256, the number of bytes"
            if self.name == "bpe"
            else f"is not for {self.name}; set null"
        )
        yield "vocab_size", is_valid, advice
        yield (
            "run",
            (self.name == "run") == (self.run is not None),
            "and tokenizer=run need each other; set both",
        )


@dataclass
class PrepareConfig:
    """Config of prepare.py."""

    preset: str | None = (
        None  # the preset that has set the size of the vocabulary (configs/preset.py)
    )
    data: DataConfig = field(default_factory=python_stdlib)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
