"""Generate text with a trained model.

    python sample.py                                      one sample, from the newest run
    python sample.py run=mine prompt="def main(x):" num_samples=3 temperature=0.8 top_k=50 seed=1
    python sample.py interactive=true                     continue the lines that you type
    python sample.py prompts=FILE out=FILE.jsonl          a sample for each line of a file
    python sample.py data.path=FILE loss=true             loss, perplexity and bits per byte of documents
    python sample.py questions=FILE.jsonl                 accuracy on multiple-choice questions

most used keys:
  run=NAME              a run in runs/; last is the newest; hf:FOLDER is a model in the format of transformers
  prompt=TEXT           the beginning of the sample; prompt_file=FILE reads it from a file
  prompts=FILE          many prompts: one per line, or .jsonl with {"prompt": ...}; out=FILE.jsonl saves the samples
  interactive=true      continue each line that you type
  loss=true             score data.path=FILE instead of generating; out=FILE.jsonl saves the loss of each document
  questions=FILE.jsonl  multiple-choice questions in the layout of HellaSwag, ARC or docs/generation.md
  num_samples=N         samples per prompt, generated in batches of batch_size=N
  max_new_tokens=N      maximum length of a sample
  temperature=X         0 is greedy decoding, 1 samples from the model's distribution
  top_k=N, top_p=X, min_p=X   sample only from the most likely tokens
  repetition_penalty=X  above 1: tokens that already occur become less likely
  stop=TEXT             end the sample before this string, or before the first of several: stop='["a", "b"]'
  seed=N                the same seed gives the same sample
  checkpoint=last       instead of best
  dtype=bfloat16        half the memory for weights, and faster; int8 is the fastest on x86 CPUs
  attention_map=true    plot the attention weights of each head into runs/NAME/attention/

In prompt, prompts and stop, \\n is a newline, \\t a tab and \\\\ a backslash.
In Python: from sample import load, stream
"""

if __name__ == "__main__":  # before the slow imports below, so that a typo is reported immediately
    from configs.cli import parse_config

    config = parse_config("sample", __doc__)

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import fields, replace

import tiktoken
import torch

from common.console import TABLE_WIDTH, make_console, pluralize
from common.errors import UserError, printable
from common.interrupt import Terminated
from configs.cli import config_from_python, run_process
from configs.schema import Sample
from data.readers import Document, read_documents
from data.sources import resolve_sources
from data.tokenizer import encode, initial_tokens, token_bytes
from model import SamplingConfig
from model.generation.attention_plots import draw_attention_maps
from model.generation.config import unescape
from model.generation.engine import Prompt, TextChunk, generate, in_prompt_order
from model.generation.load import load_for_sampling
from model.generation.multiple_choice import Question, accuracy_table, encode_choices, read_questions, score_choices
from model.generation.perplexity import TextLoss, encode_document, iter_losses, loss_table
from model.generation.progress import GenerationProgress, format_speed
from model.generation.prompts import check_output, open_output, read_prompt, read_prompts
from model.gpt import GPT
from model.pretrained import find_pretrained, find_pretrained_folder
from training.device import resolve_device, resolve_dtype


def main(config: Sample) -> int:
    config = replace(config, stop=unescape(config.stop))
    # read and check all inputs before the model is loaded
    documents = read_documents(resolve_sources(config.data)) if config.loss else []
    questions = read_questions(config.questions) if config.questions is not None else []
    prompts = load_prompts(config)
    n_saved, saved_bytes = 0, None
    if config.out is not None:
        samples = [] if config.loss or questions else list_samples(config, prompts)
        n_saved, saved_bytes = check_output(config.out, samples, hash_settings(config))
    model, tokenizer, description = load_model(config, min(config.batch_size, len(prompts) * config.num_samples))
    print(printable(f"{description}, seed {config.seed}"), file=sys.stderr)
    if config.loss:
        return score_documents(config, model, tokenizer, documents)
    if questions:
        return answer_questions(config, model, tokenizer, questions)
    if config.interactive:
        return run_interactive(config, model, tokenizer)
    if config.prompts is not None:
        return run_batch(config, model, tokenizer, prompts, n_saved, saved_bytes)
    return run_prompt(config, model, tokenizer, prompts[0])


def load(run: str = "last", **settings) -> tuple[GPT, tiktoken.Encoding]:
    """Load the model and the tokenizer of a run, for generation in Python.

    The model is in eval mode. It returns logits, but it cannot be trained. settings: checkpoint, device, dtype and
    attention, as on the command line. Raises UserError, for example if the run does not exist.
    """
    _check_settings("load", settings, {"checkpoint", "device", "dtype", "attention"})
    model, tokenizer, _ = load_model(config_from_python("sample", run=run, **settings), batch_size=1)
    return model, tokenizer


def stream(model: GPT, tokenizer: tiktoken.Encoding, prompt: str = "", **settings) -> Iterator[str]:
    """Generate one sample and yield its text, without the prompt, as it is generated.

    settings: seed, temperature, max_new_tokens, stop and so on, as on the command line. `prompt` and `stop` are exact
    strings, without escape sequences. Raises UserError.
    """
    _check_settings("stream", settings, {"seed", *(field.name for field in fields(SamplingConfig))})
    if not isinstance(prompt, str):
        raise UserError(f"prompt must be a string, not {type(prompt).__name__}; set '' for no prompt")
    config = config_from_python("sample", **settings)
    for chunk in generate_texts(config, model, tokenizer, [prompt]):
        yield chunk.text


def _check_settings(function: str, settings: dict, allowed: set[str]) -> None:
    if unknown := set(settings) - allowed:
        raise UserError(
            f"{function} has no argument {', '.join(sorted(unknown))}; use any of {', '.join(sorted(allowed))}"
        )


def load_prompts(config: Sample) -> list[str]:
    if config.prompts is not None:
        return read_prompts(config.prompts)
    if config.prompt_file is not None:
        return [read_prompt(config.prompt_file)]
    return [unescape(config.prompt) or ""]


def load_model(config: Sample, batch_size: int) -> tuple[GPT, tiktoken.Encoding, str]:
    """Load model, tokenizer and a one-line description of a run: see model/generation/load.py."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device, trains=False)
    return load_for_sampling(config.run, config.checkpoint, device, dtype, config.attention, batch_size)


def generate_texts(
    config: Sample, model: GPT, tokenizer: tiktoken.Encoding, prompts: list[str], first: int = 0
) -> Iterator[TextChunk]:
    """Generate num_samples samples of each prompt, in chunks, from sample `first` on, which has index 0.

    Raises UserError if a prompt cannot be encoded.
    """
    block_size, requests = model.config.block_size, []
    for number, prompt in enumerate(prompts, start=1):
        name = "the prompt" if config.prompts is None else f"prompt {number} of {config.prompts}"
        tokens = encode(tokenizer, prompt, name).tolist() if prompt else initial_tokens(tokenizer)
        if len(tokens) > block_size and config.prompts is None:
            print(f"the model reads the last {block_size:,} of the prompt's {len(tokens):,} tokens", file=sys.stderr)
        requests += [Prompt(tokens, sample_seed(config, len(requests) + i)) for i in range(config.num_samples)]
    return generate(model, tokenizer, requests[first:], config, config.batch_size, config.cuda_graphs)


def sample_seed(config: Sample, index: int) -> int:
    return (config.seed + index) % 2**32


def hash_settings(config: Sample) -> str:
    """Hash of the checkpoint and the sampling settings. A batch continues only with the same ones."""
    checkpoint = find_pretrained(config.run, config.checkpoint)
    settings = {field.name: getattr(config, field.name) for field in fields(SamplingConfig)}
    content = [str(checkpoint.resolve()), checkpoint.stat().st_mtime_ns, config.device, config.dtype, settings]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def list_samples(config: Sample, prompts: list[str]) -> list[tuple[str, int]]:
    """Prompt and seed of each sample of a batch."""
    inputs = [prompt for prompt in prompts for _ in range(config.num_samples)]
    return [(prompt, sample_seed(config, index)) for index, prompt in enumerate(inputs)]


def run_prompt(config: Sample, model: GPT, tokenizer: tiktoken.Encoding, prompt: str) -> int:
    """Generate num_samples samples of one prompt in batches, and print them one after another."""
    first_sample, tokens, started = prompt, 0, time.perf_counter()
    chunks = in_prompt_order(generate_texts(config, model, tokenizer, [prompt]))
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
    print(format_speed(tokens, time.perf_counter() - started), file=sys.stderr)
    if config.attention_map:
        draw_attention_maps(model, tokenizer, prompt, first_sample, find_pretrained_folder(config.run) / "attention")
    return 0


def run_batch(
    config: Sample, model: GPT, tokenizer: tiktoken.Encoding, prompts: list[str], n_saved: int, saved_bytes: int | None
) -> int:
    """Generate num_samples samples of each prompt. Write one JSON object per sample to `out` or stdout, in order.

    n_saved, saved_bytes: samples that an interrupted command has written to `out`, and their size.
    """
    samples, settings, limit = list_samples(config, prompts), hash_settings(config), config.max_new_tokens
    total, written = len(samples), n_saved
    if written == total:
        print(f"{config.out} is complete: {pluralize(total, 'sample')}", file=sys.stderr)
        return 0
    texts, n_tokens = [""] * total, [0] * total
    finished: dict[int, str] = {}  # output lines that wait for earlier samples
    with (
        open_output(config.out, saved_bytes) as file,
        GenerationProgress(total, total * limit, "samples", finished_items=n_saved) as progress,
    ):
        try:
            for chunk in generate_texts(config, model, tokenizer, prompts, first=n_saved):
                index = n_saved + chunk.index
                new_tokens = chunk.n_tokens - n_tokens[index]
                texts[index] += chunk.text
                n_tokens[index] = chunk.n_tokens
                if chunk.finish_reason is None:
                    progress.add(new_tokens)
                    continue
                progress.add(new_tokens, skipped=limit - chunk.n_tokens, finished=True)
                prompt, seed = samples[index]
                sample = {"prompt": prompt, "text": texts[index], "seed": seed}
                sample |= {"tokens": chunk.n_tokens, "ended": chunk.finish_reason, "settings": settings}
                finished[index] = json.dumps(sample, ensure_ascii=False) + "\n"
                while written in finished:
                    file.write(finished.pop(written))
                    written += 1
        except KeyboardInterrupt:
            saved = f"; {written:,} of {total:,} samples are in {config.out}; the same command continues"
            raise KeyboardInterrupt(f"interrupted{saved if config.out and written else ''}") from None
    print_summary(progress, config.out)
    return 0


def run_interactive(config: Sample, model: GPT, tokenizer: tiktoken.Encoding) -> int:
    """Continue each line that is typed; an empty line continues the last sample."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 (line editing with the arrow keys)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # invalid UTF-8 is then refused as an invalid prompt
    print("type the beginning of a sample; an empty line continues the last sample", file=sys.stderr)
    print("Ctrl-C stops the sample, Ctrl-D quits", file=sys.stderr)
    text = ""
    for index in range(2**32):
        try:
            line = input("> " if sys.stdin.isatty() else "")
            settings = replace(config, seed=sample_seed(config, index))
            chunks = generate_texts(settings, model, tokenizer, [line or text])
            text = line or text
            show(line)
            for chunk in chunks:
                text += chunk.text
                show(chunk.text)
            show("\n")
        except Terminated:
            raise
        except KeyboardInterrupt:
            show("\n")
        except UserError as error:
            print(printable(f"sample.py: {error}"), file=sys.stderr)
        except EOFError:
            show("\n" if sys.stdin.isatty() else "")
            break
    return 0


def score_documents(config: Sample, model: GPT, tokenizer: tiktoken.Encoding, documents: list[Document]) -> int:
    """Print the loss, perplexity and bits per byte of each document, and of all documents; save them to `out`."""
    if config.data.path is None:
        count = pluralize(len(documents), "document")
        print(f"scoring {config.data.label}: {count}; set data.path=FILE for other documents", file=sys.stderr)
    encoded = [encode_document(tokenizer, text, f"document {i}") for i, text in enumerate(documents, start=1)]
    bytes_per_token = torch.from_numpy(token_bytes(tokenizer))
    total, losses = sum(int((tokens >= 0).sum()) for tokens in encoded), []
    output = nullcontext() if config.out is None else open_output(config.out)
    with output as file, GenerationProgress(len(documents), total, "documents") as progress:
        for number, tokens in enumerate(encoded, start=1):
            loss = TextLoss()
            for part in iter_losses(model, tokens, bytes_per_token):
                loss += part
                progress.add(part.tokens)
            progress.add(0, finished=True)
            losses.append(loss)
            if file is not None:
                file.write(json.dumps({"document": number, **loss.metrics()}) + "\n")
    make_console(width=TABLE_WIDTH).print(loss_table(documents, losses))
    print_summary(progress, config.out)
    return 0


def answer_questions(config: Sample, model: GPT, tokenizer: tiktoken.Encoding, questions: list[Question]) -> int:
    """Print the accuracy on multiple-choice questions; save the scores of each question to `out`."""
    block_size = model.config.block_size
    encoded = [encode_choices(tokenizer, question, block_size) for question in questions]
    if n_truncated := sum(any(choice.is_truncated for choice in choices) for choices in encoded):
        count = f"{n_truncated:,} of {pluralize(len(questions), 'question')}"
        print(f"the model reads only the end of {count}: model.block_size={block_size}", file=sys.stderr)
    # choices of similar length need little padding; the longest ones show first whether memory suffices
    ordered = sorted((choice for choices in encoded for choice in choices), key=lambda choice: -len(choice.tokens))
    total = sum(len(choice.tokens) - 1 for choice in ordered)
    output = nullcontext() if config.out is None else open_output(config.out)
    with output as file, GenerationProgress(len(ordered), total, "choices") as progress:
        for first in range(0, len(ordered), config.batch_size):
            batch = ordered[first : first + config.batch_size]
            score_choices(model, batch)
            for choice in batch:
                progress.add(len(choice.tokens) - 1, finished=True)
        scores = [[choice.score for choice in choices] for choices in encoded]
        predictions = [question.predict(row) for question, row in zip(questions, scores, strict=True)]
        if file is not None:
            for question, row, prediction in zip(questions, scores, predictions, strict=True):
                line = {"question": question.name, "scores": row, "predictions": prediction, "answer": question.answer}
                file.write(json.dumps(line) + "\n")
    make_console(width=TABLE_WIDTH).print(accuracy_table(questions, predictions))
    print_summary(progress, config.out)
    return 0


def print_summary(progress: GenerationProgress, out: str | None) -> None:
    print(progress.summary(), file=sys.stderr)
    if out is not None:
        print(f"written  {out}", file=sys.stderr)


def show(text: str) -> None:
    """Print text immediately, without a newline. On a terminal, control characters are replaced."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


if __name__ == "__main__":
    run_process(main, config)
