"""lm-eval reads exported folders, and gives the log-likelihoods of plain forward passes."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from generation_helpers import log_prob, make_random_model
from helpers import BPE
from model_helpers import MODERN

from data import tokenizer
from data.readers import Piece
from generation.perplexity import score_documents
from huggingface.folder import write_folder

pytestmark = pytest.mark.slow
WORDS = tokenizer.build_tokenizer(BPE, ["the cat and the hat and the bat sat\n" * 20], True)
# Spaces belong to the continuation. In the last two pairs, it begins within a token of WORDS.
PAIRS = [("the cat sat", " on the mat"), ("the ", "hat"), ("", "the bat"), (" ", "x")]
PAIRS += [("the hat and the bat " * 20, "é")]
PAIRS += [("the hat", "s"), ("the cat", "s and the hat")]
ARGUMENTS = "trust_remote_code=True,add_bos_token=True,logits_cache=False"
TASK = """
task: which
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def model():
    return make_random_model(MODERN, dtype=torch.float64, V=WORDS.n_vocab)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, remote_code, model) -> Path:
    """A folder for transformers with the model, in float32."""
    folder = tmp_path_factory.mktemp("exported")
    checkpoint = {
        "model_config": MODERN,
        "vocab_size": WORDS.n_vocab,
        "tokenizer": tokenizer.to_spec(WORDS),
        "model": model.state_dict(),
    }
    write_folder(folder, checkpoint, "trilgpt", torch.float32)
    return folder


def score_pair(model, context: str, continuation: str) -> tuple[float, bool]:
    """Log-likelihood of the continuation, and whether greedy decoding generates it.

    All tokens count from the first one that the continuation changes. A long context loses its
    beginning.
    """
    tokens = WORDS.encode(context + continuation)
    context_tokens = WORDS.encode(context.rstrip())
    equal = [a == b for a, b in zip(tokens, context_tokens, strict=False)]
    num_targets = len(tokens) - [*equal, False].index(False)
    tokens = [WORDS.start_token, *tokens][-model.config.block_size - 1 :]
    return log_prob(model, tokens, len(tokens) - num_targets)


def load_in_lm_eval(folder: Path, arguments: str):
    """The model as `lm_eval --model hf --model_args` loads it."""
    from lm_eval.models.huggingface import HFLM

    options = {"device": "cpu", "batch_size": 2}
    return HFLM.create_from_arg_string(f"pretrained={folder},{arguments}", options)


def make_requests(*arguments: tuple) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=pair) for pair in arguments]


def test_log_likelihoods_equal_those_of_plain_forward_passes(model, exported):
    results = load_in_lm_eval(exported, ARGUMENTS).loglikelihood(make_requests(*PAIRS))
    for pair, result in zip(PAIRS, results, strict=True):
        expected, is_greedy = score_pair(model, *pair)
        assert result == (pytest.approx(expected, rel=1e-4), is_greedy), pair


def test_rolling_log_likelihoods_are_those_of_documents(model, exported):
    texts = ["the cat", "the cat sat on the mat, and the hat " * 3, ""]
    documents = [[Piece(text, ends_document=True, is_prompt=False)] for text in texts]
    *rows, _ = score_documents(model, WORDS, documents, batch_size=4)
    requests = make_requests(*((text,) for text in texts))
    scores = load_in_lm_eval(exported, "trust_remote_code=True").loglikelihood_rolling(requests)
    for score, row in zip(scores, rows, strict=True):
        assert -score == pytest.approx((row["loss"] or 0) * row["tokens"], rel=1e-4)


def test_command_gives_the_accuracy_of_forward_passes(model, exported, tmp_path):
    questions = {"the ": ["hat", "xyz"], "the cat": [" sat", " and"], "the hat and ": ["o", "the"]}
    num_right = 0
    with open(tmp_path / "questions.jsonl", "w", encoding="utf-8") as file:
        for context, choices in questions.items():
            file.write(json.dumps({"context": context, "choices": choices, "answer": 0}) + "\n")
            scores = [score_pair(model, context, choice)[0] for choice in choices]
            num_right += scores[0] == max(scores)
    (tmp_path / "which.yaml").write_text(TASK, encoding="utf-8")
    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--tasks", "which",
        "--include_path", ".", "--model_args", f"pretrained={exported},{ARGUMENTS}",
        "--output_path", "out",
    ]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    (results,) = tmp_path.glob("out/**/*.json")
    accuracy = json.loads(results.read_text(encoding="utf-8"))["results"]["which"]["acc,none"]
    assert accuracy == pytest.approx(num_right / 3)
