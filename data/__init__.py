"""From text to batches.

config.py        settings of the data and the tokenizer
sources.py       where text comes from: the files of a source
readers.py       documents in text files, tables, URLs and data sets of the hub
tokenizer.py     char, byte, bpe and OpenAI's vocabularies; the tokenizer in a checkpoint
prepare.py       text to token files, once: encode.py writes them, token_files.py reads them
loader.py        batches of token windows
"""

from data.config import DataConfig, TokenizerConfig, python_stdlib
