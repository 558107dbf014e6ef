"""Convert text to token files before training. train.py does the same if there are none yet.

    python prepare.py                                     the default: Python's standard library
    python prepare.py data=text data.path=mybook.txt tokenizer=char
    python prepare.py data=text data.path=articles/ tokenizer.vocab_size=8192
    python prepare.py data=hub data.repo=roneneldan/TinyStories tokenizer=gpt2

most used keys:
  data.path=PATH            the text to read: a file, a folder or a pattern
  data.text_column=NAME     the column of a table that contains the text
  data.val_fraction=X       the fraction to hold out; or data.val_documents=N or data.val_path=PATH
  tokenizer.vocab_size=N    maximum number of tokens of a trained vocabulary
"""

if __name__ == "__main__":  # before the slow imports below, so that a typo is reported immediately
    from configs.cli import parse_config

    config = parse_config("prepare", __doc__)

from common.console import format_si, pluralize
from common.process import run_process
from data.prepare import PreparedData, prepare
from data.token_files import to_token_ids
from data.tokenizer import token_strings
from training.config import RunConfig
from training.presets import choose_preset


def main(config: RunConfig) -> int:
    """Prepare the data. Returns the exit code."""
    config = choose_preset(config)  # the size of the vocabulary
    spec = None
    if config.tokenizer.run is not None:
        from training.build import load_run_tokenizer  # imports torch

        spec = load_run_tokenizer(config.tokenizer.run)
    print(describe(prepare(config.data, config.tokenizer, block_size=1, spec=spec)))
    return 0


def describe(prepared: PreparedData) -> str:
    """The folder, and the size and the first tokens of each split."""
    meta = prepared.meta
    tokenizer = prepared.tokenizer
    lines = [f"{prepared.folder}: {tokenizer.name} vocabulary of {meta['vocab_size']:,}"]
    for split, tokens in (("train", prepared.train), ("val", prepared.val)):
        first_tokens = token_strings(tokenizer, to_token_ids(tokens[:20]).tolist())
        documents = pluralize(meta["documents"][split], "document")
        size = format_si(meta["bytes"][split], "B")
        lines.append(
            f"{split:5} {meta['tokens'][split]:,} tokens, {documents}, {size} of text: "
            f"{'│'.join(first_tokens)}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_process(main, config)
