"""Prompt files, and the output file of a command."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import decode_text, read_text
from common.settings import unescape

JSON_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines", ".json")  # one object per line


def decode_typed(text: str) -> str:
    """Decode a prompt of the command line or the terminal, in which Python escapes bytes that it cannot decode."""
    return decode_text(text.encode(errors="surrogateescape"), "the prompt")


def read_prompts(path: str) -> list[str]:
    """Read the prompts of a file: its lines, with escape sequences, or the "prompt" of each object in a .jsonl."""
    text = read_text(path, f"prompts={path}")
    # str.splitlines would also split at form feeds and U+2028, which may be part of a prompt.
    lines = [line for line in re.split(r"\r\n|\r|\n", text) if line.strip()]
    if not lines:
        raise UserError(f"prompts={path} contains no prompts; set a file with one prompt per line")
    if not path.lower().endswith(JSON_SUFFIXES):
        return unescape(lines)
    prompts: list[Any] = [None]
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        prompts = [json.loads(line)["prompt"] for line in lines]
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise UserError(
            f'a line of prompts={path} is not of the form {{"prompt": "..."}}; correct it'
        )
    return prompts


def check_output(out: str | None) -> None:
    """Raise UserError if the file `out` exists, or if its folder does not exist."""
    if out is not None and (Path(out).exists() or not Path(out).parent.is_dir()):
        raise UserError(
            f"out={out} exists, or its folder does not; set a new file in a folder that exists"
        )
