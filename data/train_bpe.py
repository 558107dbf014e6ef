"""Train a byte-pair vocabulary in a separate process, which a signal can end.

rustbpe itself cannot be interrupted. data/tokenizer.py starts this process. It reads
{"texts": [...], "vocab_size": N, "pattern": "..."} as JSON from stdin, and writes the tokens to
stdout as a JSON list of base64 strings, in the order of their ids.
"""

import base64
import json
import sys

import rustbpe


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    trainer = rustbpe.Tokenizer()  # ty: ignore[missing-attribute] (compiled, without type stubs)
    texts = iter(request["texts"])
    trainer.train_from_iterator(texts, request["vocab_size"], pattern=request["pattern"])
    ranks = trainer.get_mergeable_ranks()  # in the order of their ids
    print(json.dumps([base64.b64encode(bytes(token)).decode() for token, _ in ranks]))


if __name__ == "__main__":
    main()
