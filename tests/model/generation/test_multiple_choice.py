"""Multiple-choice questions: their layouts, the scores of choices, predictions and intervals."""

import json
import math
from dataclasses import replace

import pytest
import torch
from generation_helpers import BYTES, GPT2, WINDOWED, make_random_model
from helpers import BPE
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import MODERN

from common.errors import UserError
from data import tokenizer
from model.generation.multiple_choice import (
    Question,
    encode_choices,
    read_questions,
    score_choices,
    wilson_interval,
)

WORDS = tokenizer.bpe(tokenizer.Corpus(["the cat and the hat and the bat sat\n" * 20], True), BPE)
QUESTIONS = [
    Question("the cat sat", [" and", " on the mat", "."], 0, "a"),
    Question("the ", ["hat", "cat and the hat"], 1, "b"),
    Question("", ["the bat", "x"], 0, "c"),
    Question("the hat and the bat " * 20, ["sat", "and sat and sat", "é"], 2, "truncated"),
]
ARC = {"question": "Which is hot?", "choices": {"text": ["ice", "fire"], "label": ["A", "B"]}, "answerKey": "B"}
AI2_CHOICES = [{"text": "ice", "label": "1"}, {"text": "fire", "label": "2"}]
AI2 = {"id": "x", "question": {"stem": "Which is hot?", "choices": AI2_CHOICES}, "answerKey": "2"}
OURS = {"context": "1 + 1 =", "choices": [" 3", " 2"], "answer": 1}
HELLASWAG = {
    "activity_label": "Baking",
    "ctx_a": "How to bake [title] Start.",
    "ctx_b": "the COOK",
    "ctx": "How to bake [title] Start. the COOK",
    "endings": ["eats. [substeps] Well.", "[step] runs"],
    "label": "1",
}


def read(workdir, *lines):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (workdir / "q.jsonl").write_text(text, encoding="utf-8")
    return read_questions("q.jsonl")


def score_alone(model, encoding, question, choice):
    """The reference: one forward pass per token of the choice, without padding."""
    context = question.context.rstrip()
    tokens, n = encoding.encode(question.context + choice), len(encoding.encode(context))
    end = encoding._special_tokens.get("<|endoftext|>")
    if end is not None:
        tokens, n = [end, *tokens], n + 1
    elif n == 0:
        tokens, n = [*encoding.encode("\n"), *tokens], n + 1
    first, total = max(0, len(tokens) - 1 - model.config.block_size), 0.0
    for i in range(n, len(tokens)):
        logits = model(torch.tensor([tokens[first:i]]))[0, -1].double()
        total += logits.log_softmax(0)[tokens[i]].item()
    return total


@pytest.mark.parametrize("variant", [GPT2, MODERN, WINDOWED], ids=["gpt2", "modern", "windowed"])
@pytest.mark.parametrize("encoding", [BYTES, WORDS], ids=["byte", "bpe"])
def test_scores_equal_those_of_choices_alone(variant, encoding):
    model = make_random_model(variant, dtype=torch.float64, V=encoding.n_vocab)
    encoded = [encode_choices(encoding, question, model.config.block_size) for question in QUESTIONS]
    score_choices(model, [choice for choices in encoded for choice in choices])
    for question, choices in zip(QUESTIONS, encoded, strict=True):
        reference = [score_alone(model, encoding, question, choice) for choice in question.choices]
        assert [choice.score for choice in choices] == pytest.approx(reference, rel=1e-5), question.name
        assert any(choice.is_truncated for choice in choices) == (question.name == "truncated")


@given(st.integers(1, 12), st.integers(0, 14))
def test_choices_fit_up_to_block_size_and_are_truncated_beyond(n_choice, n_context):
    question = Question("c" * n_context, ["x" * n_choice, "y"], 0, "line 1")
    if n_choice > 8:
        with pytest.raises(UserError, match=rf"choice 1 in line 1 has {n_choice} tokens .* model.block_size=8"):
            encode_choices(BYTES, question, block_size=8)
        return
    longest, _ = encode_choices(BYTES, question, block_size=8)
    length = max(1, n_context) + n_choice
    assert len(longest.tokens) == min(length, 9) and longest.is_truncated == (length > 9)
    assert longest.n_scored == n_choice


def test_choice_inside_a_token_of_the_context_is_refused():
    assert len(WORDS.encode("the")) == len(WORDS.encode("t")) == 1
    with pytest.raises(UserError, match="choice 2 in line 1 has 0 tokens after the context"):
        encode_choices(WORDS, Question("t", [" and", "he"], 0, "line 1"), 8)


def test_layouts_give_the_contexts_of_lm_evaluation_harness(workdir):
    questions = read(workdir, OURS, "", HELLASWAG, ARC, AI2, {**HELLASWAG, "label": 0}, {**OURS, "answer": "0"})
    where = [f"line {number} of questions=q.jsonl" for number in (1, 3, 4, 5, 6, 7)]
    baking = Question("Baking: How to bake. Start. The cook ", ["eats. Well.", " runs"], 1, where[1])
    hot = Question("Question: Which is hot?\nAnswer: ", ["ice", "fire"], 1, where[2])
    assert questions == [
        Question("1 + 1 =", [" 3", " 2"], 1, where[0]),
        baking,
        hot,
        replace(hot, name=where[3]),
        replace(baking, name=where[4], answer=0),
        Question("1 + 1 =", [" 3", " 2"], 0, where[5]),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not a question"),
        ("[1]", "is not a question"),
        ({"context": "a", "answer": 0}, 'has no "choices"'),
        ({"context": "a", "choices": ["b", 3], "answer": 0}, "is not a question"),
        ({"context": "a", "choices": {"b": 1, "c": 2}, "answer": 0}, "is not a question"),
        ({"context": "a", "choices": ["b"], "answer": 0}, "needs two or more choices"),
        ({"context": "a", "choices": ["b", ""], "answer": 0}, "needs two or more choices"),
        *(({**OURS, "answer": answer}, "has an answer that is none") for answer in (2, -1, None, True, 1.0, "b")),
        ({**HELLASWAG, "label": ""}, "has an answer that is none of its 2 choices"),
        ({"ctx": "a", "endings": ["b", "c"], "label": 0}, 'has no "activity_label"'),
        ({**HELLASWAG, "ctx_b": 3}, "is not a question"),
        ({**ARC, "answerKey": "C"}, "has an answer that is none of its 2 choices"),
        ({**AI2, "question": {"stem": "a"}}, 'has no "choices"'),
        ({**AI2, "question": "a"}, "is not a question"),
    ],
)
def test_invalid_questions_are_refused_with_their_line(workdir, line, message):
    with pytest.raises(UserError, match=f"^line 2 of questions=q.jsonl {message}"):
        read(workdir, OURS, line)


def test_file_without_questions_is_refused(workdir):
    with pytest.raises(UserError, match=r"questions=q\.jsonl contains no questions"):
        read(workdir, "\n")


def test_predictions_are_the_most_likely_choice_in_total_and_per_character():
    question = Question("", ["a", "éé", "abcd"], 0, "")
    assert question.predict([-2.0, -3.2, -6.1]) == {"acc": 0, "acc_norm": 2}


@given(st.integers(1, 300), st.data())
def test_wilson_interval_ends_where_the_score_test_rejects(n, data):
    """At both ends p, the observed proportion is 1.96 standard deviations sqrt(p (1 - p) / n) away from p."""
    successes = data.draw(st.integers(0, n))
    low, high = wilson_interval(successes, n)
    assert -1e-12 <= low <= successes / n <= high + 1e-12 and high <= 1 + 1e-12
    for p in (low, high):
        assert abs(successes / n - p) == pytest.approx(1.959964 * math.sqrt(max(0, p * (1 - p)) / n), abs=1e-7)
