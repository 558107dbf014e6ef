"""Generate text with a trained model.

    python sample.py                                      one sample, from the newest run
    python sample.py run=mine prompt="def main(x):" num_samples=3 temperature=0.8 top_k=50 seed=1
    python sample.py interactive=true                     continue the lines that you type
    python sample.py prompts=FILE out=FILE.jsonl          a sample for each line of a file

most used keys:
  run=NAME              a run in runs/; last is the newest; hf:FOLDER is a transformers model
  prompt=TEXT           the beginning of the sample; prompt_file=FILE reads it from a file
  prompts=FILE          one prompt per line, or .jsonl with {"prompt": ...}; out=FILE.jsonl saves
  interactive=true      continue each line that you type
  num_samples=N         samples per prompt, generated in batches of batch_size=N
  max_new_tokens=N      maximum length of a sample
  temperature=X         0 is greedy decoding, 1 samples from the model's distribution
  top_k=N, top_p=X, min_p=X   sample only from the most likely tokens
  stop=TEXT             end the sample before this string; several: stop='["a", "b"]'
  seed=N                the same seed gives the same sample
  checkpoint=last       instead of best
  dtype=bfloat16        half the memory for weights, and faster; int8 is the fastest on x86 CPUs
  attention_map=true    plot the attention weights for the prompt, or for a sample without a prompt

In prompt, prompts and stop, \\n is a newline, \\r a carriage return, \\t a tab and \\\\ a backslash.
In Python: load_run in generation/load.py, and generate in generation/engine.py.
"""

if __name__ == "__main__":  # before the slow imports below, so that a typo is reported immediately
    from configs.cli import parse_config

    config = parse_config("sample", __doc__)

import codecs
import json
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from common.console import ProgressBar, print_text
from common.device import resolve_device, resolve_dtype
from common.errors import UserError, printable
from common.files import atomic_write, read_text
from common.settings import unescape
from configs.schema import SampleConfig
from data.tokenizer import Tokenizer, encode
from generation.attention_plots import draw_attention_maps
from generation.engine import Prompt, TextChunk, generate
from generation.load import find_pretrained_folder, load_for_sampling
from generation.prompts import check_output, decode_typed, read_prompts
from model.gpt import GPT
from training.signals import run_process


def main(config: SampleConfig) -> int:
    config = replace(config, stop=unescape(config.stop))
    prompts = load_prompts(config)
    check_output(config.out)
    device, rows = (
        resolve_device(config.device),
        min(config.batch_size, len(prompts) * config.num_samples),
    )
    dtype = resolve_dtype(config.dtype, device, trains=False)
    model, tokenizer, summary = load_for_sampling(
        config.run, config.checkpoint, device, dtype, config.attention, rows
    )
    print_text(f"{summary}, seed {config.seed}", stderr=True)
    if config.interactive:
        run_interactive(config, model, tokenizer)
    elif config.prompts is not None:
        run_batch(config, model, tokenizer, prompts)
    elif config.attention_map:
        text = prompts[0] or run_prompt(config, model, tokenizer, "")
        draw_attention_maps(
            model, tokenizer, text, find_pretrained_folder(config.run) / "attention"
        )
    else:
        run_prompt(config, model, tokenizer, prompts[0])
    return 0


def load_prompts(config: SampleConfig) -> list[str]:
    if config.prompts is not None:
        return read_prompts(config.prompts)
    if config.prompt_file is not None:
        return [read_text(config.prompt_file, f"prompt_file={config.prompt_file}")]
    return [decode_typed(unescape(config.prompt) or "")]


def generate_texts(
    config: SampleConfig, model: GPT, tokenizer: Tokenizer, prompts: list[str]
) -> Iterator[TextChunk]:
    """Generate num_samples samples of each prompt, in chunks, in order. Raises UserError for an invalid prompt."""
    block_size, longest, requests = model.config.block_size, 0, []
    for number, prompt in enumerate(prompts, start=1):
        name = "the prompt" if config.prompts is None else f"prompt {number} of {config.prompts}"
        tokens = encode(tokenizer, prompt, name).tolist() if prompt else [tokenizer.start_token]
        longest = max(longest, len(tokens))
        requests += [
            Prompt(tokens, sample_seed(config, len(requests) + i))
            for i in range(config.num_samples)
        ]
    if longest > block_size:
        print_text(
            f"the model reads the last {block_size:,} of up to {longest:,} tokens of a prompt",
            stderr=True,
        )
    return in_prompt_order(generate(model, tokenizer, requests, config, config.batch_size))


def in_prompt_order(chunks: Iterable[TextChunk]) -> Iterator[TextChunk]:
    """Yield the chunks of the first sample as they arrive, then the chunks of the second sample, and so on."""
    buffers: defaultdict[int, deque[TextChunk]] = defaultdict(deque)
    current = 0
    for chunk in chunks:
        buffers[chunk.index].append(chunk)
        while buffers[current]:
            yield (oldest := buffers[current].popleft())
            current += oldest.finish_reason is not None


def sample_seed(config: SampleConfig, index: int) -> int:
    return (config.seed + index) % 2**32


def run_prompt(config: SampleConfig, model: GPT, tokenizer: Tokenizer, prompt: str) -> str:
    """Generate num_samples samples of one prompt in batches, and print them one after another. Returns the first."""
    first_sample, tokens, started = "", 0, time.perf_counter()
    chunks = generate_texts(config, model, tokenizer, [prompt])
    for number in range(1, config.num_samples + 1):
        if config.num_samples > 1:
            print(f"--- {number} ---", file=sys.stderr)
        show(prompt)
        try:
            for chunk in chunks:
                show(chunk.text)
                if number == 1:
                    first_sample += chunk.text
                if chunk.finish_reason is not None:
                    tokens += chunk.n_tokens
                    break
        finally:
            show("\n")
    print_text(format_speed(tokens, started), stderr=True)
    return first_sample


def run_batch(config: SampleConfig, model: GPT, tokenizer: Tokenizer, prompts: list[str]) -> None:
    """Generate num_samples samples of each prompt. Write one JSON object per sample to `out` or stdout, in order."""
    inputs, lines = [prompt for prompt in prompts for _ in range(config.num_samples)], []
    text, tokens, started = "", 0, time.perf_counter()
    # Other encodings than UTF-8 lack characters, so the JSON has ASCII escapes.
    needs_ascii = config.out is None and codecs.lookup(sys.stdout.encoding).name != "utf-8"
    with ProgressBar(len(inputs), stderr=True) as bar:
        for chunk in generate_texts(config, model, tokenizer, prompts):
            text += chunk.text
            progress = chunk.n_tokens / max(1, config.max_new_tokens)  # of this sample
            if chunk.finish_reason is not None:
                sample = {
                    "prompt": inputs[chunk.index],
                    "text": text,
                    "seed": sample_seed(config, chunk.index),
                }
                sample |= {"tokens": chunk.n_tokens, "ended": chunk.finish_reason}
                lines.append(json.dumps(sample, ensure_ascii=needs_ascii) + "\n")
                if config.out is None:
                    show(lines[-1])
                text, tokens, progress = "", tokens + chunk.n_tokens, 1
            bar.show(chunk.index + progress, f"sample {chunk.index + 1:,} of {len(inputs):,}")
    print_text(format_speed(tokens, started), stderr=True)
    if config.out is not None:
        atomic_write(Path(config.out), "".join(lines))
        print_text(f"written  {config.out}", stderr=True)


def run_interactive(config: SampleConfig, model: GPT, tokenizer: Tokenizer) -> None:
    """Continue each line that is typed; an empty line continues the last sample."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 (line editing with the arrow keys)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(
            encoding="utf-8", errors="surrogateescape", newline=None
        )  # a line can end with \r\n
    print_text(
        "type the beginning of a sample; an empty line continues the last sample", stderr=True
    )
    print_text("Ctrl-C stops the sample, Ctrl-D quits", stderr=True)
    text = ""
    for index in range(2**32):
        try:
            line = decode_typed(input("> " if sys.stdin.isatty() else ""))
            settings = replace(config, seed=sample_seed(config, index))
            chunks = generate_texts(settings, model, tokenizer, [line or text])
            text = line or text
            show(line)
            for chunk in chunks:
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
            show("\n" if sys.stdin.isatty() else "")
            break


def format_speed(tokens: int, started: float) -> str:
    seconds = time.perf_counter() - started
    return f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s"


def show(text: str) -> None:
    """Print text immediately, without a newline. On a terminal, control characters are replaced."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


if __name__ == "__main__":
    run_process(main, config)
