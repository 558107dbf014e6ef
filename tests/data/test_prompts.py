"""Prompts and completions (data.prompt_column): prompts are inputs, but never targets."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_helpers import make_mix, prepare_text
from helpers import BYTE, TEXT_SOURCE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.loader import IGNORE_INDEX, Loader
from data.readers import read_documents
from data.sources import resolve_sources

END = 256  # the end-of-text token of the byte tokenizer
PAIRS = replace(TEXT_SOURCE, path="rows.jsonl", prompt_column="question", text_column="answer")
ROWS = [(f"question {n}: ", f"answer {n * n}") for n in range(40)]
KEEP_FOLDER = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write_rows(path: str, rows: list[tuple]) -> None:
    if path.endswith(".csv"):
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([("answer", "n", "question"), *((b, 1, a) for a, b in rows)])
    elif path.endswith(".parquet"):
        questions, answers = zip(*rows, strict=True)
        pq.write_table(pa.table({"answer": answers, "n": [1] * len(rows), "question": questions}), path)
    else:
        Path(path).write_text("".join(json.dumps({"question": a, "n": 1, "answer": b}) + "\n" for a, b in rows))


def reference(rows: list[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    """Token ids of the rows, and whether each one is a target."""
    ids, is_target = [], []
    for prompt, completion in rows:
        ids += [*prompt.encode(), *completion.encode(), END]
        is_target += [False] * len(prompt.encode()) + [True] * (len(completion.encode()) + 1)
    return ids, is_target


@pytest.mark.parametrize("path", ["rows.jsonl", "rows.csv", "rows.parquet"])
@KEEP_FOLDER
@given(rows=st.lists(st.tuples(st.text("ab é", max_size=9), st.text("ab é", max_size=9)), min_size=1, max_size=9))
def test_batches_have_targets_only_in_completions(workdir, monkeypatch, path, rows):
    """The reference is the bytes of each row. Long prompts are read in several pieces."""
    monkeypatch.setattr("data.readers.MAX_PIECE_CHARS", 4)
    rows = [*rows, ("ab", "a")]
    write_rows(path, rows)
    write_rows("train.jsonl", ROWS)
    prepared = prepare_text(replace(PAIRS, path="train.jsonl", val_path=path))
    loader = Loader(prepared, 5, seed=1)
    x, y, _ = loader.batch("val", 0, loader.val_windows)
    ids, is_target = reference(rows)
    positions = [min(i, len(ids) - 1 - loader.val_T) for i in range(0, len(ids) - 1, loader.val_T)]
    for first, row_x, row_y in zip(range(0, len(ids), loader.val_T), x.tolist(), y.tolist(), strict=False):
        start = positions[first // loader.val_T]
        assert row_x == ids[start : start + loader.val_T]
        for position, target in enumerate(row_y, start=start + 1):
            assert target == (ids[position] if is_target[position] and position > first else IGNORE_INDEX)
    assert (y != IGNORE_INDEX).sum() == sum(is_target[1:])


@KEEP_FOLDER
@given(T=st.integers(2, 40), first=st.integers(0, 200), count=st.integers(1, 9), mixed=st.booleans())
def test_training_batches_of_one_source_and_of_a_mix(workdir, T, first, count, mixed):
    """Prompts and completions use different characters, so that each target shows where it is from."""
    write_rows("rows.jsonl", [("abcdef" * (n % 5), "xyz" * (n % 3)) for n in range(40)])
    plain = replace(TEXT_SOURCE, name="plain", path="text.txt")
    prepared = prepare_text(make_mix(mix={"pairs": PAIRS, "plain": plain}) if mixed else PAIRS)
    loader = Loader(prepared, T, seed=0, document_mask=True)
    x, y, doc_ids = loader.batch("train", first, count)
    assert torch.equal(doc_ids, (x == END).cumsum(1))
    following = x[:, 1:]
    inner = y[:, :-1]
    is_counted = inner != IGNORE_INDEX
    assert torch.equal(inner[is_counted], following[is_counted])
    if not mixed:
        assert torch.equal(~is_counted, torch.isin(following, torch.tensor(list(b"abcdef"))))
    assert loader.count_targets(first, count) == max(1, int((y != IGNORE_INDEX).sum()))


def test_documents_are_read_with_their_prompts(workdir):
    rows = [("Q: ", "yes"), ("", "no"), ("Q: x", "")]
    write_rows("rows.jsonl", [*rows, ("Q", None), (None, None)])
    assert read_documents(resolve_sources(PAIRS)) == rows


JSONL, CSV, PARQUET = "rows.jsonl", "rows.csv", "rows.parquet"
FILL = [("a" * 30, "b" * 30)] * 3


@pytest.mark.parametrize(
    ("path", "rows", "changes", "message"),
    [
        (JSONL, FILL, {"prompt_column": "q"}, "line 1 of rows.jsonl has no column q; set data.prompt_column to one of"),
        (CSV, FILL, {"prompt_column": "q"}, "rows.csv has no column q; set data.prompt_column to one of answer, n, q"),
        (PARQUET, FILL, {"text_column": "q"}, "rows.parquet has no column q; set data.text_column to one of"),
        (PARQUET, FILL, {"prompt_column": "n"}, "column n of rows.parquet has type int64; set data.prompt_column"),
        (JSONL, [*FILL, (None, "a")], {}, "column question in line 4 of rows.jsonl is null; write"),
        (PARQUET, [*FILL, (None, "a")], {}, "column question in a row of rows.parquet is null; write"),
        (JSONL, [("a" * 30, None)] * 3, {}, "column answer of rows.jsonl has no text to complete a prompt; set"),
        (JSONL, FILL[:1], {}, "has only one prompt and completion; use more rows, or set data.val_path"),
        ("text.txt", FILL, {}, "text.txt is no table, so it has no column question; set data.path to .jsonl"),
    ],
)
def test_rows_without_prompt_or_completion_are_refused(workdir, path, rows, changes, message):
    if path != "text.txt":
        write_rows(path, rows)
    with pytest.raises(UserError, match=message):
        prepare_text(replace(PAIRS, path=path, **changes), BYTE)
