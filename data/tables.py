"""Tables that are text files: the texts in one column of a .jsonl or a .csv, row by row.

Read here and not by `datasets`, which guesses the types of all columns from the first rows, so that "NA" is nothing and
what looks like dates is dates; which takes the first column of a .csv for an index where rows are longer than the
header; and which does not tell the line of what it cannot read. Each raises UserError, with the line, for that.
"""

import csv
import json
from collections.abc import Iterable, Iterator

from common.errors import UserError
from data.text import read_utf8

LONGEST_LINE = 2**30  # characters: a longer one is none


def read_jsonl(path: str, name: str, column: str) -> Iterator[str]:
    """The texts in a .jsonl file. name: what it is called, see `decoded`."""
    number = 0
    for line in _lines(path, name):
        number += 1
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"line {number} of {name} is no JSON ({error}); mend it there") from None
        if not isinstance(row, dict):
            raise UserError(f'line {number} of {name} is no object; write each as {{"{column}": "..."}}')
        if column not in row:
            raise UserError(
                f"{name} has no column {column} in line {number}; set data.text_column to one of {_listed(row)}"
            )
        text = row[column]
        if not isinstance(text, str | None):
            raise UserError(f"column {column} of {name} holds no text but {type(text).__name__} in line {number}; "
                            "set data.text_column to one that does")  # fmt: skip
        if text is not None:
            try:
                text.isascii() or text.encode()
            except UnicodeEncodeError:
                raise UserError(
                    f"line {number} of {name} has a lone surrogate, half a character; take it out"
                ) from None
            yield text


def read_csv(path: str, name: str, column: str) -> Iterator[str]:
    """The texts in a .csv file whose first line names the columns (RFC 4180). name: what it is called.

    Blank lines between rows are none.
    """
    csv.field_size_limit(LONGEST_LINE)
    rows = csv.reader((line + "\n" for line in _lines(path, name)), strict=True)
    names: list[str] = []
    try:
        for row in filter(None, rows):
            if not names:
                names = row
                if column not in names:
                    raise UserError(f"{name} has no column {column}; set data.text_column to one of {_listed(names)}")
            elif len(row) != len(names):
                raise UserError(
                    f"line {rows.line_num} of {name} has {len(row)} fields where the first names {len(names)} columns; "
                    "put a text with commas in it between quotation marks"
                )
            else:
                yield row[names.index(column)]
    except csv.Error as error:
        raise UserError(f"line {rows.line_num} of {name} is no CSV ({error}); mend it there") from None


def _listed(columns: Iterable[str]) -> str:
    """Columns by their names, which are a text where the line that names them is missing."""
    listed = ", ".join(columns) or "none"
    if any(separator in listed for separator in ";\t|"):
        return f"{listed[:200]} (which commas separate)"
    return listed if len(listed) <= 200 else f"{listed[:200]}... (is that the line that names them?)"


def _lines(path: str, name: str) -> Iterator[str]:
    """The lines of a file, without their ends; the last one, which has none, too."""
    parts, size = [], 0
    for block in read_utf8(path, name):
        *lines, rest = block.split("\n")
        for line in lines:
            yield "".join([*parts, line])
            parts, size = [], 0
        parts.append(rest)
        size += len(rest)
        if size > LONGEST_LINE:
            raise UserError(f"{name} has a line of more than {LONGEST_LINE:,} characters; break it up")
    yield "".join(parts)
