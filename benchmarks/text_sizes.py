"""Compare the default run with a search around it and with nanoGPT, on your own texts of any size.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/text_sizes.py nanoGPT short.txt long.txt
    python benchmarks/text_sizes.py nanoGPT short.txt --seeds 1 2 3 --no-search

default: python train.py data=text data.path=FILE, whose sizes depend on the amount of text (preset=auto).
search: the same with the next smaller or larger preset, or with one other value of steps, vocabulary, n-grams, layers,
    channels or dropout. A run of the search ends after --seconds.
nanoGPT: its recipe for a CPU with characters as tokens, 2,000 steps.

A loss is the lowest validation loss of a run, in bits per byte of the last 10 % of the text. Of a long text, trilGPT
evaluates 640 windows, spread over these 10 %. The exit code is 1 if on a text the default is more than 2 % above the
best run of the search, or above nanoGPT. All results are also written to text_sizes.jsonl.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from math import log
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nanogpt_speed import (  # noqa: E402
    RECIPES,
    compute_checkpoint_loss,
    copy_nanogpt,
    run_python,
    share_tokens,
)

from data.loader import Loader  # noqa: E402
from data.tokenizer import token_bytes  # noqa: E402

MAX_LOSS_RATIO = 1.02  # loss of the default / loss of the best run of the search
NANOGPT_STEPS = ["--max_iters=2000", "--eval_iters=20"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("texts", type=Path, nargs="+", help="text files")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1], help="the search uses the first"
    )
    parser.add_argument(
        "--seconds", type=float, default=120, help="training time of each run of the search"
    )
    parser.add_argument("--no-search", action="store_true")
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at the same time, which share the cores"
    )
    arguments = parser.parse_args()
    for file in (arguments.nanogpt / "train.py", *arguments.texts):
        if not file.is_file():
            parser.error(
                f"{file} does not exist; pass the folder of a nanoGPT checkout and text files"
            )
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // arguments.jobs))
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary, str(number)) for number in range(len(arguments.texts))]
        passed = [
            compare(folder, text.resolve(), arguments)
            for folder, text in zip(folders, arguments.texts, strict=True)
        ]
    return int(not all(passed))


def compare(work: Path, text: Path, arguments: argparse.Namespace) -> bool:
    """Print the results of one text. Returns whether the default is good enough."""
    (work / "char").mkdir(parents=True)  # nanoGPT's tokens are prepared here
    print(f"\n{text.name}, {text.stat().st_size:,} bytes", flush=True)
    seeds = [f"seed={seed}" for seed in arguments.seeds]
    limit = f"train.minutes={arguments.seconds / 60:.4f}"
    with ThreadPoolExecutor(arguments.jobs) as pool:
        nanogpt_run = pool.submit(train_nanogpt, work, text, arguments)
        default_runs = [pool.submit(train, work, text, [seed]) for seed in seeds]
        defaults = [run.result()["best_val_bpb"] for run in default_runs]
        config = default_runs[0].result()["config"]
        search = [] if arguments.no_search else list_search(config)
        search_runs = {
            words: pool.submit(train, work, text, [seeds[0], limit, *words.split()])
            for words in search
        }
        found = {words: run.result()["best_val_bpb"] for words, run in search_runs.items()}
        nanogpt = nanogpt_run.result()
    default = statistics.mean(defaults)
    found["the default"] = defaults[0]
    best = min(found, key=found.__getitem__)
    print(
        f"  default  {default:.4f}  preset={config['preset']}, seeds: {' '.join(f'{x:.4f}' for x in defaults)}"
    )
    if search:
        print(
            f"  search   {found[best]:.4f}  {best}; default / search {defaults[0] / found[best]:.3f}"
        )
    print(f"  nanoGPT  {nanogpt:.4f}  nanoGPT / default {nanogpt / default:.3f}", flush=True)
    result = {
        "text": text.name,
        "default": defaults,
        "nanogpt": nanogpt,
        "search": found,
        "config": config,
    }
    with open("text_sizes.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
    return defaults[0] <= MAX_LOSS_RATIO * found[best] and default <= nanogpt


def list_search(config: dict) -> list[str]:
    """List the overrides of all runs of the search. config: config of the default run."""
    model, steps, vocab_size = (
        config["model"],
        config["train"]["steps"],
        config["tokenizer"]["vocab_size"],
    )
    presets = ["20kB", "100kB", "300kB", "1MB", "3MB", "10MB"]
    index = presets.index(config["preset"])
    values = {
        "preset": presets[max(0, index - 1) : index] + presets[index + 1 : index + 2],
        "train.steps": [steps // 2, steps * 2],
        "tokenizer.vocab_size": [max(257, vocab_size // 2), vocab_size * 2],
        "model.max_ngram": [n for n in (1, 2, 3, 4) if n != model["max_ngram"]],
        "model.n_layer": [n for n in (1, 2, 3) if n != model["n_layer"]],
        "model.n_embd": [n for n in (128, 192) if n != model["n_embd"]],
        "model.dropout": [0.1],
    }
    return [f"{key}={value}" for key, options in values.items() for value in options]


def train(work: Path, text: Path, words: list[str]) -> dict:
    """Train a run. Returns its summary and its config."""
    name = f"{text.stem}-{time.time_ns()}"
    settings = [
        "eval.windows=640",
        "eval.sample.max_new_tokens=0",
        "wandb.mode=disabled",
        f"name={name}",
        *words,
    ]
    run_python(work, ROOT / "train.py", "data=text", f"data.path={text}", *settings)
    folder = work / "runs" / name
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    shutil.rmtree(folder)
    return summary | {"config": config}


def train_nanogpt(work: Path, text: Path, arguments: argparse.Namespace) -> float:
    """Train nanoGPT on the characters of the text. Returns the loss of its best checkpoint in bits per byte."""
    nanogpt = copy_nanogpt(arguments.nanogpt, work)
    prepared = share_tokens(work / "char", nanogpt, "char", text)
    run_python(nanogpt, "train.py", *RECIPES["shakespeare_char_cpu"].nanogpt, *NANOGPT_STEPS)
    loss, loader = compute_checkpoint_loss(nanogpt, prepared), Loader(prepared, 64, seed=0)
    targets = loader.val[1:].astype(int)
    return loss * len(targets) / token_bytes(prepared.tokenizer)[targets].sum() / log(2)


if __name__ == "__main__":
    sys.exit(main())
