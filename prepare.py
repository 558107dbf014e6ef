"""Convert text to token files before training. train.py does the same if the files do not exist yet.

    python prepare.py                                     the default: Python's standard library
    python prepare.py data=text data.path=mybook.txt tokenizer=char
    python prepare.py data=text data.path=articles/ tokenizer.vocab_size=8192 inspect=true
    python prepare.py data=hub data.repo=roneneldan/TinyStories tokenizer=gpt2

most used keys:
  data.path=PATH            the text to read: a file, a folder or a pattern
  data.text_column=NAME     the column of a table that contains the text
  data.val_fraction=X       the fraction to hold out; or data.val_documents=N or data.val_path=PATH
  tokenizer.vocab_size=N    maximum number of tokens of a trained vocabulary
  inspect=true              print sizes and samples of tokenized text
  verify=true               compare all token files with their SHA-256
"""

if __name__ == "__main__":  # before the slow imports below, so that a typo is reported immediately
    from configs.cli import parse_config

    config = parse_config("prepare", __doc__)


from common.process import run_process
from data.config import PrepareConfig
from data.inspect import inspect, summary_line
from data.prepare import prepare
from data.shards import verify


def main(config: PrepareConfig) -> int:
    spec = None
    if config.tokenizer.run is not None:  # imports torch
        from training.init_from import load_run_tokenizer

        spec = load_run_tokenizer(config.tokenizer.run)
    prepared = prepare(config.data, config.tokenizer, block_size=1, spec=spec)
    if config.verify:
        print(verify(prepared))
    print(inspect(prepared) if config.inspect else summary_line(prepared))
    return 0


if __name__ == "__main__":
    run_process(main, config)
