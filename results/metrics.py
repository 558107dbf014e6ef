"""The registry of metrics: what a table, a picture and wandb show of each number of a run.

A new metric is one entry here, and one line where training computes it. It is then a column of
comparison.csv. Its entry says whether it is also in the terminal's table.

METRICS has an entry for each column of metrics.jsonl and key of summary.json that is compared, or
that wandb shows in another way than its other curves. summary.json has the newest value of each
column of metrics.jsonl, as `summary_key` of training/run_folder.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.console import format_memory, format_number
from training.config import UNTIMED_STEPS

# How the values of a variant's runs become one value. Titles of pictures have these words.
MEAN = "mean over seeds"  # of the newest values, with a 95 % confidence interval (Student's t)
MEDIAN = "median over seeds"  # of the newest values, with quartiles
STEP_MEDIAN = "median over steps"  # without the first steps of a run, with quartiles
DISTINCT = "distinct values"  # texts
DIFFERENCE = "mean over pairs"  # of runs with the same seed, with the interval of the verdict
COMPUTED = "computed"  # by results/compare.py, without an interval


@dataclass(frozen=True)
class Value:
    """A number with its 95 % interval or its quartiles, or a text. Unknown parts are None."""

    value: Any = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Metric:
    """A column of a comparison, and of metrics.jsonl."""

    # header in the terminal's table and in the notes of wandb; None: only comparison.csv has it
    header: str | None = None
    format: Callable[[Any], str] = str
    compare: str | None = None  # MEAN, ...; None: not compared, and without a header
    note: str | None = None  # explains the column below the terminal's table
    # options of wandb's define_metric, for a column of metrics.jsonl that needs some
    wandb: dict[str, Any] = field(default_factory=dict)


def format_loss(loss: float) -> str:
    """Four decimals. Numbers that they would round to 0 are formatted as 1.2e-05."""
    return f"{loss:.1e}" if 0 < abs(loss) < 0.001 else f"{loss:.4f}"


def format_difference(difference: float) -> str:
    """A relative difference in percent: +0.31 %."""
    return f"{100 * difference:+.2f} %"


METRICS: dict[str, Metric] = {
    # what is compared
    "variant": Metric("variant", compare=COMPUTED),
    "status": Metric(compare=COMPUTED),
    "error": Metric(compare=COMPUTED),
    "kernel": Metric("kernel", compare=COMPUTED),
    "device": Metric(compare=DISTINCT),
    "device_name": Metric(compare=DISTINCT),
    "dtype": Metric(compare=DISTINCT),
    "data": Metric(compare=DISTINCT),
    "text_hash": Metric(compare=DISTINCT),
    "vocab_size": Metric(compare=DISTINCT),
    # x axes
    "step": Metric(wandb={"hidden": True}),
    "tokens": Metric(wandb={"hidden": True}),
    "seconds": Metric(wandb={"hidden": True}),
    "flops": Metric(compare=MEAN, wandb={"hidden": True}),
    "wall_seconds": Metric(),
    # losses
    "train/loss": Metric(wandb={"summary": "min"}),
    "val/loss": Metric(
        "val loss",
        format_loss,
        MEAN,
        "Losses are in nats per token, from the last evaluation of each finished run.",
        wandb={"summary": "min"},
    ),
    "val/bpb": Metric("bits/byte", format_loss, MEAN, wandb={"summary": "min"}),
    "best_val_loss": Metric(compare=MEAN),
    "overfitting": Metric(),
    "n_teachers": Metric(compare=MEAN),
    # of runs with the same seed
    "verdict": Metric(compare=COMPUTED),
    "difference": Metric(
        "difference",
        format_difference,
        DIFFERENCE,
        "Differences are relative to the baseline's validation loss, for runs with the same seed; "
        "a lower loss is better. With a probability of 95 %, all true differences are within their "
        "intervals, no matter how often you look.",
    ),
    "seeds": Metric("seeds", compare=COMPUTED),  # of finished runs
    "pairs": Metric(compare=COMPUTED),  # seeds that the baseline has, too
    "first_divergence": Metric(compare=COMPUTED),
    "divergence": Metric(compare=COMPUTED),
    # speed and memory
    "step_ms": Metric(
        "step, ms",
        format_number,
        STEP_MEDIAN,
        f"Step times are medians (quartiles), without the first {UNTIMED_STEPS} steps of each run.",
    ),
    "tokens_per_second": Metric(compare=STEP_MEDIAN),
    "mfu": Metric(),
    "peak_memory_bytes": Metric("memory", format_memory, MEDIAN),
    "kv_cache_bytes_per_token": Metric(compare=MEAN),
}
