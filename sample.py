"""Write text with a trained model.

    python sample.py                                      from the newest run
    python sample.py run=mine prompt="def main(x):" num_samples=3 temperature=0.8 top_k=50 seed=1

the keys most used:
  run=NAME              a run below runs/; last is the newest
  prompt=TEXT           what the text starts with; prompt_file=FILE reads it from a file
  num_samples=N         how many texts
  max_new_tokens=N      how long each may grow
  temperature=X         0 is greedy, 1 is the model's own distribution
  top_k=N, top_p=X      leave only the likeliest tokens
  seed=N                decides the text
  checkpoint=last       instead of the best
  attention_map=true    draws where each head looks in the prompt, in runs/NAME/attention/
"""

if __name__ == "__main__":  # ahead of the imports below, which take seconds: a wrong word is answered at once
    from configs.entry import start

    config = start("sample", __doc__)

import sys
from pathlib import Path

import tiktoken
import torch
from rich.console import Console

from compare.maps import entropy_table, plot_maps, write_entropies
from configs.entry import leave
from configs.entry import run as run_main
from configs.schema import Sample
from data import tokenizer
from errors import UserError
from model import GPTConfig
from model.attention import bind, resolve_model
from model.generate import generate
from model.gpt import GPT
from model.maps import attention_maps, entropy, uniform_entropy
from training import checkpoint, precision
from training.run import find_run

MOST_TOKENS = 256  # of an attention map: with more, a weight is less than a pixel


def main(config: Sample) -> int:
    device = precision.resolve_device(config.device)
    dtype = precision.resolve_dtype(config.dtype, device)
    folder = find_run(config.run)

    # Model, vocabulary and tokenizer come from the checkpoint alone.
    path = folder / "checkpoints" / f"{config.checkpoint}.pt"
    if not path.exists():  # a run that was stopped before its first evaluation has no best one yet
        (path,) = path.parent.glob("*.pt")
    saved = checkpoint.load(path)
    model_config = GPTConfig(**saved["model_config"])
    encoding = tokenizer.from_spec(saved["tokenizer"])
    attention = resolve_model(config.attention, model_config, B=1, dtype=dtype, device=device, grad=False)
    model = GPT(model_config, saved["vocab_size"], bind(config.attention))
    model.load_state_dict(saved["model"])
    model.to(device).eval()

    prompt = read_prompt(config)
    tokens = tokenizer.encode(encoding, prompt, "the prompt").tolist() if prompt else tokenizer.beginning(encoding)
    kernel = f"attention {attention.requested} -> {attention.resolved}"
    print(f"{path}, step {saved['step']:,}, seed {config.seed}, {kernel}", file=sys.stderr)
    for i in range(config.num_samples):
        if config.num_samples > 1:
            print(f"--- {i + 1} ---", file=sys.stderr)
        with precision.autocast(device, dtype):
            end = tokenizer.end_of_text(encoding)
            new = list(generate(model, tokens, config, seed=config.seed + i, end=end))
        print(prompt + encoding.decode(new))
        if i == 0:
            first = new
    if config.attention_map:
        with precision.autocast(device, dtype):
            look_inside(model, encoding, tokens if len(tokens) > 1 else tokens + first, folder / "attention")
    return 0


def look_inside(model: GPT, encoding: tiktoken.Encoding, tokens: list[int], folder: Path) -> None:
    """Draw where each head looks in a text, and say how widely. Raises UserError for a text of one token."""
    if len(tokens) < 2:
        raise UserError("attention_map=true needs a text of two tokens or more; set a longer prompt or max_new_tokens")
    T = min(len(tokens), model.config.block_size, MOST_TOKENS)
    if len(tokens) > T:
        limit = "a picture can show" if T == MOST_TOKENS else "the model sees at once"
        print(f"the attention map is of the last {T} of {len(tokens):,} tokens, as many as {limit}", file=sys.stderr)
    shown = tokens[-T:]
    weights = attention_maps(model, torch.tensor([shown], device=next(model.parameters()).device))
    entropies, uniform = entropy(weights).numpy(), uniform_entropy(T)
    plot_maps(weights.numpy(), entropies, tokenizer.words(encoding, shown), folder)
    write_entropies(entropies, uniform, folder / "entropies.csv")
    Console(stderr=True, highlight=False).print(entropy_table(entropies, uniform))
    print(f"written  {folder}/layer-*.png, overview.png, entropies.csv", file=sys.stderr)


def read_prompt(config: Sample) -> str:
    """The prompt's text, "" for none. Raises UserError for a file that cannot be read."""
    if config.prompt_file is None:
        return config.prompt or ""
    try:
        return Path(config.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt_file={config.prompt_file} cannot be read ({error}); set a text file") from None


if __name__ == "__main__":
    leave(run_main(main, config))
