"""Interactive sampling: continues the lines that are typed (interactive=true of sample.py)."""

import itertools
import sys
from contextlib import suppress

from common.console import print_text
from common.errors import UserError
from data.tokenizer import Tokenizer
from generation.config import SamplingConfig
from generation.engine import generate
from generation.prompts import encode_prompts, show
from model.gpt import GPT


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
        "type the beginning of a sample; an empty line continues the last sample", stderr=True
    )
    print_text("Ctrl-C stops the sample, Ctrl-D quits", stderr=True)
    text = ""  # the last prompt and its sample
    for seed in itertools.count(first_seed):
        try:
            line = input(mark)
            prompt = line or text
            requests = encode_prompts(tokenizer, [prompt], None, 1, seed)
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
