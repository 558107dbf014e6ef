"""What texts cost a model, as a table: see perplexity.py for the numbers."""

MOST = 20  # documents that it shows
FORMS = {"tokens": ",", "loss": ".4f", "perplexity": ",.2f", "bits_per_byte": ".4f"}


class PerplexityTable:
    """A row per document, of many the first, and one for all of them together."""

    def __init__(self, documents: int):
        from rich import box
        from rich.table import Table

        self.documents, self.rows = documents, 0
        self.table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        self.table.add_column("document", justify="right")
        self.table.add_column("begins with", overflow="ellipsis", no_wrap=True, width=20)
        for title in FORMS:
            self.table.add_column(title.replace("bits_per_byte", "bits/byte"), justify="right", no_wrap=True)

    def add(self, document: str, numbers: dict) -> None:
        """numbers: as Score.numbers()."""
        self.rows += 1
        if self.documents == 1:
            return  # the whole is all there is
        if self.rows <= MOST:
            begins = " ".join(document[:80].split())
            begins = "".join(c if c.isprintable() else "\ufffd" for c in begins)
            self.table.add_row(f"{self.rows:,}", begins, *_cells(numbers), end_section=self.rows == self.documents)
        elif self.rows == MOST + 1:
            self.table.add_row("...", f"{self.documents - MOST:,} more", end_section=True)

    def print(self, whole: dict) -> None:
        from rich.console import Console

        self.table.add_row("whole", "", *_cells(whole))
        Console(highlight=False, markup=False, emoji=False).print(self.table)


def _cells(numbers: dict) -> list[str]:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return [cell(numbers[key], form) for key, form in FORMS.items()]
