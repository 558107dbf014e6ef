"""Prompts of sample.py: from the command line, from files, and typed."""

import itertools
import json
import re
import sys
from contextlib import suppress

from common.console import print_text, show
from common.errors import UserError
from common.files import read_text
from common.settings import unescape
from data.tokenizer import Tokenizer, encode
from generation.config import SamplingConfig
from generation.engine import Prompt, generate
from model.gpt import GPT

JSON_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines", ".json")  # one object per line


def load_prompts(prompt: str, prompt_file: str | None, prompts: str | None) -> list[str]:
    """The prompts that the settings of sample.py name. Without any, one empty prompt."""
    if prompts is not None:
        return read_prompts(prompts)
    if prompt_file is not None:
        return [read_text(prompt_file)]
    return [unescape(prompt)]


def read_prompts(path: str) -> list[str]:
    """Read the prompts of a file: its lines, or the "prompt" of each object in a .jsonl.

    Lines can have escape sequences. Empty lines are skipped.
    """
    # str.splitlines would also split at form feeds and U+2028, which may be part of a prompt.
    lines = [line for line in re.split(r"\r\n|\r|\n", read_text(path)) if line.strip()]
    if not lines:
        raise UserError(f"prompts={path} contains no prompts; set a file with one prompt per line")
    if not path.lower().endswith(JSON_SUFFIXES):
        return unescape(lines)
    try:
        prompts = [json.loads(line)["prompt"] for line in lines]
        "".join(prompts)  # a TypeError if one is not a string
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UserError(
            f'a line of prompts={path} is not of the form {{"prompt": "..."}}; correct it'
        ) from None
    return prompts


def encode_prompts(
    tokenizer: Tokenizer, texts: list[str], num_samples: int, seed: int
) -> list[Prompt]:
    """Encode prompts, and repeat each num_samples times with different seeds.

    An empty prompt becomes the token from which samples start.
    seed: of the first sample. The next sample has seed + 1, and so on.
    Raises UserError if a character has no token.
    """
    prompts = []
    for number, text in enumerate(texts, start=1):
        tokens = encode(tokenizer, text, f"prompt {number}").tolist() or [tokenizer.start_token]
        for _ in range(num_samples):
            prompts.append(Prompt(tokens, seed + len(prompts)))
    return prompts


def continue_typed_lines(
    model: GPT, tokenizer: Tokenizer, sampling: SamplingConfig, first_seed: int
) -> None:
    """Continue each line of stdin. An empty line continues the last sample.

    Ctrl-C ends a sample. Ctrl-D, or the end of the input, ends the function.
    """
    with suppress(ImportError):  # Windows has no readline
        import readline  # noqa: F401 (line editing with the arrow keys)
    # UTF-8 in any locale, without a byte order mark. newline=None: a line can end with \r\n.
    sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape", newline=None)
    mark = "> " if sys.stdin.isatty() else ""
    print_text(
        "type the beginning of a sample; an empty line continues the last sample\n"
        "Ctrl-C stops the sample, Ctrl-D quits",
        stderr=True,
    )
    text = ""  # the last prompt and its sample
    for seed in itertools.count(first_seed):
        try:
            line = input(mark)
            prompt = line or text
            requests = encode_prompts(tokenizer, [prompt], 1, seed)
            text = prompt
            show(line)
            for chunk in generate(model, tokenizer, requests, sampling, 1):
                text += chunk.text
                show(chunk.text)
            show("\n")
        except KeyboardInterrupt as interrupt:
            if interrupt.args:  # another signal than Ctrl-C
                raise
            show("\n")
        except UserError as error:
            print_text(f"sample.py: {error}", stderr=True)
        except EOFError:
            break
    if mark:
        show("\n")
