"""scaling.png: the validation loss over the training FLOPs of settings, with a power law L = a C^-b.

The law is a line in log space, fitted by least squares with one point per amount of FLOPs. The intervals use Student's
t. The law has no irreducible loss, so it holds only for the range of the points.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.plots import COLORS, GREY, make_figure, style_axes
from compare.runs.read import Run, Setting
from compare.runs.statistics import average_by_seed, mean, student_t

MIN_POINTS = 4
FLOPS_RATIO = 1.1  # of two amounts of FLOPs that are two points


class PowerLaw:
    """The law fitted to losses at some training FLOPs. ci95: half the width of the 95 % interval of the exponent b."""

    def __init__(self, flops: Sequence[float], losses: Sequence[float]):
        x, y = np.log(flops), np.log(losses)
        self.points, self.center = len(x), x.mean()  # centered, the errors of slope and offset are independent
        (slope, self.offset), covariance = np.polyfit(x - self.center, y, 1, cov=True)
        self.exponent, self.variances = -slope, covariance.diagonal()
        self.t = student_t(len(x) - 2)
        self.ci95 = self.t * math.sqrt(self.variances[0])

    def predict(self, flops: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The loss at these FLOPs, and the ends of the 95 % interval of the fitted line."""
        x = np.log(flops) - self.center
        y, half = self.offset - self.exponent * x, self.t * np.sqrt(self.variances[0] * x**2 + self.variances[1])
        return np.exp(y), np.exp(y - half), np.exp(y + half)

    def __str__(self) -> str:
        low, high = self.exponent - self.ci95, self.exponent + self.ci95
        interval = f"95 % interval {low:.3f} to {high:.3f}, {self.points} settings"
        return f"loss ~ C^{-self.exponent:.3f} ({interval})"


def write_scaling(settings: list[Setting], path: Path) -> str | None:
    """Fit the law and plot it -> a sentence. None, without a plot: there are too few points, or the data differ."""
    runs = [run for setting in settings for run in setting.finished]
    has_vocabularies = len({run.summary.get("vocab_size") for run in runs}) > 1
    key, unit = ("last_val_bpb", "bits per byte") if has_vocabularies else ("last_val_loss", "nats per token")
    points = []
    for setting in settings:
        flops = mean([flops for run in setting.finished if (flops := training_flops(run)) is not None])
        loss = mean(average_by_seed(setting.finished, key).values())
        if flops and loss:
            points.append((flops, loss))
    lowest: dict[float, float] = {}  # FLOPs -> the lowest loss; amounts within FLOPS_RATIO count once
    for flops, loss in sorted(points):
        known = max(lowest, default=0)
        flops = known if flops < FLOPS_RATIO * known else flops
        lowest[flops] = min(loss, lowest.get(flops, loss))
    has_one_text = len({_identify_data(run, has_vocabularies) for run in runs}) == 1
    if len(lowest) < MIN_POINTS or not has_one_text:
        path.unlink(missing_ok=True)  # of an earlier comparison
        return None
    law = PowerLaw(list(lowest), list(lowest.values()))
    figure = make_figure(6.5, 4.5)
    axes = figure.subplots()
    seeds = [(training_flops(run), run.summary.get(key)) for run in runs]
    axes.scatter(*zip(*[seed for seed in seeds if None not in seed], strict=True), s=9, color=GREY, label="runs")
    axes.scatter(*zip(*points, strict=True), s=36, color=GREY)
    axes.scatter(list(lowest), list(lowest.values()), s=36, color=COLORS[0], zorder=3, label="settings")
    x = np.geomspace(min(lowest) / 1.2, max(lowest) * 1.2, 100)
    line, low, high = law.predict(x)
    axes.plot(x, line, color=COLORS[1], label="power law with 95 % interval")
    axes.fill_between(x, low, high, color=COLORS[1], alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="training FLOPs C", ylabel=f"validation loss, {unit}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend(frameon=False, fontsize=9)
    style_axes(axes, str(law))
    figure.savefig(path)
    return str(law)


def _identify_data(run: Run, has_vocabularies: bool) -> str:
    """Identify the documents of a run. With several vocabularies, the prepared folders differ."""
    config = {key: value for key, value in run.config.items() if key.startswith("data.")}
    return str(config if has_vocabularies else run.summary.get("data"))


def training_flops(run: Run) -> float | None:
    """FLOPs of all steps of a run. None: its summary does not have them."""
    summary = run.summary
    if summary.get("flops_per_token") is None or not summary.get("step"):
        return None
    return (
        summary["step"] * run.config["train.batch_size"] * run.config["model.block_size"] * summary["flops_per_token"]
    )
