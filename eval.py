"""Score documents with a trained model, or run tasks of lm-eval.

    python eval.py run=mine data.path=FILE        loss, perplexity and bits per byte of documents
    python eval.py run=mine tasks=hellaswag       tasks of lm-eval: pip install 'lm-eval>=0.4.12'
    python eval.py run=mine tasks=FILE.yaml       your own task: see docs/scoring.md

most used keys:
  run=NAME            a run in runs/; last is the newest; hf:FOLDER is a transformers model
  data.path=FILE      a file, a folder or a pattern; data.text_column and other keys as for train.py
  tasks=NAME,...      lm-eval's tasks, or YAML files; limit=N uses N questions of each task
  out=FILE.jsonl      also save the table, one line per row; batch_size=N scores N windows at a time
  checkpoint=last     instead of best; dtype=bfloat16 needs half the memory for weights
"""

if __name__ == "__main__":  # before the slow imports below, so that a typo is reported immediately
    from configs.cli import parse_config

    config = parse_config("eval", __doc__)

import json
from typing import Any

from rich.table import Table

from common.console import PlainConsole, make_table, print_text
from common.errors import UserError
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
    if config.tasks is None:
        rows = score_data(config)
        shown = [*rows[:-1][:MAX_TABLE_ROWS], rows[-1]]
    else:
        rows = score_tasks(config, config.tasks.split(","))
        shown = rows
    if out is not None:
        atomic_write(out, "".join(json.dumps(row) + "\n" for row in rows))
        print_text(f"written  {config.out}", stderr=True)
    PlainConsole().print(make_results_table(shown))
    return 0


def score_data(config: EvalScriptConfig) -> list[dict[str, Any]]:
    """Score each document of the settings `data`. The last row is for all documents."""
    source = resolve_source(config.data)
    # scoring decodes nothing
    model, tokenizer, _ = load_for_inference(config, decodes_batches=False)
    documents = iter_documents(source)
    return score_documents(model, tokenizer, documents, config.batch_size, source.text_bytes)


def score_tasks(config: EvalScriptConfig, tasks: list[str]) -> list[dict[str, Any]]:
    """Run tasks of lm-eval. Returns a row for each metric of a task."""
    try:
        from generation.lm_eval_adapter import run_tasks
    except ModuleNotFoundError as error:
        advice = "install it: pip install 'lm-eval>=0.4.12'"
        raise UserError(f"tasks needs {error.name}; {advice}") from None
    # tasks generate one sample at a time
    model, tokenizer, _ = load_for_inference(config, decodes_batches=False)
    return run_tasks(model, tokenizer, tasks, config.batch_size, config.limit)


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
