"""Plot of the training and validation loss of a run."""

from pathlib import Path

from training.metrics import read_metrics


def plot_loss(folder: Path) -> Path:
    """Plot the losses in <folder>/metrics.jsonl over the steps -> <folder>/loss.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_metrics(folder)
    train = [(row["step"], row["train/loss"]) for row in rows if row.get("train/loss") is not None]
    val = [(row["step"], row["val/loss"]) for row in rows if row.get("val/loss") is not None]

    figure, axes = plt.subplots(figsize=(7.5, 4.2), dpi=150, layout="constrained")
    if train:
        axes.plot(*zip(*train, strict=True), color="#9db4d0", linewidth=0.8, label="training, each step's batch")
    if val:
        _, best = min(val, key=lambda point: point[1])
        label = f"validation, best {best:.3f}"
        axes.plot(*zip(*val, strict=True), "o-", color="#c2410c", linewidth=1.8, markersize=4, label=label)
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token", title=folder.name)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if train or val:
        axes.legend(frameon=False)
    path = folder / "loss.png"
    figure.savefig(path)
    plt.close(figure)
    return path
