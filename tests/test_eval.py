"""eval.py: the loss of documents, and tasks of lm-eval."""

import json
import math
import sys

import pytest
import torch
from helpers import TEXT, metrics, read_jsonl, run_command

from generation.load import load_run

TASK = """
task: squares
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


# The loss of documents


@pytest.mark.parametrize("batch_size", [1, 32])
def test_loss_of_the_validation_text_equals_its_evaluation(train, evaluate, workdir, batch_size):
    """The reference is the run's last evaluation, on the complete validation split, which begins with a newline.

    Documents are scored after a newline, which is the start token of this text.
    """
    cut = TEXT.index("\n", round(len(TEXT) * 0.9))
    assert (
        train("name=a", "eval.windows=null", f"data.val_fraction={1 - (cut + 0.5) / len(TEXT)}")
        == 0
    )
    evaluated = metrics("a")[-1]
    (workdir / "val.txt").write_text(TEXT[cut + 1 :], encoding="utf-8")
    settings = ["run=a", "checkpoint=last", "data.path=val.txt", f"batch_size={batch_size}"]
    out = evaluate(*settings, "out=o.jsonl")
    assert "all" not in out, "one document needs no second row"
    row, total = read_jsonl("o.jsonl")
    assert total == row | {"document": "all", "beginning": ""}
    assert row["tokens"] == len(TEXT) - cut - 1
    assert row["loss"] == pytest.approx(evaluated["val/loss"], abs=2e-5)
    assert row["bits_per_byte"] == pytest.approx(evaluated["val/bpb"], abs=2e-5)
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert f"{row['loss']:.4f}" in out and f"{row['bits_per_byte']:.4f}" in out


def test_loss_is_reported_for_each_document_and_for_all(train, evaluate, workdir):
    """The reference is one window per document, after an end-of-text token."""
    documents = [f"line {i} says {i * i}" for i in range(30)] + [""]
    (workdir / "t.jsonl").write_text(
        "\n".join(json.dumps({"text": document}) for document in documents), encoding="utf-8"
    )
    assert train("name=a", "data.path=t.jsonl", "model.block_size=32") == 0
    out = evaluate("run=a", "data.path=t.jsonl", "out=o.jsonl")
    *rows, total = read_jsonl("o.jsonl")
    assert [row["document"] for row in rows] == list(range(1, 32))
    model, tokenizer = load_run("a")
    nats = n_tokens = 0
    for document, row in zip(documents, rows, strict=True):
        tokens = [tokenizer.eot_token, *tokenizer.encode(document)]
        assert row["tokens"] == len(tokens) - 1 and row["bytes"] == len(document)
        if len(tokens) == 1:
            assert row["loss"] is None
            continue
        logits = model(torch.tensor([tokens[:-1]]))[0]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]))
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)
        nats, n_tokens = nats + loss.item() * len(logits), n_tokens + len(logits)
    assert total["loss"] == pytest.approx(nats / n_tokens, abs=1e-5)
    assert (
        f"{total['loss']:.4f}" in out.splitlines()[-2]
        and "line 19 says" in out
        and "line 20 says" not in out
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_low_precision_weights_change_the_loss_only_slightly(train, evaluate, dtype):
    if dtype == "int8" and "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("NOT RUN: int8 needs an x86 CPU")
    assert train("name=a", "train.steps=30") == 0
    losses, tolerance = {}, {"bfloat16": 1e-2, "float16": 1e-3, "int8": 3e-2}[dtype]
    for name in ("float32", dtype):
        evaluate("run=a", "data.path=text.txt", f"dtype={name}", f"out={name}.jsonl")
        losses[name] = read_jsonl(f"{name}.jsonl")[0]["loss"]
    assert losses["float32"] != losses[dtype]
    assert losses["float32"] == pytest.approx(losses[dtype], abs=tolerance)


# Tasks of lm-eval


def test_task_from_a_file_is_scored_on_a_model_with_ngrams(trained, evaluate, workdir):
    """The context of the last question does not fit into block_size=16. Batches of 2 divide its three choices."""
    pytest.importorskip("lm_eval", reason="NOT RUN: needs lm-eval")
    contexts = {
        "The 1": ["st", "th line"],
        "no": [" more", "The", "."],
        "The 22nd line says ": ["no", "484", "s"],
    }
    questions = [
        {"context": context, "choices": choices, "answer": 1}
        for context, choices in contexts.items()
    ]
    (workdir / "questions.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8"
    )
    (workdir / "squares.yaml").write_text(TASK, encoding="utf-8")
    out = evaluate("run=a", "tasks=squares.yaml", "out=o.jsonl", "batch_size=2")
    model, tokenizer = load_run("a")
    assert model.ngrams is not None
    right = {"acc": 0, "acc_norm": 0}
    for question in questions:
        scores = []
        for choice in question["choices"]:
            tokens = [tokenizer.start_token, *tokenizer.encode(question["context"] + choice)]
            tokens = torch.tensor(tokens[-17:])
            n = len(choice) + question["context"].endswith(" ")
            log_probs = model(tokens[None, :-1])[0, -n:].log_softmax(1)
            scores.append(log_probs.gather(1, tokens[-n:, None]).sum().item())
        right["acc"] += scores.index(max(scores)) == 1
        normalized = [
            score / len(choice) for score, choice in zip(scores, question["choices"], strict=True)
        ]
        right["acc_norm"] += normalized.index(max(normalized)) == 1
    rows = read_jsonl("o.jsonl")
    assert [(row["task"], row["metric"], row["value"]) for row in rows] == [
        ("squares", key, pytest.approx(n / 3)) for key, n in right.items()
    ]
    for row in rows:
        p = row["value"]
        assert row["stderr"] == pytest.approx(math.sqrt(p * (1 - p) / 2))
        assert f"{row['metric']} " in out and f"{p:.4f}" in out and f"{row['stderr']:.4f}" in out


def test_missing_lm_eval_is_reported(trained, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "generation.lm_eval_adapter", raising=False)
    assert run_command("eval", "run=a", "tasks=hellaswag") == 2
    assert "pip install 'lm-eval" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "needs documents; set data.path, or tasks"),
        (["run=no/where", "data.path=text.txt"], "run=no/where has no checkpoint"),
        (["data.path=nothing.txt"], "data.path=nothing.txt has no file to read"),
        (
            ["data.path=unknown.txt"],
            "document 1 has characters that are not in the vocabulary: 'Ü'; remove",
        ),
        (["data.path=text.txt", "out=text.txt"], "out=text.txt exists, or"),
        (["limit=3"], "limit=3 needs tasks"),
        (["dtype=int4"], "dtype=int4 is unknown (did you mean int8?); set one of auto, float32"),
        (["tasks=nothing.yaml"], "tasks=nothing.yaml is neither a task of lm-eval"),
    ],
)
def test_invalid_settings_are_refused(trained, workdir, capsys, overrides, message):
    if "tasks=nothing.yaml" in overrides:
        pytest.importorskip("lm_eval", reason="NOT RUN: needs lm-eval")
    (workdir / "unknown.txt").write_text("The\nÜ\n", encoding="utf-8")
    assert run_command("eval", *overrides) == 2
    assert message in capsys.readouterr().err
