"""Plot of the training and validation loss of a run."""

from pathlib import Path

from common.files import name_file_in_errors
from common.plots import make_figure, style_axes
from training.metrics import read_metrics


def plot_loss(folder: Path) -> Path:
    """Plot the losses in <folder>/metrics.jsonl over the steps -> <folder>/loss.png."""
    rows = read_metrics(folder)
    train = [(row["step"], row["train/loss"]) for row in rows if row.get("train/loss") is not None]
    val = [(row["step"], row["val/loss"]) for row in rows if row.get("val/loss") is not None]

    figure = make_figure(7.5, 4.2)
    axes = figure.subplots()
    style_axes(axes, folder.name)
    if train:
        axes.plot(*zip(*train, strict=True), color="#9db4d0", linewidth=0.8, label="training, each step's batch")
    if val:
        _, best = min(val, key=lambda point: point[1])
        label = f"validation, best {best:.3f}"
        axes.plot(*zip(*val, strict=True), "o-", color="#c2410c", linewidth=1.8, markersize=4, label=label)
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token")
    axes.locator_params(axis="x", integer=True)
    if train or val:
        axes.legend(frameon=False)
    path = folder / "loss.png"
    with name_file_in_errors(path):
        figure.savefig(path)
    return path
