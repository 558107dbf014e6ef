"""The loss curve of a run, as a picture."""

import json
from pathlib import Path


def read_metrics(folder: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl."""
    with open(folder / "metrics.jsonl") as f:
        return [json.loads(line) for line in f]


def plot_loss(folder: Path) -> Path:
    """Draw training and validation loss over steps into <folder>/loss.png -> its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_metrics(folder)
    train = [(row["step"], row["train/loss"]) for row in rows if row.get("train/loss") is not None]
    val = [(row["step"], row["val/loss"]) for row in rows if row.get("val/loss") is not None]

    figure, axes = plt.subplots(figsize=(7.5, 4.2), dpi=150, layout="constrained")
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="#9db4d0", linewidth=0.8, label="training, each step's batch")
    if val:
        steps, losses = zip(*val, strict=True)
        axes.plot(steps, losses, "o-", color="#c2410c", linewidth=1.8, markersize=4, label="validation")
        best_step, best = min(val, key=lambda point: point[1])
        axes.annotate(
            f"best {best:.3f}",
            (best_step, best),
            xytext=(-4, 14),
            textcoords="offset points",
            ha="right",
            color="#c2410c",
        )
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token", title=folder.name)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if train or val:
        axes.legend(frameon=False)
    path = folder / "loss.png"
    figure.savefig(path)
    plt.close(figure)
    return path
