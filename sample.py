"""Generate text with a trained model.

    python sample.py                                      one sample, from the newest run
    python sample.py run=mine prompt="def main(x):" num_samples=3 temperature=1 top_p=0.9 seed=1
    python sample.py interactive=true                     continue the lines that you type
    python sample.py prompts=FILE out=FILE.jsonl          a sample for each line of a file

most used keys:
  run=NAME              a run in runs/; last is the newest; hf:FOLDER is a transformers model
  prompt=TEXT           the beginning of the sample; prompt_file=FILE reads it from a file
  prompts=FILE          one prompt per line, or .jsonl with {"prompt": ...}; out=FILE.jsonl saves
  num_samples=N         samples per prompt, generated in batches of batch_size=N
  max_new_tokens=N      maximum length of a sample
  temperature=X         0 is greedy decoding, 1 samples from the model's distribution
  top_k=N, top_p=X, min_p=X   sample only from the most likely tokens
  stop=TEXT             end the sample before this string; several: stop='["a", "b"]'
  seed=N                the same seed gives the same sample
  checkpoint=last       instead of best
  dtype=bfloat16        smaller weights, and faster; int8 is the fastest on x86 CPUs
  attention_map=true    plot the attention weights for the prompt

In prompt, prompts and stop, \\n is a newline, \\r a carriage return, \\t a tab, \\\\ a backslash.
In Python: load_run in generation/load.py, and generate in generation/engine.py.
"""

if __name__ == "__main__":  # before the slow imports below, so that a typo is reported immediately
    from configs.cli import parse_config

    config = parse_config("sample", __doc__)

import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from common.console import ProgressBar, print_text, prints_unicode, show
from common.errors import UserError
from common.files import atomic_write, check_output
from common.process import run_process
from common.settings import unescape
from configs.schema import SampleConfig
from generation.attention_maps import draw_attention
from generation.engine import TextChunk, generate, in_prompt_order
from generation.load import load_for_inference
from generation.prompts import continue_typed_lines, encode_prompts, load_prompts

Samples = Iterator[tuple[int, Iterator[TextChunk]]]  # index and chunks of each sample


def main(config: SampleConfig) -> int:
    prompts = load_prompts(config.prompt, config.prompt_file, config.prompts)
    out = check_output(config.out)
    batch_size = min(config.batch_size, len(prompts) * config.num_samples)
    config = replace(config, stop=unescape(config.stop), batch_size=batch_size)
    model, tokenizer, path = load_for_inference(config, batch_size > 1)
    if config.interactive:
        continue_typed_lines(model, tokenizer, config, config.seed)
        return 0
    requests = encode_prompts(tokenizer, prompts, config.num_samples, config.seed)
    if config.attention_map:
        run = path.parents[1] if path.parent.name == "checkpoints" else path.parent
        picture = run / "attention" / "prompt.png"
        if len(requests[0].tokens) < 2:
            raise UserError("attention_map=true needs at least two tokens; set a longer prompt")
        draw_attention(model, tokenizer, requests[0].tokens, picture)
        print_text(f"written  {picture}", stderr=True)
        return 0
    chunks = generate(model, tokenizer, requests, config, batch_size)
    samples = itertools.groupby(in_prompt_order(chunks), attrgetter("index"))
    started = time.perf_counter()
    if config.prompts is None:
        num_tokens = print_samples(samples, prompts[0], config.num_samples)
    else:
        num_tokens = write_samples(samples, prompts, config, out)
    seconds = time.perf_counter() - started
    print_text(
        f"{num_tokens:,} tokens in {seconds:.1f} s, {num_tokens / seconds:,.0f} tokens/s",
        stderr=True,
    )
    return 0


def print_samples(samples: Samples, prompt: str, num_samples: int) -> int:
    """Print samples of a prompt while they are generated. Returns the number of their tokens."""
    num_tokens = 0
    for index, chunks in samples:
        if num_samples > 1:
            print(f"--- {index + 1} ---", file=sys.stderr)
        show(prompt)
        for chunk in chunks:
            show(chunk.text)
        show("\n")
        num_tokens += chunk.n_tokens
    return num_tokens


def write_samples(
    samples: Samples, prompts: list[str], config: SampleConfig, out: Path | None
) -> int:
    """Write a JSON object per sample to stdout, or to `out` at the end. Returns as above."""
    total = len(prompts) * config.num_samples
    num_tokens = 0
    lines = []
    with ProgressBar(total, stderr=True) as bar:
        for index, sample in samples:
            chunks = list(sample)
            row = {
                "prompt": prompts[index // config.num_samples],
                "text": "".join(chunk.text for chunk in chunks),
                "seed": config.seed + index,
                "tokens": chunks[-1].n_tokens,
                "ended": chunks[-1].finish_reason,
            }
            ensure_ascii = out is None and not prints_unicode()
            lines.append(json.dumps(row, ensure_ascii=ensure_ascii) + "\n")
            if out is None:
                show(lines[-1])
            num_tokens += chunks[-1].n_tokens
            bar.show(index + 1, f"{index + 1:,} of {total:,} samples")
    if out is not None:
        atomic_write(out, "".join(lines))
        print_text(f"written  {config.out}", stderr=True)
    return num_tokens


if __name__ == "__main__":
    run_process(main, config)
