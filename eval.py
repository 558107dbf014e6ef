"""Score documents with a trained model: loss, perplexity and bits per byte.

    python eval.py run=mine data.path=FILE

most used keys:
  run=NAME            a run in runs/; last is the newest; hf:FOLDER is a transformers model
  data.path=FILE      a file, a folder or a pattern, all of which is scored; data.text_column
                      and other keys as for train.py
  out=FILE.jsonl      also save the table, one line per row; batch_size=N scores N windows at a time
  checkpoint=last     instead of best; dtype=bfloat16 has smaller weights

docs/scoring.md also shows how to run tasks of lm-eval.
"""

if __name__ == "__main__":  # before the slow imports below, so that a typo is reported immediately
    from configs.cli import parse_config

    config = parse_config("eval", __doc__)

import json
from typing import Any

from rich.table import Table

from common.console import PlainConsole, make_table, print_text
from common.files import atomic_write, check_output
from common.process import run_process
from configs.schema import EvalScriptConfig
from data.readers import iter_documents
from data.sources import resolve_source
from generation.load import load_for_inference
from generation.perplexity import score_documents

MAX_TABLE_ROWS = 20  # documents in the printed table; out=FILE.jsonl has all


def main(config: EvalScriptConfig) -> int:
    out = check_output(config.out)
    source = resolve_source(config.data)
    # scoring decodes nothing
    model, tokenizer, _ = load_for_inference(config, decodes_batches=False)
    texts = iter_documents(source)
    rows = score_documents(model, tokenizer, texts, config.batch_size, source.text_bytes)
    if out is not None:
        atomic_write(out, "".join(json.dumps(row) + "\n" for row in rows))
        print_text(f"written  {config.out}", stderr=True)
    *documents, total = rows
    PlainConsole().print(make_results_table([*documents[:MAX_TABLE_ROWS], total]))
    return 0


def make_results_table(rows: list[dict[str, Any]]) -> Table:
    """A table with a column for each key."""
    table = make_table(*rows[0], left=2)
    for row in rows:
        table.add_row(*map(format_cell, row.values()))
    return table


def format_cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run_process(main, config)
