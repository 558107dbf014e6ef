"""The split plan: which part of each source is for training and which is held out. No text is in both parts."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from common.console import ProgressBar
from common.errors import UserError
from data.readers import Piece, Position, iter_text, no_text_error, slice_documents
from data.sources import InputFile, TextSource

MAX_LENGTHS = 2**20  # entries of TextStats.lengths, which bounds its memory
PROGRESS_CHARS = 2**20  # characters between two updates of the progress bar


@dataclass(frozen=True)
class SplitRange:
    """A range of a source's text that belongs to one split.

    source: its name. uses_val_files: whether the range is in the source's val_files instead of its files.
    start, stop: positions (document, character); stop None: the end. bytes: estimated size; None: unknown (streamed).
    """

    source: str
    split: str
    uses_val_files: bool
    start: Position
    stop: Position | None
    bytes: int | None

    @classmethod
    def from_json(cls, fields: dict) -> "SplitRange":
        return cls(**fields | {"start": tuple(fields["start"]), "stop": fields["stop"] and tuple(fields["stop"])})

    @property
    def starts_within_document(self) -> bool:
        return self.start[1] > 0

    def iter_text(self, source: TextSource) -> Iterator[Piece]:
        files = source.val_files if self.uses_val_files else source.files
        return slice_documents(iter_text(source, files), self.start, self.stop)


@dataclass
class SplitPlan:
    """The ranges of all sources, in order, and the size of their text; None: unknown, because a source is streamed."""

    ranges: list[SplitRange]
    documents: int | None = 0
    characters: int | None = 0

    def count(self, stats: "TextStats | None") -> None:
        is_known = stats is not None and self.documents is not None
        self.documents = self.documents + stats.documents if is_known else None
        self.characters = self.characters + stats.characters if is_known else None

    def add(
        self,
        source: TextSource,
        split: str,
        start: Position,
        stop: Position | None,
        stats: "TextStats | None",
        share: float = 1.0,
    ) -> None:
        """stats: size of the files that contain the range. share: estimated fraction of their text in the range."""
        uses_val_files = split == "val" and source.val_files is not None
        size = None if stats is None else round(stats.bytes * share)
        self.ranges.append(SplitRange(source.name, split, uses_val_files, start, stop, size))


@dataclass
class TextStats:
    """Size of a text. lengths: total characters of consecutive groups of `group_size` documents."""

    documents: int = 0
    characters: int = 0
    bytes: int = 0
    lengths: array = field(default_factory=lambda: array("q"))
    group_size: int = 1

    def add(self, pieces: Iterable[Piece]) -> "TextStats":
        """Count all pieces. Raises UserError for text that has no UTF-8 encoding."""
        document_length = group_length = 0
        for text, ends in pieces:
            try:
                self.bytes += len(text.encode())
            except UnicodeEncodeError as error:
                position = document_length + error.start
                raise UserError(
                    f"document {self.documents + 1} has a lone surrogate (half a character) at position {position}; "
                    "remove it"
                ) from None
            document_length += len(text)
            if ends:
                self.documents += 1
                self.characters += document_length
                group_length += document_length
                document_length = 0
                if self.documents % self.group_size == 0:
                    self.lengths.append(group_length)
                    group_length = 0
                if len(self.lengths) == MAX_LENGTHS:
                    self._merge_groups()
        self.lengths.append(group_length)
        return self

    def _merge_groups(self) -> None:
        """Join pairs of groups, so that the list stays short for any number of documents."""
        self.lengths = array("q", map(sum, zip(self.lengths[::2], self.lengths[1::2], strict=True)))
        self.group_size *= 2

    def find_val_cut(self, fraction: float) -> tuple[Position, float]:
        """Find where the last `fraction` of the text begins. Returns the position and the share of the text before it.

        The position is between documents if there are several, otherwise within the only document.
        """
        if self.documents == 1:
            character = int(self.characters * (1 - fraction))
            return (0, character), character / self.characters
        group, held_out = len(self.lengths), 0
        while group > 1 and (held_out == 0 or held_out < self.characters * fraction):
            group -= 1
            held_out += self.lengths[group]
        return (min(group * self.group_size, self.documents - 1), 0), 1 - held_out / self.characters


def check_no_leakage(sources: list[TextSource]) -> None:
    """Raise UserError if a file of any source would be used both for training and for validation."""
    train_keys = {source.name: _dedup_keys(source.files) for source in sources}
    for source in sources:
        for other in sources:
            shared = train_keys[source.name] & _dedup_keys(other.val_files or [])
            if shared:
                raise UserError(
                    f"{min(shared)} would be both trained on and held out; remove it from one of them, or hold out a "
                    "part of it with data.val_fraction or data.val_documents"
                )
            shared = train_keys[source.name] & train_keys[other.name]
            if shared and source is not other and (source.val_files is None or other.val_files is None):
                raise UserError(
                    f"{min(shared)} is in data.mix.{source.name} and in data.mix.{other.name}, so that one would train "
                    "on text that the other holds out; remove it from one of them, or give both a val_path"
                )


def _dedup_keys(files: list[InputFile]) -> set[str]:
    return {key for file in files for key in file.dedup_keys}


def plan_splits(sources: list[TextSource], bar: ProgressBar) -> SplitPlan:
    """Plan the splits of all sources. Reads each source once, unless it is streamed. Raises UserError."""
    plan = SplitPlan([])
    for source in sources:
        _plan_source(source, plan, bar)
    return plan


def _plan_source(source: TextSource, plan: SplitPlan, bar: ProgressBar) -> None:
    start, end = (0, 0), None if source.max_documents is None else (source.max_documents, 0)
    stats = _read_stats(source, source.files, end, bar)
    plan.count(stats)
    if source.val_files is not None:
        val_stats = _read_stats(source, source.val_files, None, bar)
        plan.count(val_stats)
        plan.add(source, "train", start, end, stats)
        plan.add(source, "val", start, None, val_stats)
    elif source.val_documents is not None:
        count = source.val_documents
        if stats is not None and count >= stats.documents:
            raise UserError(
                f"data.val_documents={count} leaves nothing to train on, as {source.name} has {stats.documents} "
                "documents; use a smaller value, or data.val_fraction"
            )
        share = 0.0 if stats is None else count / stats.documents
        plan.add(source, "train", (count, 0), end, stats, 1 - share)
        plan.add(source, "val", start, (count, 0), stats, share)
    else:
        cut, share = stats.find_val_cut(source.val_fraction)
        plan.add(source, "train", start, cut, stats, share)
        plan.add(source, "val", cut, end, stats, 1 - share)
        if 1 - share > max(2 * source.val_fraction, 0.05):
            bar.write_line(
                f"{1 - share:.0%} of {source.name} is held out instead of data.val_fraction={source.val_fraction:g}, "
                "because documents are not divided; data.val_path holds out separate files"
            )


def _read_stats(
    source: TextSource, files: list[InputFile], stop: Position | None, bar: ProgressBar
) -> TextStats | None:
    """Read the files to measure their text; None: they are streamed. Raises UserError if there is no text."""
    if source.is_streamed:
        return None
    bar.restart(None)
    pieces = slice_documents(iter_text(source, files), (0, 0), stop)
    stats = TextStats().add(show_progress(pieces, bar, f"reading {source.name}"))
    if not stats.characters:
        raise no_text_error(files)
    return stats


def show_progress(pieces: Iterable[Piece], bar: ProgressBar, label: str) -> Iterator[Piece]:
    """Yield the pieces unchanged, and show on the bar how many characters were read."""
    done, next_update = 0, PROGRESS_CHARS
    for piece in pieces:
        yield piece
        done += len(piece[0])
        if done >= next_update:  # not for each of many small documents
            bar.update_bytes(done, label)
            next_update = done + PROGRESS_CHARS
