"""Reads metrics.jsonl, which has one JSON object per optimizer step. A long run has hundreds of thousands of rows."""

from pathlib import Path
from typing import IO

import numpy as np

from common.errors import UserError

BLOCK_BYTES = 2**24  # the reader parses blocks in parallel; no row may be larger


def read_curves(file: Path | IO[bytes], *keys: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{key: (steps, values)} of metrics, for the steps that logged a finite value.

    Only these keys are kept in memory. pyarrow comes with datasets, and parses JSON several times as fast as Python.
    Raises UserError if the file is damaged.
    """
    import pyarrow
    from pyarrow import json

    schema = pyarrow.schema([("step", pyarrow.int64()), *((key, pyarrow.float64()) for key in keys)])
    parse_options = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    if isinstance(file, Path) and file.stat().st_size == 0:
        return {key: (np.array([]), np.array([])) for key in keys}
    try:
        table = json.read_json(file, json.ReadOptions(block_size=BLOCK_BYTES), parse_options)
    except pyarrow.ArrowInvalid as error:
        message = str(error).partition("\n")[0]
        raise UserError(f"{file} is damaged ({message}); remove the damaged row, or set another run") from None
    # to_numpy would import pandas, which takes 0.4 s
    curves = {}
    for key in keys:
        columns = table.select(["step", key]).drop_null().columns
        steps, values = (np.from_dlpack(column.combine_chunks()) for column in columns)
        curves[key] = steps[~np.isnan(values)], values[~np.isnan(values)]
    return curves
