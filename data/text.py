"""Plain text as it comes from a file: in pieces, exactly as it is, whatever its size.

A document is a sequence of pieces, (text, whether the document ends with it).
"""

import codecs
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from common.errors import UserError
from data.files import open_file

Piece = tuple[str, bool]
PIECE = 2**20  # characters at the most


def read_utf8(path: str, name: str) -> Iterator[str]:
    """The text of a file, in blocks. A byte order mark at its beginning is no part of it.

    name: what the file is called, which may be a copy of it. Raises UserError where it is not UTF-8, and where.
    """
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with open_file(path, name) as file:
            for number in itertools.count():
                block = file.read(2**20)
                pending, _ = decoder.getstate()
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise UserError(_not_utf8(name, at - len(pending) + error.start, error)) from None
                yield text.removeprefix("\ufeff") if number == 0 else text
                if not block:
                    return
                at += len(block)
    except OSError as error:
        if error.errno is not None:
            raise
        raise UserError(f"{name} cannot be decompressed ({error}); copy it anew, or decompress it yourself") from None


def _not_utf8(name: str, at: int, error: UnicodeDecodeError) -> str:
    """The sentence for a byte that begins no character, at `at` of the (decompressed) file."""
    there = error.object[error.start : error.start + 3]
    packed = {".bz2", ".xz", ".zip", ".7z", ".tar", ".lz4", ".br"} & {Path(name).suffix.lower()}
    if packed:
        return f"{name} is packed, and of such files .gz and .zst are read; unpack it"
    if at == 0 and there[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return f"{name} is UTF-16, not UTF-8 (byte 0 is 0x{there[0]:02x}); save it as UTF-8 (iconv -f utf-16 -t utf-8)"
    if there[0] == 0xED and there[1:2] >= b"\xa0":
        return f"{name} is not UTF-8: byte {at} begins a lone surrogate, half a character; take it out"
    if sum(byte < 9 or 13 < byte < 32 for byte in error.object[:4096]) > len(error.object[:4096]) // 50:
        return f"{name} is binary, not text (byte {at} is 0x{there[0]:02x}); set data.path to texts alone"
    return (
        f"{name} is not UTF-8: byte {at} is 0x{there[0]:02x}; save it as UTF-8 (iconv -f latin1 -t utf-8, for instance)"
    )


def chunk_document(texts: Iterable[str]) -> Iterator[Piece]:
    """All texts, end to end, as the pieces of one document."""
    held = ""
    for text in texts:
        held, start = held + text, 0
        while len(held) - start > PIECE:
            window = held[start : start + PIECE]
            at = _where_to_cut(window)
            yield window[:at], False
            start += at
        held = held[start:]
    yield held, True


def _where_to_cut(text: str) -> int:
    """A place in PIECE characters where cutting does not change the tokens: between one and a space behind it.

    No pattern that cuts text into pieces for byte-pair encoding (GPT-2's, GPT-4's, ours) has a piece that goes on from
    a character to a space. Where there is no space, as in some scripts, tokens may come out otherwise, the text not.
    """
    at = text.rfind(" ", 1)
    while at > 0:
        while at > 0 and text[at - 1].isspace():
            at -= 1
        if at > 0 and text[at] == " ":
            return at
        at = text.rfind(" ", 1, max(1, at))
    return len(text)


Position = tuple[int, int]  # a document, and a character in it


def slice_documents(pieces: Iterable[Piece], start: Position, stop: Position | None) -> Iterator[Piece]:
    """The pieces from one position up to another, or to the end. A document that is cut does not end there."""
    document = character = 0
    for text, ends in pieces:
        first, last = (document, character), (document, character + len(text))
        if stop is not None and first >= stop:
            return
        if stop is not None and stop < last:
            text, ends = text[: stop[1] - character], False
        if last >= start and (last > start or ends):
            yield (text[start[1] - character :] if first < start else text), ends
        document, character = (document + 1, 0) if ends else last
