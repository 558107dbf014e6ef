"""Progress of a bench."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class BenchProgress:
    """Shows what is being measured and how long the rest will take; above the bar, what came of each piece of work.

    weights: about how long each piece takes, in any unit.
    """

    def __init__(self, labels: list[str], weights: list[float]):
        self.console = Console(highlight=False, emoji=False, markup=False)
        self.labels, self.weights, self.done = labels, weights, 0
        self.width = max(map(len, labels))
        self.bar = Progress(
            TextColumn("{task.fields[label]}"), BarColumn(bar_width=None), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), console=self.console, disable=not self.console.is_terminal, transient=True,
            expand=True, speed_estimate_period=600, refresh_per_second=2,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=sum(weights), label="")
        self._show(0.0)

    def __enter__(self) -> "BenchProgress":
        self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        self.bar.stop()

    def advance(self, part: float) -> None:
        """`part`, 0 to 1, of the piece at hand is done."""
        self._show(part * self.weights[self.done])

    def end(self, line: str) -> None:
        """The piece at hand is done; `line` tells what came of it."""
        self.console.print(f"{self.labels[self.done]:<{self.width}}  {line}", soft_wrap=True)
        self.done += 1
        self._show(0.0)

    def _show(self, beyond: float) -> None:
        """beyond: how much of the piece at hand is done, in the unit of weights."""
        label = f"{self.labels[min(self.done, len(self.labels) - 1)]:<{self.width}}"
        self.bar.update(self.task, completed=sum(self.weights[: self.done]) + beyond, label=label)
