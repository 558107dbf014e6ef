"""Where text comes from: each source is a function from a DataConfig to the files (paths or URLs) to read.

A new source is one function here, in SOURCES, and one YAML file in configs/data/ that names it.
"""

import glob
import hashlib
import sysconfig
from collections.abc import Callable
from pathlib import Path

from data.config import DataConfig
from errors import UserError


def python_stdlib(config: DataConfig) -> list[str]:
    """The source code of the running interpreter's standard library: real text that is on every machine.

    In the order of a hash of the names, so that the end, which is held out for validation, is a fair sample.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "idlelib", "lib2to3", "encodings", "site-packages", "dist-packages"}
    files = [p for p in root.rglob("*.py") if not left_out.intersection(p.relative_to(root).parts)]
    if not files:
        raise UserError(f"this Python has no standard library source at {root}; set data=text data.path=FILE")
    return [str(p) for p in sorted(files, key=lambda p: hashlib.sha256(str(p.relative_to(root)).encode()).digest())]


def text(config: DataConfig) -> list[str]:
    """A text file of the user's own."""
    return [config.path]


def url(config: DataConfig) -> list[str]:
    """A text file at a public address."""
    return [config.url]


SOURCES: dict[str, Callable[[DataConfig], list[str]]] = {f.__name__: f for f in (python_stdlib, text, url)}


def files(config: DataConfig) -> list[str]:
    """The paths or URLs that `config` names; data.path wins. Raises UserError where there is nothing to read."""
    if config.path is None:
        if config.source not in SOURCES:
            raise UserError(f"data.source={config.source} is unknown; set one of {', '.join(SOURCES)}")
        return SOURCES[config.source](config)
    path = Path(config.path).expanduser()
    if path.is_dir():
        raise UserError(f"data.path={config.path} is a folder; set data.path to one text file in it")
    if not path.is_file():
        raise UserError(
            f"data.path={config.path} does not exist; set data.path to a text file (relative to {Path.cwd()})"
        )
    return [str(path)]


def is_url(file: str) -> bool:
    return file.startswith(("http://", "https://"))


def digest(files: list[str]) -> str:
    """A hash of what the files hold. A URL stands for itself: it is not downloaded just to see that it is the same."""
    whole = hashlib.sha256()
    for file in files:
        if is_url(file):
            whole.update(file.encode())
        else:
            with open(file, "rb") as f:
                whole.update(hashlib.file_digest(f, "sha256").digest())
    return whole.hexdigest()


def read(files: list[str]) -> list[str]:
    """The text of each file, one document a file; line ends become newlines. Raises UserError."""
    import datasets

    datasets.disable_progress_bars()
    names = [file if is_url(file) else glob.escape(str(Path(file).resolve())) for file in files]
    try:
        # Local files are streamed, so that no second copy is written into a cache; a URL is downloaded into one.
        stream = not any(is_url(file) for file in files)
        rows = datasets.load_dataset("text", data_files=names, sample_by="document", split="train", streaming=stream)
        documents = [row["text"] for row in rows]
    except UnicodeDecodeError as error:
        raise UserError(where_not_utf8(files, error)) from None
    except Exception as error:
        # Many libraries lie between here and the network, each with its own exceptions; the local ones are checked.
        if not any(is_url(file) for file in files):
            raise
        raise UserError(
            f"{files[0]} could not be downloaded ({type(error).__name__}); "
            "get the file by other means and set data.path=FILE"
        ) from error
    if not any(documents):
        raise UserError(f"{', '.join(files[:3])} holds no text; set data.path to a file that does")
    return documents


def where_not_utf8(files: list[str], error: UnicodeDecodeError) -> str:
    for file in files:
        if not is_url(file):
            try:
                Path(file).read_bytes().decode()
            except UnicodeDecodeError as found:
                return (
                    f"{file} is not UTF-8: byte {found.start} is 0x{found.object[found.start]:02x}; "
                    "save it as UTF-8 (iconv -f latin1 -t utf-8, for instance)"
                )
    return f"{files[0]} is not UTF-8 ({error.reason}); save it as UTF-8"
