"""Where text comes from and how it becomes tokens. Types and rules only; the values live in configs/."""

from dataclasses import dataclass
from math import inf
from typing import Any

from common.errors import UserError


@dataclass
class DataConfig:
    """source: a function in data/sources.py. path: local files instead of what the source would read.

    path, val_path: a file, a folder, a pattern such as texts/*.txt, or a list of them.
    repo, config, split, revision: a data set of the Hugging Face hub; config and revision None: its own defaults.
    stream: whether such a data set is read from the network as it is needed, and not kept on the disk.
    text_column: where a table (of the hub, or a file in .parquet, .jsonl or .csv) has its text.
    row_is_document: whether each row of a table is a document of its own, or all together are one.
    max_documents: how many are read at the most; None: all.

    What is held out for validation is the first of these that is set: val_path or val_split, texts of their own;
    val_documents, the first so many documents; val_fraction, so much of the text, at its end (whole documents where
    there are several).

    mix: texts to be mixed, each with all of these keys; weight: a text's share of the training windows, relative to
    the others'.
    document_mask: whether documents that share a window are kept apart, in attention and in positions.
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
            raise UserError(f"data.val_fraction={self.val_fraction} must lie between 0 and 1; set, say, 0.1")
        for key in ("val_documents", "max_documents"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise UserError(f"data.{key}={getattr(self, key)} must be at least 1; set, say, 1000, or null")
        if not 0 < self.weight < inf:
            raise UserError(
                f"weight={self.weight:g} of a text in data.mix must be a number greater than 0; set, say, 1.0"
            )
        if self.source == "mix" and not self.mix:
            raise UserError("data=mix has no texts; name them in a file of your own (README: Any text, any size)")
        for key, like in (("text_column", "text"), ("val_fraction", "0.1")):
            if not self.mix and getattr(self, key) is None:
                raise UserError(f"data.{key} is not set; set, say, data.{key}={like}")
        for key in ("path", "val_path"):
            value = getattr(self, key)
            given = value if isinstance(value, list) else [value]
            if value is not None and not (given and all(isinstance(each, str) and each for each in given)):
                raise UserError(f"data.{key}={value} is to be a file, a folder, a pattern, or a list of them; set one")
        of_the_hub = ["repo", "config", "split", "revision", "val_split", "stream"]
        if self.source != "hub" and any(getattr(self, key) for key in of_the_hub):
            given = ", ".join(f"data.{key}={getattr(self, key)}" for key in of_the_hub if getattr(self, key))
            raise UserError(
                f"{given} is for the hub; set data=hub as well, or leave it out (data.val_path=FILE holds out a text "
                "of its own)"
            )
        if self.max_documents is not None and not self.row_is_document:
            raise UserError(
                f"data.max_documents={self.max_documents} counts documents, and data.row_is_document=false makes one "
                "of a table; leave one of them out"
            )
        first = 0 if self.val_path or self.val_split else self.val_documents or 0
        if self.max_documents is not None and self.max_documents <= first:
            raise UserError(
                f"data.max_documents={self.max_documents} leaves nothing to train on beside the first "
                f"data.val_documents={first}; set a smaller data.val_documents"
            )
        if self.mix:
            self._check_mix()
        elif self.path is None:
            self._check_place()

    def _check_mix(self) -> None:
        for key in ("path", "val_path", "val_documents", "val_fraction", "max_documents", "text_column"):
            if getattr(self, key) is not None:
                raise UserError(f"data.mix has texts of its own; set data.mix.NAME.{key} instead of data.{key}")
        for name, part in self.mix.items():
            if part.mix:
                raise UserError(f"data.mix.{name} is a mix itself; name its texts in one mix")
            if part.document_mask:
                raise UserError(f"data.mix.{name}.document_mask is the whole mix's; set data.document_mask instead")

    def _check_place(self) -> None:
        if self.source == "text":
            raise UserError(
                "data=text needs something to read; set data.path=FILE, a folder or a pattern (in a mix, "
                "data.mix.NAME.path)"
            )
        if self.source == "url" and not (self.url or "").startswith(("http://", "https://")):
            raise UserError(f"data.url={self.url} is no address; set one that begins with https://, or data.path=FILE")
        for key, like in (("repo", "OWNER/NAME"), ("split", "train")):
            if self.source == "hub" and not getattr(self, key):
                raise UserError(f"a data set of the hub needs data.{key}; set data.{key}={like}, or data.path=FILE")
        if self.stream and self.source == "hub" and not (self.val_split or self.val_documents):
            raise UserError(
                "data.stream=true reads a text once, and its end is not known ahead; set data.val_documents=1000, "
                "which holds out the first ones, or data.val_split"
            )

    @property
    def label(self) -> str:
        """What a run is called by: the text that is read, which is not the standard library's where a path is set."""
        return "text" if self.path is not None and self.name == "python_stdlib" else self.name

    @property
    def parts(self) -> dict[str, "DataConfig"]:
        """The texts that are mixed; one alone is a mix of one."""
        return self.mix or {self.label: self}


@dataclass
class TokenizerConfig:
    """name: a function in data/tokenizer.py. vocab_size: an upper bound, for the vocabularies that are trained.

    run: with name=run, the run whose tokenizer it is.
    """

    name: str
    vocab_size: int | None
    run: str | None

    def __post_init__(self):
        if self.vocab_size is not None and not 0 < self.vocab_size <= 10**6:
            raise UserError(f"tokenizer.vocab_size={self.vocab_size} is out of range; set, say, 1024 or 32768")
        if self.name == "bpe" and (self.vocab_size or 0) <= 256:
            raise UserError(
                f"tokenizer.vocab_size={self.vocab_size} has no room for the 256 bytes; set 512 or more, "
                "or tokenizer=byte"
            )
        if self.name != "bpe" and self.vocab_size is not None:
            raise UserError(
                f"tokenizer={self.name} has the size that it has; leave tokenizer.vocab_size out, or set tokenizer=bpe"
            )
        if (self.name == "run") != (self.run is not None):
            raise UserError("the tokenizer of another run takes both; set tokenizer=run tokenizer.run=NAME")
