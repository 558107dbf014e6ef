"""Files of what texts are to begin with, and of what comes of them."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from common.errors import UserError
from model.generation.config import unescape


def read_prompt(name: str, key: str = "prompt_file", encoding: str = "utf-8") -> str:
    """The text of a file, to the letter. Raises UserError, with the key that names it, where it cannot be read."""
    try:
        with open(name, encoding=encoding, newline="") as file:
            return file.read()
    except OSError as error:
        raise UserError(f"{key}={name} cannot be read ({error.strerror}); set a text file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{key}={name} is not UTF-8 (byte {error.start}); save it as UTF-8") from None


def read_prompts(name: str) -> list[str]:
    """One from each line that is not empty; of a .jsonl file, each object's "prompt". Raises UserError."""
    if Path(name).suffix.lower() in (".json", ".csv", ".parquet"):
        raise UserError(f"prompts={name} is to be a text with one a line, or .jsonl; write it as one of them")
    text = read_prompt(name, "prompts", "utf-8-sig")
    # Not splitlines, for which characters that stand within a line, or a string of JSON, end it too.
    lines = [(number, line) for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1) if line.strip()]
    if not lines:
        raise UserError(f"prompts={name} has no line with a prompt in it; set a file with one a line")
    if Path(name).suffix.lower() != ".jsonl":
        return [unescape(line) for _, line in lines]
    return [_prompt_of(line, f"line {number} of prompts={name}") for number, line in lines]


def _prompt_of(line: str, where: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, LookupError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise UserError(f'{where} is no object with a text as "prompt"; write it as {{"prompt": "..."}}')
    return prompt


def check_out(out: str) -> None:
    """Raises UserError for what cannot become a new file."""
    path = Path(out)
    if path.exists():
        what = "is a folder; name a file" if path.is_dir() else "exists; name another file, or remove it"
        raise UserError(f"out={out} {what}")
    if not path.parent.is_dir():
        raise UserError(f"out={out} would lie in a folder that is not there; make it, or name another file")


@contextmanager
def open_output(out: str | None) -> Iterator[TextIO]:
    """Where lines of JSON go, each at once: the file `out`, or the terminal."""
    if out is None:
        yield sys.stdout
    else:
        with open(out, "x", encoding="utf-8", buffering=1) as file:
            try:
                yield file
            finally:
                if file.tell() == 0:  # interrupted ahead of the first
                    Path(out).unlink()
