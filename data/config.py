"""Where text comes from and how it becomes tokens. Types and rules only; the values live in configs/."""

from dataclasses import dataclass

from errors import UserError


@dataclass
class DataConfig:
    """source: a function in data/sources.py. path: a local file, instead of what the source would read.

    repo, config, split, revision: a data set of the Hugging Face hub; config and revision None: its own defaults.
    text_column: where a table (of the hub, or a file in .parquet, .jsonl or .csv) has its text, a document a row.
    val_fraction: how much of the text, at its end, is held out (whole documents where there are several).
    document_mask: whether documents that share a window are kept apart, in attention and in positions.
    """

    name: str
    source: str
    path: str | None
    url: str | None
    repo: str | None
    config: str | None
    split: str | None
    revision: str | None
    text_column: str
    val_fraction: float
    document_mask: bool

    def __post_init__(self):
        if not 0 < self.val_fraction < 1:
            raise UserError(f"data.val_fraction={self.val_fraction} must lie between 0 and 1; set, say, 0.1")
        if self.source == "text" and self.path is None:
            raise UserError("data=text needs a file to read; set data.path=FILE")
        if self.source == "url" and self.path is None and not (self.url or "").startswith(("http://", "https://")):
            raise UserError(f"data.url={self.url} is no address; set one that begins with https://, or data.path=FILE")
        for key in ("repo", "split"):
            if self.source == "hub" and self.path is None and not getattr(self, key):
                like = {"repo": "OWNER/NAME", "split": "train"}[key]
                raise UserError(f"a data set of the hub needs data.{key}; set data.{key}={like}, or data.path=FILE")


@dataclass
class TokenizerConfig:
    """name: a function in data/tokenizer.py. vocab_size: an upper bound, for the vocabularies that are trained."""

    name: str
    vocab_size: int | None

    def __post_init__(self):
        if self.vocab_size is not None and not 0 < self.vocab_size <= 10**6:
            raise UserError(f"tokenizer.vocab_size={self.vocab_size} is out of range; set, say, 1024 or 32768")
