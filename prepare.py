"""Turn text into tokens on disk, ahead of training (train.py does it as well, where it is missing).

    python prepare.py                                     the default: Python's standard library
    python prepare.py data=text data.path=mybook.txt tokenizer=char
    python prepare.py data=text data.path=articles/ tokenizer.vocab_size=8192 inspect=true
    python prepare.py data=hub data.repo=roneneldan/TinyStories tokenizer=gpt2

the keys most used:
  data.path=PATH            the texts to read: a file, a folder, a pattern
  data.text_column=NAME     where a table has its texts
  data.val_fraction=X       how much of it is held out; data.val_documents=N, data.val_path=PATH likewise
  tokenizer.vocab_size=N    how many tokens a trained vocabulary has at the most
  inspect=true              say what came of it: sizes, and how a few pieces of text are encoded
  verify=true               read all that was written, and compare it with its hashes
"""

if __name__ == "__main__":
    from configs.cli import parse_config

    config = parse_config("prepare", __doc__)


from configs.cli import exit_fast, run_main
from configs.schema import Prepare
from data.inspect import headline, inspect
from data.prepare import prepare
from data.prepared import verify


def main(config: Prepare) -> int:
    spec = None
    if config.tokenizer.run is not None:  # in a checkpoint, which takes torch to read
        from training.init_from import load_run_tokenizer

        spec = load_run_tokenizer(config.tokenizer.run)
    prepared = prepare(config.data, config.tokenizer, block_size=1, spec=spec)
    if config.verify:
        print(verify(prepared))
    print(inspect(prepared) if config.inspect else headline(prepared))
    return 0


if __name__ == "__main__":
    exit_fast(run_main(main, config))
