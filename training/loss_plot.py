"""Plot of the training and validation loss of a run."""

from pathlib import Path

from common.files import name_file_in_errors
from common.metrics_file import read_curves
from common.plots import make_figure, style_axes, thin_curve


def plot_loss(folder: Path) -> Path:
    """Plot the losses in <folder>/metrics.jsonl over the steps -> <folder>/loss.png."""
    train, val = read_curves(folder / "metrics.jsonl", "train/loss", "val/loss").values()
    has_train, has_val = len(train[0]) > 0, len(val[0]) > 0

    figure = make_figure(7.5, 4.2)
    axes = figure.subplots()
    style_axes(axes, folder.name)
    if has_train:
        axes.plot(*thin_curve(*train), color="#9db4d0", linewidth=0.8, label="training, each step's batch")
    if has_val:
        label = f"validation, best {val[1].min():.3f}"
        axes.plot(*thin_curve(*val), "o-", color="#c2410c", linewidth=1.8, markersize=4, label=label)
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token")
    axes.locator_params(axis="x", integer=True)
    if has_train or has_val:
        axes.legend(frameon=False)
    path = folder / "loss.png"
    with name_file_in_errors(path):
        figure.savefig(path)
    return path
