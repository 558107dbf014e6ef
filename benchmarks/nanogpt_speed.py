"""nanoGPT and trilGPT in turns, whole processes: to the same loss, and through the same step.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/nanogpt_speed.py loss nanoGPT tinyshakespeare.txt
    python benchmarks/nanogpt_speed.py step nanoGPT tinyshakespeare.txt
    python benchmarks/nanogpt_speed.py step nanoGPT tinyshakespeare.txt --recipe gpt2_124m    # one GPU, GPT-2's tokens

loss: nanoGPT's CPU recipe from start to end, whose seed is fixed, and experiment=shakespeare_char_cpu_fast, with
another seed each round. Both validation losses are of the whole split, in windows of 64 laid end to end; nanoGPT's is
computed from its last checkpoint, off the clock. step: both with nanoGPT's model, optimizer and batch, 200 steps each;
its own clock, for which it waits for the loss of every step, and ours.

nanoGPT runs in a copy of its checkout, on the very tokens that trilGPT has prepared, and without wandb as we do.
The exit code is 1 where a loss of ours is worse than nanoGPT's. `-- KEY=VALUE ...` at the end goes to our train.py.
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

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data.loader import Loader  # noqa: E402
from data.prepared import Prepared  # noqa: E402

SMALL = ["--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0"]
WARM_UP = 10  # steps that do not count


@dataclass
class Recipe:
    """theirs: nanoGPT's config file and arguments; ours: an experiment and overrides; tokens: of one step."""

    theirs: list[str]
    ours: list[str]
    tokens: int


RECIPES = {
    "shakespeare_char_cpu": Recipe(
        ["config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--lr_decay_iters=2000", *SMALL],
        ["experiment=shakespeare_char_cpu"],
        12 * 64,
    ),
    "gpt2_124m": Recipe(
        ["--batch_size=16", "--block_size=1024", "--gradient_accumulation_steps=1"],
        ["experiment=gpt2_124m", "model=nanogpt", "train.batch_size=16", "data=text"],
        16 * 1024,
    ),
}


def main() -> int:
    arguments, ours = parse()
    recipe = RECIPES[arguments.recipe]
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        theirs = work / "nanoGPT"
        shutil.copytree(arguments.nanogpt, theirs, ignore=shutil.ignore_patterns(".git"))
        ours = [f"data.path={arguments.text.resolve()}", "wandb.mode=disabled", *ours]
        prepared = share_tokens(work, theirs, arguments)
        if arguments.what == "loss":
            return to_the_loss(work, theirs, prepared, recipe, ours, arguments.rounds)
        return through_the_step(work, theirs, recipe, ours, arguments.rounds)


def parse() -> tuple[argparse.Namespace, list[str]]:
    words = [*sys.argv[1:], "--"]
    own, ours = words[: words.index("--")], words[words.index("--") + 1 : -1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("loss", "step"))
    parser.add_argument("nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("text", type=Path, help="a text file; for the loss, Tiny Shakespeare")
    parser.add_argument("--recipe", choices=RECIPES, default="shakespeare_char_cpu")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(own)
    for file in (arguments.nanogpt / "train.py", arguments.text):
        if not file.is_file():
            parser.error(f"{file} does not exist; name a checkout of nanoGPT and a text file")
    if (arguments.what, arguments.recipe) == ("loss", "gpt2_124m"):
        parser.error("the loss is that of --recipe shakespeare_char_cpu; leave out --recipe gpt2_124m")
    return arguments, ours


def share_tokens(work: Path, theirs: Path, arguments: argparse.Namespace) -> Prepared:
    """Prepare the text as trilGPT does, and give nanoGPT the same tokens."""
    kind = "gpt2" if arguments.recipe == "gpt2_124m" else "char"
    data = "text" if kind == "gpt2" else "shakespeare_char"
    run(work, ROOT / "prepare.py", f"data={data}", f"tokenizer={kind}", f"data.path={arguments.text.resolve()}")
    (meta,) = (work / "data/prepared").glob("*/meta.json")
    folder = meta.parent
    prepared = Prepared(folder, json.loads(meta.read_text()))
    for dataset in ("shakespeare_char", "openwebtext"):
        shutil.copytree(folder, theirs / "data" / dataset, dirs_exist_ok=True)
        if kind == "char":
            vocabulary = {"vocab_size": prepared.encoding.n_vocab}
            (theirs / "data" / dataset / "meta.pkl").write_bytes(pickle.dumps(vocabulary))
    return prepared


def run(where: Path, *command: object) -> tuple[str, float]:
    """Output and seconds of a whole process."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *map(str, command)], cwd=where, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout, seconds


def to_the_loss(work: Path, theirs: Path, prepared: Prepared, recipe: Recipe, ours: list[str], rounds: int) -> int:
    print(f"{'round':>5} {'nanoGPT':>20} {'trilGPT':>20} {'ratio':>6}   seconds of the whole process, validation loss")
    ratios, worse = [], False
    for number in range(1, rounds + 1):
        steps = ["--max_iters=2000", "--eval_iters=20", "--always_save_checkpoint=True"]
        _, their_seconds = run(theirs, "train.py", *recipe.theirs, *steps)
        their_loss = loss_of_checkpoint(theirs, prepared)
        overrides = ["experiment=shakespeare_char_cpu_fast", *ours, f"seed={number}", f"name=loss-{number}"]
        _, our_seconds = run(work, ROOT / "train.py", *overrides)
        our_loss = json.loads((work / f"runs/loss-{number}/summary.json").read_text())["last_val_loss"]
        ratios.append(their_seconds / our_seconds)
        worse |= our_loss > their_loss
        print(
            f"{number:>5} {their_seconds:>9.1f} s   {their_loss:.4f} {our_seconds:>9.1f} s   {our_loss:.4f} "
            f"{ratios[-1]:>6.1f}",
            flush=True,
        )
    conclude(ratios, "as soon")
    return int(worse)


def loss_of_checkpoint(theirs: Path, prepared: Prepared) -> float:
    """Of nanoGPT's last checkpoint, over the whole validation split, each target once."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", theirs / "model.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    saved = torch.load(theirs / "out-shakespeare-char/ckpt.pt", weights_only=True)
    with redirect_stdout(StringIO()):  # it says how many parameters it has
        model = module.GPT(module.GPTConfig(**saved["model_args"])).eval()
    model.load_state_dict(saved["model"])
    loader = Loader(prepared, saved["model_args"]["block_size"], seed=0)
    total, counted = 0.0, 0
    with torch.no_grad():
        for first in range(0, loader.val_windows, 64):
            x, y, _ = loader.batch("val", first, 64)
            logits, _ = model(x, y.clamp(min=0))  # with targets it gives the logits of all places
            total += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").item()
            counted += (y >= 0).sum().item()
    return total / counted


def through_the_step(work: Path, theirs: Path, recipe: Recipe, ours: list[str], rounds: int) -> int:
    print(f"{'round':>5} {'nanoGPT':>26} {'trilGPT':>26} {'ratio':>6}   tokens/s of the median step (ms, quartiles)")
    ratios = []
    for number in range(1, rounds + 1):
        quiet = ["--max_iters=200", "--log_interval=1", "--eval_interval=10000", "--eval_iters=1"]
        output, _ = run(theirs, "train.py", *recipe.theirs, *quiet)
        their_ms = [float(ms) for ms in re.findall(r"^iter .*time ([\d.]+)ms", output, re.MULTILINE)][WARM_UP:]
        overrides = [*recipe.ours, *ours, "train.steps=200", "eval.every=200", "eval.batches=1", f"name=step-{number}"]
        run(work, ROOT / "train.py", *overrides, "eval.sample.max_new_tokens=0")
        rows = map(json.loads, (work / f"runs/step-{number}/metrics.jsonl").read_text().splitlines())
        our_ms = [row["step_ms"] for row in rows if "step_ms" in row][WARM_UP:]
        ratios.append(statistics.median(their_ms) / statistics.median(our_ms))
        print(f"{number:>5} {rate(recipe, their_ms):>26} {rate(recipe, our_ms):>26} {ratios[-1]:>6.2f}", flush=True)
    conclude(ratios, "as many tokens/s")
    return 0


def rate(recipe: Recipe, ms: list[float]) -> str:
    low, middle, high = statistics.quantiles(ms)
    return f"{1000 * recipe.tokens / middle:,.0f} ({low:.1f} {middle:.1f} {high:.1f})"


def conclude(ratios: list[float], what: str) -> None:
    print(f"\nmedian {statistics.median(ratios):.2f} times {what}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    sys.exit(main())
