"""What of a text is for training and what for validation. No document is in both."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from common.errors import UserError
from data import sources
from data.config import DataConfig
from data.files import TextSource
from data.progress import PrepareProgress
from data.text import Piece, Position, slice_documents

MOST_LENGTHS = 2**20  # that are kept of the documents' lengths, however many documents there are


@dataclass(frozen=True)
class SplitRange:
    """A stretch of one of the texts that are mixed, for one split.

    name: of the text. own: whether it is of what data.val_path or val_split names. start, stop: see data/text.py.
    continues: whether it begins within a document. documents, characters, bytes: None where they are not known ahead.
    """

    name: str
    split: str
    own: bool
    start: Position
    stop: Position | None
    documents: int | None
    characters: int | None
    bytes: int | None

    @property
    def continues(self) -> bool:
        return self.start[1] > 0

    def pieces(self, config: DataConfig) -> Iterator[Piece]:
        part = config.parts[self.name]
        places = sources.held_out(part) if self.own else sources.list_sources(part)
        return slice_documents(sources.iter_text(places, part), self.start, self.stop)

    @classmethod
    def from_plain(cls, plain: dict) -> "SplitRange":
        stop = plain["stop"]
        return cls(**plain | {"start": tuple(plain["start"]), "stop": stop if stop is None else tuple(stop)})


@dataclass
class TextStats:
    """How much text there is. lengths: characters of each `each` documents, one after the other."""

    documents: int = 0
    characters: int = 0
    bytes: int = 0
    lengths: array = field(default_factory=lambda: array("q"))
    each: int = 1

    def add(self, pieces: Iterable[Piece]) -> "TextStats":
        """Raises UserError for a text that cannot be encoded."""
        length = counted = 0
        text, ends = "", True
        for text, ends in pieces:
            try:
                self.bytes += len(text.encode())
            except UnicodeEncodeError as error:
                raise UserError(f"document {self.documents + 1} has a lone surrogate, half a character, at position "
                                f"{length + error.start}; take it out") from None  # fmt: skip
            length += len(text)
            if ends:
                self.documents, self.characters = self.documents + 1, self.characters + length
                counted, length = counted + length, 0
                if self.documents % self.each == 0:
                    self.lengths.append(counted)
                    counted = 0
                if len(self.lengths) == MOST_LENGTHS:
                    self.lengths = array("q", map(sum, zip(self.lengths[::2], self.lengths[1::2], strict=True)))
                    self.each *= 2
        self.lengths.append(counted)
        return self

    def find_val_cut(self, fraction: float) -> tuple[Position, float]:
        """Where the last `fraction` of the text begins, and how much of it is ahead of that.

        At a document where there are several, else within the one.
        """
        if self.documents == 1:
            character = int(self.characters * (1 - fraction))
            return (0, character), character / self.characters
        first, held_out = len(self.lengths), 0
        while first > 1 and (held_out == 0 or held_out < self.characters * fraction):
            first -= 1
            held_out += self.lengths[first]
        return (min(first * self.each, self.documents - 1), 0), 1 - held_out / self.characters


def check_no_leakage(read: dict[str, tuple[list[TextSource], list[TextSource] | None]]) -> None:
    """Raises UserError where a text would be both trained on and held out.

    read: of each of the texts that are mixed, what it reads, and what it holds out; None: a part of what it reads.
    """
    known = {name: tuple(_identities(places) for places in each) for name, each in read.items()}
    for name, (places, held_out) in known.items():
        for other, (others, others_held_out) in known.items():
            both = places & others_held_out
            if both:
                raise UserError(
                    f"{min(both)} would be both trained on and held out; leave it out of one of them, or hold out a "
                    "part of it with data.val_fraction or data.val_documents"
                )
            both = places & others
            if name != other and both and not (held_out and others_held_out):
                raise UserError(
                    f"{min(both)} is in data.mix.{name} and in data.mix.{other}, and what the one holds out the other "
                    "would train on; leave it out of one of them, or give both a val_path"
                )


def _identities(places: list[TextSource] | None) -> set[str]:
    return {identity for place in places or [] for identity in place.dedup_keys}


def plan_splits(config: DataConfig, show: PrepareProgress) -> list[SplitRange]:
    """The parts of all texts, which are read through once for it, unless they are streamed. Raises UserError."""
    return [part for name, each in config.parts.items() for part in _divide(name, each, show)]


def _divide(name: str, config: DataConfig, show: PrepareProgress) -> list[SplitRange]:
    end = None if config.max_documents is None else (config.max_documents, 0)
    own = sources.held_out(config)

    def surveyed(places: list, stop: Position | None) -> TextStats:
        show.begin(f"reading {name}")
        survey = TextStats().add(show.through(slice_documents(sources.iter_text(places, config), (0, 0), stop)))
        if not survey.characters:
            listed = ", ".join(place.address for place in places[:3]) + (", ..." if len(places) > 3 else "")
            raise UserError(f"{listed} holds no text; set data.path to a file that does")
        return survey

    def part(
        split: str, start: Position, stop: Position | None, survey: TextStats | None, share: float, documents=None
    ):
        counts = (None, None, None)
        if survey is not None:
            counts = documents, round(survey.characters * share), round(survey.bytes * share)
        return SplitRange(name, split, split == "val" and own is not None, start, stop, *counts)

    if config.source == "hub" and config.path is None and config.stream:
        if own is not None:
            return [part("train", (0, 0), end, None, 1), part("val", (0, 0), None, None, 1)]
        first = (config.val_documents, 0)
        return [part("train", first, end, None, 1), part("val", (0, 0), first, None, 1)]
    whole = surveyed(sources.list_sources(config), end)
    n = whole.documents
    if own is not None:
        val = surveyed(own, None)
        return [part("train", (0, 0), end, whole, 1, n), part("val", (0, 0), None, val, 1, val.documents)]
    if config.val_documents is not None:
        first = config.val_documents
        if first >= n:
            raise UserError(
                f"data.val_documents={first} leaves nothing to train on, as {name} has {n} in all; set a smaller one, "
                "or data.val_fraction"
            )
        return [part("train", (first, 0), end, whole, 1 - first / n, n - first),
                part("val", (0, 0), (first, 0), whole, first / n, first)]  # fmt: skip
    cut, share = whole.find_val_cut(config.val_fraction)
    if 1 - share > max(2 * config.val_fraction, 0.05):
        show.say(f"{1 - share:.0%} of {name} is held out, not data.val_fraction={config.val_fraction:g}, since "
                 "documents stay whole; data.val_path holds out a text of its own")  # fmt: skip
    k = cut[0] or 1
    return [part("train", (0, 0), cut, whole, share, k),
            part("val", cut, end, whole, 1 - share, max(1, n - k))]  # fmt: skip
