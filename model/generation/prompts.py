"""Prompt files, and the output file of a batch of samples."""

import json
import re
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from common.errors import UserError
from common.files import read_small_file
from model.generation.config import unescape

MAX_PROMPT_FILE_BYTES = 2**26


def read_prompt(path: str, key: str = "prompt_file") -> str:
    """Read the exact text of a file. key: config key for error messages. Raises UserError if it cannot be read."""
    return read_small_file(path, f"{key}={path}", MAX_PROMPT_FILE_BYTES)


def read_prompts(path: str) -> list[str]:
    """Read one prompt per non-empty line, replacing escape sequences. In a .jsonl file: the "prompt" of each object.

    Raises UserError if the file cannot be read or a line has no prompt.
    """
    if Path(path).suffix.lower() in (".json", ".csv", ".parquet"):
        raise UserError(f"prompts={path} must be a text file with one prompt per line, or a .jsonl file; convert it")
    text = read_prompt(path, "prompts").removeprefix("\ufeff")  # byte order mark
    # str.splitlines would also split at form feeds and U+2028, which may be part of a prompt.
    lines = [(number, line) for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1) if line.strip()]
    if not lines:
        raise UserError(f"prompts={path} contains no prompts; set a file with one prompt per line")
    if Path(path).suffix.lower() != ".jsonl":
        return [unescape(line) for _, line in lines]
    return [_parse_prompt(line, f"line {number} of prompts={path}") for number, line in lines]


def _parse_prompt(line: str, name: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, LookupError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise UserError(f'{name} has no string "prompt"; write it as {{"prompt": "..."}}')
    return prompt


def check_output(out: str, samples: Sequence[tuple[str, int]], settings: str) -> tuple[int, int | None]:
    """Find the samples that an interrupted command has written to `out`: their number and their size in bytes.

    samples: prompt and seed of each sample of this command. settings: hash of its settings. An incomplete last line
    does not count. Returns (0, None) if there is no file. Raises UserError if `out` cannot be created, or has other
    content.
    """
    path = Path(out)
    if not path.exists():
        if not path.parent.is_dir():
            raise UserError(f"out={out} is in a folder that does not exist; create it, or set another file")
        return 0, None
    if not samples or not path.is_file():
        raise UserError(f"out={out} exists; set a new file")
    count = size = 0
    with open(path, "rb") as file:
        for line in file:
            if count == len(samples) or not _is_sample(line, *samples[count], settings):
                raise UserError(f"out={out} exists with other prompts, seeds or settings; set a new file")
            if line.endswith(b"\n"):
                count, size = count + 1, size + len(line)
    return count, size


def _is_sample(line: bytes, prompt: str, seed: int, settings: str) -> bool:
    """Whether a line, which may be incomplete, describes the sample with this prompt, seed and hash of settings."""
    start = json.dumps({"prompt": prompt, "text": ""}, ensure_ascii=False).removesuffix('"}').encode()
    has_settings = f', "seed": {seed}, '.encode() in line and line.endswith(f'"settings": "{settings}"}}\n'.encode())
    return line[: len(start)] == start[: len(line)] and (has_settings or not line.endswith(b"\n"))


@contextmanager
def open_output(out: str | None, size: int | None = None) -> Generator[TextIO]:
    """Context manager: a line-buffered file, or stdout if `out` is None. A file that stays empty is removed.

    size: keep this many bytes of the existing file; None: the file is new.
    """
    if out is None:
        yield sys.stdout
        return
    # Two processes that continue the same file write the same bytes at the same positions.
    with open(out, "x" if size is None else "r+", encoding="utf-8", buffering=1) as file:
        try:
            file.seek(size or 0)
            file.truncate()
            yield file
        finally:
            if file.tell() == 0:
                Path(out).unlink()
