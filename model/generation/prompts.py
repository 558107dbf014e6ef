"""Prompt files, and the output file of a command."""

import json
import re
from contextlib import suppress
from pathlib import Path

from common.errors import UserError
from common.files import read_small_file
from model.generation.config import unescape

MAX_PROMPT_FILE_BYTES = 2**26


def read_prompt(path: str) -> str:
    """Read the exact text of a prompt_file. Raises UserError."""
    return read_small_file(path, f"prompt_file={path}", MAX_PROMPT_FILE_BYTES)


def read_prompts(path: str) -> list[str]:
    """Read one prompt per non-empty line, replacing escape sequences. In a .jsonl file: the "prompt" of each object.

    Raises UserError if the file cannot be read or a line has no prompt.
    """
    text = read_small_file(path, f"prompts={path}", MAX_PROMPT_FILE_BYTES).removeprefix("\ufeff")  # byte order mark
    # str.splitlines would also split at form feeds and U+2028, which may be part of a prompt.
    lines = [(number, line) for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1) if line.strip()]
    if not lines:
        raise UserError(f"prompts={path} contains no prompts; set a file with one prompt per line")
    if Path(path).suffix.lower() != ".jsonl":
        return [unescape(line) for _, line in lines]
    return [_parse_prompt(line, f"line {number} of prompts={path}") for number, line in lines]


def _parse_prompt(line: str, name: str) -> str:
    with suppress(ValueError, LookupError, TypeError):
        if isinstance(prompt := json.loads(line)["prompt"], str):
            return prompt
    raise UserError(f'{name} has no string "prompt"; write it as {{"prompt": "..."}}')


def check_output(out: str | None) -> None:
    """Raises UserError if the file `out` exists, or if its folder does not exist."""
    if out is not None and Path(out).exists():
        raise UserError(f"out={out} exists; set a new file")
    if out is not None and not Path(out).parent.is_dir():
        raise UserError(f"out={out} is in a folder that does not exist; create it, or set another file")
