"""Compare the training speed of nanoGPT and trilGPT. Their complete processes run in alternation.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/nanogpt_speed.py loss nanoGPT tinyshakespeare.txt
    python benchmarks/nanogpt_speed.py step nanoGPT tinyshakespeare.txt
    python benchmarks/nanogpt_speed.py step nanoGPT tinyshakespeare.txt --recipe gpt2_124m    # GPU, GPT-2 tokens

loss: time to nanoGPT's validation loss. nanoGPT runs its CPU recipe, with its fixed seed. trilGPT runs
experiment=shakespeare_char_cpu_fast, with another seed in each round. Both losses cover the complete validation split,
in consecutive windows of 64 tokens. nanoGPT's loss is computed from its last checkpoint; this time is not counted.

step: time per step. Both train nanoGPT's model with nanoGPT's optimizer and batch size, for 200 steps. Each program
measures its steps. To measure them, nanoGPT waits for the loss of every step.

nanoGPT runs in a copy of its checkout, on the tokens that trilGPT has prepared. Both run without wandb. The exit code
is 1 if a loss of trilGPT is above nanoGPT's. Arguments after `--` are overrides for trilGPT's train.py.
"""

import argparse
import importlib.util
import json
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data.loader import Loader  # noqa: E402
from data.prepare import PreparedData  # noqa: E402

SMALL_MODEL = [
    "--block_size=64",
    "--batch_size=12",
    "--n_layer=4",
    "--n_head=4",
    "--n_embd=128",
    "--dropout=0.0",
]
WARMUP_STEPS = 10  # excluded from step times
EVAL_WINDOWS = 64  # windows per forward pass when the loss of nanoGPT's checkpoint is computed


@dataclass
class Recipe:
    """The same training for both programs.

    nanogpt: nanoGPT's config file and arguments. trilgpt: an experiment and overrides. tokens_per_step: tokens in one
    optimizer step.
    """

    nanogpt: list[str]
    trilgpt: list[str]
    tokens_per_step: int


RECIPES = {
    "shakespeare_char_cpu": Recipe(
        [
            "config/train_shakespeare_char.py",
            "--device=cpu",
            "--compile=False",
            "--lr_decay_iters=2000",
            *SMALL_MODEL,
        ],
        ["experiment=shakespeare_char_cpu", "dtype=float32"],  # the dtype of nanoGPT on CPUs
        12 * 64,
    ),
    "gpt2_124m": Recipe(
        ["--batch_size=16", "--block_size=1024", "--gradient_accumulation_steps=1"],
        ["experiment=gpt2_124m", "model=nanogpt", "train.batch_size=16", "data=text"],
        16 * 1024,
    ),
}


def main() -> int:
    arguments, overrides = parse_arguments()
    recipe = RECIPES[arguments.recipe]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        nanogpt = copy_nanogpt(arguments.nanogpt, work)
        overrides = [f"data.path={arguments.text.resolve()}", "wandb.mode=disabled", *overrides]
        tokenizer = "gpt2" if arguments.recipe == "gpt2_124m" else "char"
        prepared = share_tokens(work, nanogpt, tokenizer, arguments.text.resolve())
        if arguments.quantity == "loss":
            return compare_time_to_loss(
                work, nanogpt, prepared, recipe, overrides, arguments.rounds
            )
        return compare_step_time(work, nanogpt, recipe, overrides, arguments.rounds)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the arguments of this script, and the overrides after `--`."""
    words = [*sys.argv[1:], "--"]
    separator = words.index("--")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "quantity", choices=("loss", "step"), help="time to a loss, or time per step"
    )
    parser.add_argument("nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("text", type=Path, help="a text file; for `loss`, Tiny Shakespeare")
    parser.add_argument("--recipe", choices=RECIPES, default="shakespeare_char_cpu")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(words[:separator])
    for file in (arguments.nanogpt / "train.py", arguments.text):
        if not file.is_file():
            parser.error(f"{file} does not exist; give a checkout of nanoGPT and a text file")
    if (arguments.quantity, arguments.recipe) == ("loss", "gpt2_124m"):
        parser.error("`loss` supports --recipe shakespeare_char_cpu only; omit --recipe gpt2_124m")
    return arguments, words[separator + 1 : -1]


def copy_nanogpt(checkout: Path, work: Path) -> Path:
    """Copy nanoGPT into a folder, so that its own folder does not change."""
    copy = work / "nanoGPT"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    return copy


def share_tokens(work: Path, nanogpt: Path, tokenizer: str, text: Path) -> PreparedData:
    """Prepare the text with trilGPT, and copy the tokens to the folders that nanoGPT reads."""
    data = "text" if tokenizer == "gpt2" else "shakespeare_char"
    words = [f"data={data}", f"tokenizer={tokenizer}", f"data.path={text}"]
    run_python(work, ROOT / "prepare.py", *words)
    (meta,) = (work / "data/prepared").glob("*/meta.json")
    prepared = PreparedData(meta.parent, json.loads(meta.read_text(encoding="utf-8")), "")
    for dataset in ("shakespeare_char", "openwebtext"):
        folder = nanogpt / "data" / dataset
        folder.mkdir(parents=True, exist_ok=True)
        for split, tokens in (("train", prepared.train), ("val", prepared.val)):
            tokens[:].tofile(folder / f"{split}.bin")
        if tokenizer == "char":
            (folder / "meta.pkl").write_bytes(
                pickle.dumps({"vocab_size": prepared.tokenizer.n_vocab})
            )
    return prepared


def run_python(folder: Path, *command: object) -> tuple[str, float]:
    """Run a script in `folder`. Returns its output and the seconds of the process. Exits if it fails."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, capture_output=True, text=True
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(
            f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout, seconds


def compare_time_to_loss(
    work: Path,
    nanogpt: Path,
    prepared: PreparedData,
    recipe: Recipe,
    overrides: list[str],
    rounds: int,
) -> int:
    """Print the seconds and the validation loss of both programs, per round. Returns the exit code."""
    print(
        f"{'round':>5} {'nanoGPT':>20} {'trilGPT':>20} {'ratio':>6}   seconds of the complete process, val loss"
    )
    ratios, is_worse = [], False
    for round_number in range(1, rounds + 1):
        steps = ["--max_iters=2000", "--eval_iters=20", "--always_save_checkpoint=True"]
        _, nanogpt_seconds = run_python(nanogpt, "train.py", *recipe.nanogpt, *steps)
        nanogpt_loss = compute_checkpoint_loss(nanogpt, prepared)
        name = f"loss-{round_number}"
        settings = [
            "experiment=shakespeare_char_cpu_fast",
            *overrides,
            f"seed={round_number}",
            f"name={name}",
        ]
        _, trilgpt_seconds = run_python(work, ROOT / "train.py", *settings)
        trilgpt_loss = json.loads(
            (work / "runs" / name / "summary.json").read_text(encoding="utf-8")
        )["last_val_loss"]
        ratios.append(nanogpt_seconds / trilgpt_seconds)
        is_worse |= trilgpt_loss > nanogpt_loss
        nanogpt_cell = f"{nanogpt_seconds:>9.1f} s   {nanogpt_loss:.4f}"
        trilgpt_cell = f"{trilgpt_seconds:>9.1f} s   {trilgpt_loss:.4f}"
        print(f"{round_number:>5} {nanogpt_cell} {trilgpt_cell} {ratios[-1]:>6.1f}", flush=True)
    print_ratios(ratios, "as fast to that loss")
    return int(is_worse)


def compute_checkpoint_loss(nanogpt: Path, prepared: PreparedData) -> float:
    """Loss of nanoGPT's last checkpoint over the complete validation split, each target once, in nats per token."""
    module = import_file("nanogpt_model", nanogpt / "model.py")
    saved = torch.load(nanogpt / "out-shakespeare-char/ckpt.pt", weights_only=True)
    with redirect_stdout(StringIO()):  # nanoGPT prints the number of parameters
        model = module.GPT(module.GPTConfig(**saved["model_args"])).eval()
    model.load_state_dict(saved["model"])
    loader = Loader(prepared, saved["model_args"]["block_size"], seed=0)
    total, targets = 0.0, 0
    with torch.no_grad():
        for first in range(0, loader.val_windows, EVAL_WINDOWS):
            x, y, _ = loader.batch("val", first, EVAL_WINDOWS)
            # without targets, nanoGPT returns the last position's logits only
            logits, _ = model(x, y.clamp(min=0))
            total += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").item()
            targets += int((y >= 0).sum())
    return total / targets


def import_file(name: str, path: Path) -> ModuleType:
    """Import a Python file under `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare_step_time(
    work: Path, nanogpt: Path, recipe: Recipe, overrides: list[str], rounds: int
) -> int:
    """Print the tokens/s of both programs, per round. Returns the exit code."""
    print(
        f"{'round':>5} {'nanoGPT':>26} {'trilGPT':>26} {'ratio':>6}   tokens/s of the median step (ms, quartiles)"
    )
    ratios = []
    for round_number in range(1, rounds + 1):
        steps = ["--max_iters=200", "--log_interval=1", "--eval_interval=10000", "--eval_iters=1"]
        output, _ = run_python(nanogpt, "train.py", *recipe.nanogpt, *steps)
        times = re.findall(r"^iter .*time ([\d.]+)ms", output, re.MULTILINE)
        nanogpt_ms = [float(ms) for ms in times][WARMUP_STEPS:]

        name = f"step-{round_number}"
        steps = [
            "train.steps=200",
            "eval.every=200",
            "eval.windows=12",
            "eval.sample.max_new_tokens=0",
        ]
        run_python(work, ROOT / "train.py", *recipe.trilgpt, *overrides, *steps, f"name={name}")
        rows = map(
            json.loads,
            (work / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines(),
        )
        trilgpt_ms = [row["step_ms"] for row in rows if "step_ms" in row][WARMUP_STEPS:]

        ratios.append(statistics.median(nanogpt_ms) / statistics.median(trilgpt_ms))
        cells = (format_rate(recipe, ms) for ms in (nanogpt_ms, trilgpt_ms))
        print(
            f"{round_number:>5} {next(cells):>26} {next(cells):>26} {ratios[-1]:>6.2f}", flush=True
        )
    print_ratios(ratios, "as many tokens/s")
    return 0


def format_rate(recipe: Recipe, ms: list[float]) -> str:
    """tokens/s of the median step, and the quartiles of the step time in ms."""
    q1, median, q3 = statistics.quantiles(ms)
    return f"{1000 * recipe.tokens_per_step / median:,.0f} ({q1:.1f} {median:.1f} {q3:.1f})"


def print_ratios(ratios: list[float], quantity: str) -> None:
    print(
        f"\nmedian {statistics.median(ratios):.2f} times {quantity}, {min(ratios):.2f} to {max(ratios):.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
