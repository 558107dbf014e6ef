"""Evaluate a trained model on documents, or on tasks of lm-eval.

    python eval.py run=mine data.path=FILE        loss, perplexity and bits per byte of documents
    python eval.py run=mine tasks=hellaswag       tasks of lm-eval: pip install 'lm-eval>=0.4.12'
    python eval.py run=mine tasks=FILE.yaml       your own task: see docs/interoperability.md

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
from pathlib import Path

from rich.table import Table

from common.console import PlainConsole, make_table, print_text
from common.device import resolve_device, resolve_dtype
from common.errors import UserError
from common.files import atomic_write
from common.settings import format_value
from configs.schema import EvalScriptConfig
from data.readers import iter_documents
from data.sources import resolve_sources
from generation.load import load_for_sampling
from generation.perplexity import score_documents
from generation.prompts import check_output
from training.signals import run_process

MAX_TABLE_ROWS = 20  # documents in the printed table


def main(config: EvalScriptConfig) -> int:
    check_output(config.out)
    sources = resolve_sources(config.data) if config.tasks is None else []
    device = resolve_device(config.device)
    num_sequences = 1 if config.tasks is None else config.batch_size  # that are decoded together
    dtype = resolve_dtype(config.dtype, device, trains=False)
    model, tokenizer, summary = load_for_sampling(
        config.run, config.checkpoint, device, dtype, config.attention, num_sequences
    )
    if config.tasks is None:
        summary += f"\ndocuments of {format_value(config.data.path or config.data.name)}"
    print_text(summary, stderr=True)
    if config.tasks is None:
        sizes = [source.text_bytes for source in sources]
        total_bytes = None if None in sizes else sum(sizes)
        results = score_documents(
            model, tokenizer, iter_documents(sources), config.batch_size, total_bytes
        )
        *rows, all_documents = results
        shown = rows if len(rows) == 1 else [*rows[:MAX_TABLE_ROWS], all_documents]
    else:
        try:
            from generation.lm_eval_adapter import run_tasks
        except ModuleNotFoundError as error:
            raise UserError(
                f"tasks needs {error.name}; install it: pip install 'lm-eval>=0.4.12'"
            ) from None
        shown = results = run_tasks(
            model, tokenizer, config.tasks.split(","), config.batch_size, config.limit
        )
    if config.out is not None:
        atomic_write(Path(config.out), "".join(json.dumps(result) + "\n" for result in results))
        print_text(f"written  {config.out}", stderr=True)
    PlainConsole().print(results_table(shown))
    if len(results) > len(shown) > MAX_TABLE_ROWS and config.out is None:
        print_text(f"the first {MAX_TABLE_ROWS} documents; out=FILE.jsonl saves all", stderr=True)
    return 0


def results_table(results: list[dict]) -> Table:
    """A table with a column for each key."""
    table = make_table(*results[0], left=2)
    for result in results:
        cells = (
            f"{value:.4f}" if isinstance(value, float) else str(value) for value in result.values()
        )
        table.add_row(*("-" if cell == "None" else cell for cell in cells))
    return table


if __name__ == "__main__":
    run_process(main, config)
