"""Write text with a trained model.

    python sample.py                                      from the newest run
    python sample.py run=mine prompt="def main(x):" num_samples=3 temperature=0.8 top_k=50 seed=1
    python sample.py interactive=true                     continues what you type
    python sample.py prompts=FILE out=FILE.jsonl          a text for each line of a file
    python sample.py data.path=FILE loss=true             what a text costs the model: loss, perplexity, bits per byte

the keys most used:
  run=NAME              a run below runs/; last is the newest
  prompt=TEXT           what the text starts with; prompt_file=FILE reads it from a file
  prompts=FILE          many: one a line, or .jsonl with {"prompt": ...}; out=FILE.jsonl keeps what they come to
  interactive=true      continues each line that is typed
  loss=true             measures data.path=FILE instead of writing; out=FILE.jsonl keeps each document's numbers
  num_samples=N         how many texts of each prompt, batch_size=N of them side by side
  max_new_tokens=N      how long each may grow
  temperature=X         0 is greedy, 1 is the model's own distribution
  top_k=N, top_p=X, min_p=X   leave only the likeliest tokens
  repetition_penalty=X  above 1: what is in the text already becomes less likely
  stop=TEXT             end ahead of this, \\n being a new line; stop='["a", "b"]' ahead of either
  seed=N                decides the text
  checkpoint=last       instead of the best
  dtype=bfloat16        weights in half the memory, read in half the time; float16 on a CPU as well
  attention_map=true    draws where each head looks in the prompt, in runs/NAME/attention/

In Python: from sample import load, stream
"""

if __name__ == "__main__":  # ahead of the imports below, which take seconds: a wrong word is answered at once
    from configs.cli import parse_config

    config = parse_config("sample", __doc__)

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from pathlib import Path

import tiktoken
import torch
from rich.console import Console

from common.console import printable
from common.errors import UserError
from common.run_dir import find_run
from configs.cli import config_from_python, exit_fast
from configs.cli import run_main as run_main
from configs.schema import Sample
from data import sources, tokenizer
from model import SamplingConfig
from model.generation.attention_maps import attention_maps, entropy, uniform_entropy
from model.generation.attention_plots import entropy_table, plot_maps, write_entropies
from model.generation.config import escape, unescape
from model.generation.engine import Prompt, TextChunk, generate
from model.generation.load import load_for_sampling
from model.generation.perplexity import TextLoss, iter_losses
from model.generation.perplexity_table import PerplexityTable
from model.generation.progress import GenerationProgress
from model.generation.prompts import check_out, open_output, read_prompt, read_prompts
from model.gpt import GPT
from training.device import resolve_device, resolve_dtype

MOST_TOKENS = 256  # of an attention map: with more, a weight is less than a pixel


def main(config: Sample) -> int:
    if config.out is not None:
        check_out(config.out)
    documents = sources.documents(config.data) if config.loss else []
    if config.prompts is not None:
        prompts = read_prompts(config.prompts)
    else:
        prompts = [unescape(config.prompt or "") if config.prompt_file is None else read_prompt(config.prompt_file)]
    model, encoding, about = opened(config, texts=min(config.batch_size, len(prompts) * config.num_samples))
    print(f"{about}, seed {config.seed}", file=sys.stderr)
    if config.loss:
        return score(config, model, encoding, documents)
    if config.interactive:
        return converse(config, model, encoding)
    if config.prompts is not None:
        return write_many(config, model, encoding, prompts)
    return write(config, model, encoding, prompts[0])


def load(run: str = "last", **settings) -> tuple[GPT, tiktoken.Encoding]:
    """The model and the tokenizer of a run. settings: checkpoint, device, dtype, attention, as on the command line.

    The model is for writing and for its logits: its linear layers are not those that train. Raises
    UserError for what is not there.
    """
    _refuse_others("load", settings, {"checkpoint", "device", "dtype", "attention"})
    return opened(config_from_python("sample", run=run, **settings), texts=1)[:2]


def stream(model: GPT, encoding: tiktoken.Encoding, prompt: str = "", **settings) -> Iterator[str]:
    """What the model writes behind the prompt, in pieces, as they are made: together they are the text.

    settings: temperature, max_new_tokens, seed and their kin, as on the command line. Raises UserError.
    """
    _refuse_others("stream", settings, {"seed", *(field.name for field in fields(SamplingConfig))})
    if "stop" in settings:
        settings["stop"] = escape(settings["stop"])  # strings are exact in Python
    config = config_from_python("sample", **settings)
    for piece in begin_texts(config, model, encoding, [prompt]):
        yield piece.text


def _refuse_others(function: str, settings: dict, allowed: set[str]) -> None:
    if unknown := set(settings) - allowed:
        raise UserError(f"{function} takes no {', '.join(sorted(unknown))}; set any of {', '.join(sorted(allowed))}")


def opened(config: Sample, texts: int) -> tuple[GPT, tiktoken.Encoding, str]:
    """Model, tokenizer and what they are: see model/generation/load.py. texts: how many are written side by side."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device, trains=False)
    return load_for_sampling(config.run, config.checkpoint, device, dtype, config.attention, texts)


def begin_texts(config: Sample, model: GPT, encoding: tiktoken.Encoding, prompts: list[str]) -> Iterator[TextChunk]:
    """num_samples texts behind each prompt, as `generate` gives them: the first has config.seed, the next one more, ...

    Raises UserError at once where the tokenizer cannot take a prompt.
    """
    texts = []
    for number, prompt in enumerate(prompts, start=1):
        if not isinstance(prompt, str):
            raise UserError(f"the prompt is to be a text, not {type(prompt).__name__}; set '' for none")
        where = "the prompt" if config.prompts is None else f"prompt {number} of {config.prompts}"
        tokens = tokenizer.encode(encoding, prompt, where).tolist() if prompt else tokenizer.initial_tokens(encoding)
        texts += [Prompt(tokens, seed_of(config, len(texts) + i)) for i in range(config.num_samples)]
    reads = model.config.block_size
    if config.prompts is None and len(tokens) > reads:
        print(f"of the prompt's {len(tokens):,} tokens the last {reads:,} are read", file=sys.stderr)
    end = tokenizer.end_of_text(encoding)
    return generate(model, encoding, texts, config, end=end, rows=config.batch_size, graphs=config.cuda_graphs)


def seed_of(config: Sample, number: int) -> int:
    return (config.seed + number) % 2**32


def write(config: Sample, model: GPT, encoding: tiktoken.Encoding, prompt: str) -> int:
    """num_samples texts behind one prompt, on the terminal: each as it is made, once those before it have ended."""
    made, ended, current, tokens = [prompt] * config.num_samples, set(), 0, 0

    def begin(number: int) -> None:
        if config.num_samples > 1:
            print(f"--- {number + 1} ---", file=sys.stderr)
        show(made[number])

    began = time.perf_counter()
    pieces = begin_texts(config, model, encoding, [prompt])
    begin(0)
    try:
        for piece in pieces:
            made[piece.index] += piece.text
            if piece.index == current:
                show(piece.text)
            if piece.ended:
                ended.add(piece.index)
                tokens += piece.tokens
            while current in ended and current + 1 < config.num_samples:
                show("\n")
                current += 1
                begin(current)
    finally:
        show("\n")
    seconds = time.perf_counter() - began
    print(f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s", file=sys.stderr)
    if config.attention_map:
        look_inside(model, encoding, prompt, made[0], find_run(config.run) / "attention")
    return 0


def write_many(config: Sample, model: GPT, encoding: tiktoken.Encoding, prompts: list[str]) -> int:
    """num_samples texts behind each prompt: a JSON object a line, in their order, to `out` or the terminal."""
    texts = [prompt for prompt in prompts for _ in range(config.num_samples)]
    made, ended, written, tokens = [""] * len(texts), {}, 0, [0] * len(texts)
    most = config.max_new_tokens
    pieces = begin_texts(config, model, encoding, prompts)
    with open_output(config.out) as file, GenerationProgress(len(texts), len(texts) * most, "texts") as progress:
        try:
            for piece in pieces:
                new, unused = piece.tokens - tokens[piece.index], most - piece.tokens if piece.ended else 0
                progress.add(new, share=new + unused, ended=piece.ended is not None)
                made[piece.index] += piece.text
                tokens[piece.index] = piece.tokens
                if piece.ended:
                    ended[piece.index] = piece.ended
                while written in ended:
                    file.write(result(config, texts, made, tokens, ended, written))
                    written += 1
        except KeyboardInterrupt:  # what ended before another that did not is written as well
            for number in sorted(number for number in ended if number >= written):
                file.write(result(config, texts, made, tokens, ended, number))
            kept = f"; {len(ended):,} of {len(texts):,} texts are in {config.out}" if config.out and ended else ""
            raise KeyboardInterrupt(f"interrupted{kept}") from None
    print(progress.summary() + (f"\nwritten  {config.out}" if config.out is not None else ""), file=sys.stderr)
    return 0


def result(config: Sample, texts: list, made: list, tokens: list, ended: dict, number: int) -> str:
    """A line of what write_many writes. ended: as Piece.ended."""
    about = {"prompt": texts[number], "text": made[number], "seed": seed_of(config, number)}
    return json.dumps(about | {"tokens": tokens[number], "ended": ended[number]}, ensure_ascii=False) + "\n"


def converse(config: Sample, model: GPT, encoding: tiktoken.Encoding) -> int:
    """Continues each line that is typed, and behind an empty one the last text."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 (arrow keys in what is typed)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text are refused like any other prompt
    print("type how a text begins; an empty line goes on with it; Ctrl-C stops a text, Ctrl-D ends", file=sys.stderr)
    text = ""
    for number in range(2**32):
        try:
            line = input("> " if sys.stdin.isatty() else "")
            pieces = begin_texts(replace(config, seed=seed_of(config, number)), model, encoding, [line or text])
            text = line or text
            show(line)
            for piece in pieces:
                text += piece.text
                show(piece.text)
            show("\n")
        except KeyboardInterrupt:
            show("\n")
        except UserError as error:
            print(f"sample.py: {error}", file=sys.stderr)
        except EOFError:
            show("\n" if sys.stdin.isatty() else "")
            break
    return 0


def score(config: Sample, model: GPT, encoding: tiktoken.Encoding, documents: list[str]) -> int:
    """Loss, perplexity and bits per byte of the text that `data` names: each document's, and the whole's."""
    if config.data.path is None:
        print(
            f"measuring {config.data.label}: {len(documents):,} documents; data.path=FILE for another", file=sys.stderr
        )
    table, total = PerplexityTable(len(documents)), TextLoss()
    count = sum(len(tokenizer.encode(encoding, text, f"document {i}")) for i, text in enumerate(documents, start=1))
    with ExitStack() as stack:
        file = stack.enter_context(open_output(config.out)) if config.out is not None else None
        progress = stack.enter_context(GenerationProgress(len(documents), count, "documents"))
        left, each = iter(documents), TextLoss()
        for part, to_come in iter_losses(model, encoding, documents):
            each += part
            progress.add(part.tokens, share=part.tokens, ended=to_come == 0)
            if to_come == 0:
                table.add(next(left), each.numbers())
                if file is not None:
                    file.write(json.dumps({"document": progress.done, **each.numbers()}) + "\n")
                total, each = total + each, TextLoss()
    table.print(total.numbers())
    print(progress.summary() + (f"\nwritten  {config.out}" if file is not None else ""), file=sys.stderr)
    return 0


def look_inside(model: GPT, encoding: tiktoken.Encoding, prompt: str, text: str, folder: Path) -> None:
    """Draw where each head looks in the prompt, or, where that is one token, in the text that begins with it.

    And say how widely. Raises UserError where the text is of one token too.
    """
    tokens = tokenizer.encode(encoding, prompt).tolist()
    if len(tokens) < 2:
        before = [] if prompt else tokenizer.initial_tokens(encoding)  # what the model began with
        tokens = before + tokenizer.encode(encoding, text).tolist()
    if len(tokens) < 2:
        raise UserError("attention_map=true needs a text of two tokens or more; set a longer prompt or max_new_tokens")
    T = min(len(tokens), model.config.block_size, MOST_TOKENS)
    if len(tokens) > T:
        limit = "a picture can show" if T == MOST_TOKENS else "the model sees at once"
        print(f"the attention map is of the last {T} of {len(tokens):,} tokens, as many as {limit}", file=sys.stderr)
    shown = tokens[-T:]
    weights = attention_maps(model, torch.tensor([shown], device=model.wte.weight.device))
    entropies, uniform = entropy(weights).numpy(), uniform_entropy(T)
    plot_maps(weights.numpy(), entropies, tokenizer.token_strings(encoding, shown), folder)
    write_entropies(entropies, uniform, folder / "entropies.csv")
    Console(stderr=True, highlight=False).print(entropy_table(entropies, uniform))
    print(f"written  {folder}/layer-*.png, overview.png, entropies.csv", file=sys.stderr)


def show(text: str) -> None:
    """On the terminal, at once."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


if __name__ == "__main__":
    exit_fast(run_main(main, config))
