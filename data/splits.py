"""The split plan: which part of each source is for training and which is held out. No text is in both parts."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from common.console import ProgressBar, format_si
from common.errors import UserError
from data.readers import Piece, iter_text, no_text_error, slice_documents
from data.sources import InputFile, Position, TextSource

START = (0, 0)  # the first position of a text
PROGRESS_CHARS = 2**20  # characters between two updates of the progress bar


@dataclass(frozen=True)
class SplitRange:
    """A range of a source's text that belongs to one split.

    source: its name. uses_val_files: whether the range is in the source's val_files instead of its files.
    start, stop: positions (document, character). Without `stop`, the range ends with the source.
    bytes: estimated size. None for streams.
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
    def ends_within_document(self) -> bool:
        return self.stop is not None and self.stop[1] > 0

    def iter_text(self, source: TextSource) -> Iterator[Piece]:
        files = source.val_files if self.uses_val_files else source.files
        return slice_documents(iter_text(source, files), self.start, self.stop)


@dataclass
class SplitPlan:
    """The ranges of all sources, in order, and the size of their text. Sizes are None if a source is streamed."""

    ranges: list[SplitRange]
    documents: int | None
    characters: int | None


@dataclass
class TextStats:
    """Size of a text. lengths: characters of each document."""

    characters: int = 0
    bytes: int = 0
    lengths: array = field(default_factory=lambda: array("q"))

    @property
    def documents(self) -> int:
        return len(self.lengths)

    def add(self, pieces: Iterable[Piece]) -> "TextStats":
        """Count all pieces."""
        length = 0
        for text, ends_document, _ in pieces:
            self.bytes += len(text.encode())
            length += len(text)
            if ends_document:
                self.characters += length
                self.lengths.append(length)
                length = 0
        return self

    def find_val_cut(self, fraction: float) -> tuple[Position, float]:
        """Find where the last `fraction` of the text begins. Returns the position and the share of the text before it.

        The position is between documents if there are several, otherwise within the only document.
        """
        if self.documents == 1:
            character = int(self.characters * (1 - fraction))
            return (0, character), character / self.characters
        held_out = np.cumsum(self.lengths[:0:-1])  # characters of the last document, the last two, ...; not of all
        count = np.searchsorted(held_out, max(1, self.characters * fraction)) + 1
        count = int(min(count, self.documents - 1))
        return (self.documents - count, 0), 1 - int(held_out[count - 1]) / self.characters


def check_no_leakage(sources: list[TextSource]) -> None:
    """Raise UserError if a file of any source would be used for both training and validation."""
    train_keys = {source.name: _dedup_keys(source.files) for source in sources}
    for source in sources:
        for other in sources:
            shared = train_keys[source.name] & _dedup_keys(other.val_files or [])
            if shared:
                raise UserError(
                    f"{min(shared)} would be used for both training and validation; remove it from one of them, or "
                    "hold out a part of it with data.val_fraction or data.val_documents"
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
    ranges, all_stats = [], []
    for source in sources:
        stats = _read_stats(source, source.files, source.end, bar)
        all_stats.append(stats)
        if source.val_files is None:
            ranges += _split_files(source, stats, bar)
        else:
            val_stats = _read_stats(source, source.val_files, None, bar)
            all_stats.append(val_stats)
            ranges.append(SplitRange(source.name, "train", False, START, source.end, stats and stats.bytes))
            ranges.append(SplitRange(source.name, "val", True, START, None, val_stats and val_stats.bytes))
    if None in all_stats:
        return SplitPlan(ranges, None, None)
    return SplitPlan(ranges, sum(s.documents for s in all_stats), sum(s.characters for s in all_stats))


def _split_files(source: TextSource, stats: TextStats | None, bar: ProgressBar) -> list[SplitRange]:
    """The two ranges of a source that has no separate files for validation. stats: the size of its text."""
    count, fraction = source.val_documents, source.val_fraction
    if count is not None:
        if stats is not None and count >= stats.documents:
            raise UserError(
                f"data.val_documents={count} leaves nothing to train on, as {source.name} has {stats.documents} "
                "documents; use a smaller value, or data.val_fraction"
            )
        val, train = (START, (count, 0)), ((count, 0), source.end)
        val_share = 0.0 if stats is None else count / stats.documents
    else:
        if source.prompt_column is not None and stats.documents == 1:
            raise UserError(f"{source.name} has only one prompt and completion; use more rows, or set data.val_path")
        cut, train_share = stats.find_val_cut(fraction)
        train, val = (START, cut), (cut, source.end)
        val_share = 1 - train_share
        if val_share > max(2 * fraction, 0.05):
            bar.print(
                f"{val_share:.0%} of {source.name} is held out instead of data.val_fraction={fraction:g}, because "
                "documents are not divided; data.val_path holds out separate files"
            )
    return [
        SplitRange(source.name, split, False, start, stop, None if stats is None else round(stats.bytes * share))
        for split, (start, stop), share in (("train", train, 1 - val_share), ("val", val, val_share))
    ]


def _read_stats(
    source: TextSource, files: list[InputFile], stop: Position | None, bar: ProgressBar
) -> TextStats | None:
    """Read the files to measure their text. None for streams. Raises UserError if there is no text."""
    if source.is_streamed:
        return None
    pieces = slice_documents(iter_text(source, files), START, stop)
    stats = TextStats().add(show_progress(pieces, bar, f"reading {source.name}"))
    if not stats.characters:
        raise no_text_error(files)
    return stats


def show_progress(pieces: Iterable[Piece], bar: ProgressBar, label: str) -> Iterator[Piece]:
    """Yield the pieces unchanged, and show on the bar how many characters were read."""
    done, next_update = 0, PROGRESS_CHARS
    for piece in pieces:
        yield piece
        done += len(piece.text)
        if done >= next_update:  # updates cost time if documents are small
            bar.update(done, label, format_si(done, "B"))
            next_update = done + PROGRESS_CHARS
