"""Turn text into tokens on disk, ahead of training (train.py does it as well, where it is missing).

    python prepare.py                                     the default: Python's standard library
    python prepare.py data=text data.path=mybook.txt tokenizer=char
    python prepare.py data=shakespeare_char tokenizer=char

the keys most used:
  data.path=FILE            the text to read
  data.val_fraction=X       how much of it is held out
  tokenizer.vocab_size=N    how many tokens a trained vocabulary has at the most
"""

if __name__ == "__main__":
    from configs.entry import start

    config = start("prepare", __doc__)


from configs.entry import leave, run
from configs.schema import Prepare
from data.prepare import prepare


def main(config: Prepare) -> int:
    prepared = prepare(config.data, config.tokenizer, block_size=1)
    meta = prepared.meta
    print(
        f"{prepared.folder}: {meta['tokens']['train']:,} tokens to train on and {meta['tokens']['val']:,} to validate, "
        f"{meta['tokenizer']['name']} vocabulary of {meta['vocab_size']:,}, {meta['source']['documents']:,} documents"
    )
    return 0


if __name__ == "__main__":
    leave(run(main, config))
