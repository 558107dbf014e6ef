"""What all progress displays and tables share: formatting of times, sizes and counts."""

LINE_INTERVAL_S = 10.0  # seconds between plain lines


def format_bytes(size: float) -> str:
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if size >= unit), (1e3, "kB"))
    return f"{size / unit:,.2f} {name}" if unit == 1e9 else f"{size / unit:,.1f} {name}"


def format_duration(seconds: float) -> str:
    """90.4 -> "1:30"; 3700 -> "1:01:40"."""
    minutes, whole = divmod(round(max(0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"


def printable(text: str) -> str:
    """What a terminal shows and does not obey: control characters but for line ends and tabs replaced."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)


def pluralize(count: int, noun: str) -> str:
    """1 layer, 2 layers, 2 processes."""
    return f"{count:,} {noun}" + {"process": "es"}.get(noun, "s") * (count != 1)
