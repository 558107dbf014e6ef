"""Prompt files, and the output file of a command."""

import json
import re
from pathlib import Path

from common.errors import UserError
from model.generation.config import unescape


def read_text(path: str, name: str) -> str:
    """Read a UTF-8 file without changing its line ends. Raises UserError, with `name` in its message."""
    if Path(path).is_char_device():  # such as /dev/zero, which has no end
        raise UserError(f"{name} is a device; set a text file")
    try:
        return Path(path).read_bytes().decode()
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error.strerror}); set a text file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 (byte {error.start}); save it as UTF-8") from None


def read_prompts(path: str) -> list[str]:
    """Read one prompt per non-empty line, replacing escape sequences. In a .jsonl file: the "prompt" of each object.

    Raises UserError if the file cannot be read or a line has no prompt.
    """
    text, prompts = read_text(path, f"prompts={path}").removeprefix("\ufeff"), []  # byte order mark
    # str.splitlines would also split at form feeds and U+2028, which may be part of a prompt.
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        if line.strip():
            is_json = path.lower().endswith(".jsonl")
            prompts.append(_parse_prompt(line, f"line {number} of prompts={path}") if is_json else unescape(line))
    if not prompts:
        raise UserError(f"prompts={path} contains no prompts; set a file with one prompt per line")
    return prompts


def _parse_prompt(line: str, name: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, LookupError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise UserError(f'{name} has no string "prompt"; write it as {{"prompt": "..."}}')
    return prompt


def check_output(out: str | None) -> None:
    """Raise UserError if the file `out` exists, or if its folder does not exist."""
    if out is not None and Path(out).exists():
        raise UserError(f"out={out} exists; set a new file")
    if out is not None and not Path(out).parent.is_dir():
        raise UserError(f"out={out} is in a folder that does not exist; create it, or set another file")
