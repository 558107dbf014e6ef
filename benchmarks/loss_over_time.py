"""Draw the picture of README.md: validation loss over seconds on Tiny Shakespeare, for nanoGPT and trilGPT.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/loss_over_time.py nanoGPT tinyshakespeare.txt    # trains, then draws; three minutes on two cores
    python benchmarks/loss_over_time.py                                # draws the recorded losses again

Each program runs as a complete process on the same cores, one after the other, with prepared tokens. A loss counts from
the moment at which the process prints it, so the seconds include imports and evaluations. nanoGPT estimates its loss on
20 random batches, trilGPT computes it on the complete validation text. The losses are recorded in docs/speed.csv, with
the name of the processor, and the picture is docs/speed.png.
"""

import argparse
import csv
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nanogpt_speed import RECIPES, copy_nanogpt, share_tokens  # noqa: E402

from common.machine import device_name  # noqa: E402
from common.plots import (  # noqa: E402
    COLORS,
    GREY,
    label_log_axis,
    make_figure,
    save_figure,
    style_axes,
)

RECORDS = ROOT / "docs/speed.csv"
PICTURE = ROOT / "docs/speed.png"
A100_LOSS = 1.4697  # of nanoGPT's recipe for a GPU, in about three minutes, according to its README
NANOGPT = "nanoGPT, its recipe for a CPU"
# Recipes of trilGPT, and the number of steps between evaluations.
TRILGPT = {
    "trilGPT, experiment=shakespeare_char_cpu_fast": ("shakespeare_char_cpu_fast", 22),
    "trilGPT, experiment=shakespeare_cpu_fast": ("shakespeare_cpu_fast", 60),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nanogpt", type=Path, nargs="?", help="a checkout of nanoGPT")
    parser.add_argument("text", type=Path, nargs="?", help="Tiny Shakespeare")
    arguments = parser.parse_args()
    if (arguments.nanogpt is None) != (arguments.text is None):
        parser.error("give both a checkout of nanoGPT and the text, or none to draw the records")
    if arguments.text is not None:
        record_losses(arguments.nanogpt, arguments.text.resolve())
    draw(RECORDS, PICTURE)


def record_losses(nanogpt: Path, text: Path) -> None:
    """Train with all recipes, and write their losses to RECORDS."""
    import torch

    processor = device_name(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        checkout = copy_nanogpt(nanogpt, work)
        share_tokens(work, checkout, "char", text)
        recipe = RECIPES["shakespeare_char_cpu"].nanogpt
        steps = ["--max_iters=2000", "--eval_interval=125", "--eval_iters=20"]
        curves = {NANOGPT: time_losses(checkout, "train.py", *recipe, *steps)}
        for label, (experiment, every) in TRILGPT.items():
            words = [f"experiment={experiment}", f"data.path={text}", f"eval.every={every}"]
            words += ["eval.sample.max_new_tokens=0"]
            time_losses(
                work, ROOT / "train.py", *words, "train.steps=1", f"name=prepares-{experiment}"
            )
            curves[label] = time_losses(work, ROOT / "train.py", *words)
    with open(RECORDS, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["processor", "program", "seconds", "nats_per_character"])
        for label, points in curves.items():
            for seconds, loss in points:
                writer.writerow([processor, label, f"{seconds:.2f}", f"{loss:.4f}"])


def time_losses(folder: Path, *command: object) -> list[tuple[float, float]]:
    """Run a training script. Returns the seconds at which it prints a validation loss, and the loss.

    The loss is in nats per character.
    """
    start = time.perf_counter()
    points = []
    with subprocess.Popen(
        [sys.executable, "-u", *map(str, command)], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            seconds = time.perf_counter() - start
            if match := re.match(r"step [1-9]\d*: train loss .* val loss ([\d.]+)", line):
                points.append((seconds, float(match[1])))
            # The text is ASCII, so a character is a byte.
            if match := re.match(r"step [1-9]\d*: .* ([\d.]+) bits per byte", line):
                points.append((seconds, float(match[1]) * math.log(2)))
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed")
    return points


def draw(records: Path, picture: Path) -> None:
    """Draw a curve for each program of the records, and nanoGPT's loss on a GPU as a line."""
    with open(records, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        point = (float(row["seconds"]), float(row["nats_per_character"]))
        curves.setdefault(row["program"], []).append(point)
    figure = make_figure(7.6, 5.0)
    axes = figure.subplots()
    style_axes(axes, "")
    axes.set_xscale("log")
    for (label, points), color in zip(curves.items(), (GREY, *COLORS), strict=False):
        axes.plot(*zip(*points, strict=True), "o-", label=label, color=color, linewidth=2.4)
    axes.axhline(A100_LOSS, color=GREY, linestyle="--", linewidth=1.4)
    axes.annotate(
        "nanoGPT, its recipe for a GPU: 1.47 after three minutes on an A100",
        (0.99, A100_LOSS),
        xycoords=("axes fraction", "data"),
        xytext=(0, -5),
        textcoords="offset points",
        ha="right",
        va="top",
        color=GREY,
        fontsize=11,
    )
    axes.set_xlabel(f"seconds since the start of the command ({rows[0]['processor']})")
    axes.set_ylabel("validation loss, nats per character")
    axes.set_title("Tiny Shakespeare", loc="left", fontsize=14)
    axes.margins(y=0.1)
    figure.legend(loc="outside upper center", frameon=False, fontsize=12)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_size(12)
    axes.tick_params(labelsize=12)
    label_log_axis(axes.xaxis)
    save_figure(figure, picture)


if __name__ == "__main__":
    main()
