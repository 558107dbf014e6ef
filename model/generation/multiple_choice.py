"""Multiple-choice questions: the log-likelihood of each choice after its context, and the accuracy.

Contexts, choices, tokens and both accuracies are those of lm-evaluation-harness (github.com/EleutherAI/
lm-evaluation-harness, lm_eval/tasks/hellaswag/utils.py, lm_eval/tasks/arc/arc_easy.yaml, and `_encode_pair` in
lm_eval/api/model.py), so that the figures are comparable. If the tokenizer has an end-of-text token, it precedes each
context, as documents in training. lm-evaluation-harness does the same with add_bos_token=True.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import tiktoken
import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common.console import make_table
from common.errors import UserError
from data.loader import IGNORE_INDEX
from data.tokenizer import encode, end_of_text, initial_tokens
from model.generation.prompts import read_prompt
from model.gpt import GPT

NORMAL_Z = 1.959964  # of a two-sided 95 % interval


@dataclass(frozen=True)
class Question:
    """A context, the choices that may continue it, and the index of the right one. name: for error messages."""

    context: str
    choices: list[str]
    answer: int
    name: str

    def predict(self, scores: list[float]) -> dict[str, int]:
        """The index of the best choice by log-likelihood (acc), and by log-likelihood per character (acc_norm)."""
        per_character = [score / len(choice) for score, choice in zip(scores, self.choices, strict=True)]
        return {"acc": scores.index(max(scores)), "acc_norm": per_character.index(max(per_character))}


def read_questions(path: str) -> list[Question]:
    """Read the questions of a .jsonl file. Raises UserError, with the line."""
    lines = read_prompt(path, "questions").removeprefix("\ufeff").split("\n")
    names = [f"line {number} of questions={path}" for number in range(1, len(lines) + 1)]
    questions = [_parse_question(line, name) for line, name in zip(lines, names, strict=True) if line.strip()]
    if not questions:
        raise UserError(f"questions={path} contains no questions; set a .jsonl file with one question per line")
    return questions


def _parse_question(line: str, name: str) -> Question:
    """Parse one line in any of the layouts that docs/generation.md lists."""
    try:
        row = json.loads(line)
        if "endings" in row:  # HellaSwag
            context = _clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}") + " "
            choices, answer = [_clean(ending) for ending in row["endings"]], row["label"]
        elif "answerKey" in row:  # ARC
            question, options = row["question"], row.get("choices")
            if options is None:  # as published by AI2
                question, options = question["stem"], question["choices"]
                options = {key: [option[key] for option in options] for key in ("text", "label")}
            context, choices = f"Question: {question}\nAnswer: ", options["text"]
            answer = options["label"].index(row["answerKey"]) if row["answerKey"] in options["label"] else None
        else:
            context, choices, answer = row["context"], row["choices"], row["answer"]
    except KeyError as error:
        raise UserError(f'{name} has no "{error.args[0]}"; docs/generation.md lists the layouts of questions') from None
    except (ValueError, TypeError, AttributeError, RecursionError):
        context = choices = answer = None
    if not (isinstance(choices, list) and all(isinstance(text, str) for text in [context, *choices])):
        raise UserError(f"{name} is not a question; docs/generation.md lists the layouts of questions")
    if len(choices) < 2 or "" in choices:
        raise UserError(f"{name} needs two or more choices that are not empty; correct or remove that line")
    index = _parse_index(answer)
    if index not in range(len(choices)):
        raise UserError(f"{name} has an answer that is none of its {len(choices)} choices; correct or remove that line")
    return Question(context, choices, index, name)


def _parse_index(value: Any) -> int:
    """The index that an int or a string of digits stands for; -1 for other values."""
    return int(value) if str(value).isdecimal() else -1


def _clean(text: str) -> str:
    """Remove the marks that WikiHow articles left in HellaSwag, such as [title]."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


@dataclass
class EncodedChoice:
    """Token ids of a context and a choice. The last n_scored tokens belong to the choice. score: log-likelihood."""

    tokens: Tensor
    n_scored: int
    is_truncated: bool
    score: float = math.nan


def encode_choices(tokenizer: tiktoken.Encoding, question: Question, block_size: int) -> list[EncodedChoice]:
    """Encode each choice together with the context, and keep the last block_size + 1 tokens.

    The choice begins after as many tokens as the context has without its last spaces. Raises UserError if a character
    has no token, if a choice alone exceeds block_size, or if a token of the context covers a choice.
    """
    context = question.context.rstrip()
    has_start = end_of_text(tokenizer) is not None or not context  # there must be a token before the choice
    start, encoded = initial_tokens(tokenizer) if has_start else [], []
    n_context = len(encode(tokenizer, context, question.name))
    for number, choice in enumerate(question.choices, start=1):
        tokens = encode(tokenizer, question.context + choice, question.name).tolist()
        n_scored = len(tokens) - n_context
        if not 0 < n_scored <= block_size:
            raise UserError(
                f"choice {number} in {question.name} has {n_scored:,} tokens after the context, but must have from 1 "
                f"to model.block_size={block_size}; correct or remove that line"
            )
        tokens = start + tokens
        encoded.append(EncodedChoice(torch.tensor(tokens[-block_size - 1 :]), n_scored, len(tokens) > block_size + 1))
    return encoded


@torch.no_grad()
def score_choices(model: GPT, choices: list[EncodedChoice]) -> None:
    """Set the score of each choice, in nats: the sum of its tokens' log-probabilities. One forward pass."""
    device = model.wte.weight.device
    targets = [choice.tokens[1:].clone() for choice in choices]
    for target, choice in zip(targets, choices, strict=True):
        target[: -choice.n_scored] = IGNORE_INDEX
    y = pad_sequence(targets, batch_first=True, padding_value=IGNORE_INDEX).to(device)  # (B, T)
    inputs = pad_sequence([choice.tokens[:-1] for choice in choices], batch_first=True)
    x = model.backbone(inputs.to(device))  # causal attention: padding at the end has no effect
    is_scored = y != IGNORE_INDEX
    nats = torch.zeros(y.shape, device=device)
    nats[is_scored] = F.cross_entropy(model.logits(x[is_scored]).float(), y[is_scored], reduction="none")
    for choice, total in zip(choices, nats.sum(1).tolist(), strict=True):
        choice.score = -total


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95 % confidence interval of a proportion (Wilson, 1927)."""
    center, half = successes + NORMAL_Z**2 / 2, math.sqrt(successes * (n - successes) / n + NORMAL_Z**2 / 4)
    return (center - NORMAL_Z * half) / (n + NORMAL_Z**2), (center + NORMAL_Z * half) / (n + NORMAL_Z**2)


def accuracy_table(questions: list[Question], predictions: list[dict[str, int]]) -> Table:
    """A table with a row for each accuracy, and a row for the expected accuracy of guessing."""
    table, n = make_table("", "accuracy", "95 % interval"), len(questions)
    for key in ("acc", "acc_norm"):
        n_right = sum(row[key] == question.answer for row, question in zip(predictions, questions, strict=True))
        low, high = wilson_interval(n_right, n)
        table.add_row(key, f"{n_right / n:.4f}", f"{low:.4f} to {high:.4f}")
    table.add_row("guessing", f"{sum(1 / len(question.choices) for question in questions) / n:.4f}", "")
    return table
