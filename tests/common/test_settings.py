"""Config dataclasses: limits and choices of fields, rules, and suggestions for typos."""

from dataclasses import dataclass, field
from math import inf, nan

import pytest

from common.errors import UserError
from common.settings import check, check_path_component, did_you_mean, format_value, setting


@dataclass
class Section:
    count: int = setting(1, 1, 10)
    share: float = setting(0.5, above=0, below=1)
    rate: float = setting(0.5, 0)
    sizes: list[int] = setting([2], 1)
    color: str = setting("red", choices=("red", "blue", "gray-N", "rgb:NAME"))
    most: int | None = None

    def rules(self, section):
        advice = f"must be at least {section}.count"
        yield "most", self.most is None or self.most >= self.count, advice


@dataclass
class Complete:
    part: Section = field(default_factory=Section)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "part.count=0 must be at least 1 and at most 10"),
        ({"count": 11}, "part.count=11 must be at least 1 and at most 10"),
        ({"share": 0.0}, "part.share=0.0 must be above 0 and below 1"),
        ({"share": 1.0}, "part.share=1.0 must be above 0 and below 1"),
        ({"rate": nan}, "part.rate=nan must be at least 0 and finite"),
        ({"rate": inf}, "part.rate=inf must be at least 0 and finite"),
        ({"sizes": [3, 0]}, "part.sizes=0 must be at least 1"),
        ({"color": "green"}, "part.color=green is unknown; set one of red, blue, gray-N, rgb:NAME"),
        ({"color": "bleu"}, "part.color=bleu is unknown (did you mean blue?); set one of"),
        ({"color": "gray-x"}, "part.color=gray-x is unknown"),
        ({"color": "rgb:"}, "part.color=rgb: is unknown"),
        ({"count": 5, "most": 4}, "part.most=4 must be at least part.count"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_invalid_value_is_refused_with_its_key(values, message):
    with pytest.raises(UserError) as error:
        check(Complete(part=Section(**values)))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "values",
    [
        {"count": 10},
        {"count": None},
        {"rate": 1e300},
        {"sizes": []},
        {"color": None},
        {"color": "gray-12"},
        {"color": "rgb:#fff"},
        {"count": 4, "most": 4},
    ],
    ids=str,
)
def test_valid_value_is_accepted(values):
    check(Complete(part=Section(**values)))


KEYS = [
    "train",
    "train.steps",
    "train.batch_size",
    "eval.every",
    "checkpoint.every",
    "optimizer.lr",
]
SYNONYMS = {
    "train.steps": "max_iters",
    "train.steps=9": "short",
    "optimizer.lr": "learning_rate",
    "model.width": "n_embd",
}


@pytest.mark.parametrize(
    ("wrong", "suggested"),
    [
        ("max_iters", "train.steps"),
        ("--train.learning-rate", "optimizer.lr"),
        ("short", "train.steps=9"),
        ("eval-every", "eval.every"),
        ("Train/Batch_size", "train.batch_size"),
        ("every", "eval.every or checkpoint.every"),
        ("other.every", "eval.every or checkpoint.every"),
        ("trian", "train"),
        ("optimizer.lx", "optimizer.lr"),
        ("stepss", "train.steps"),
    ],
)
def test_similar_key_is_suggested(wrong, suggested):
    assert did_you_mean(wrong, KEYS, SYNONYMS) == f" (did you mean {suggested}?)"


@pytest.mark.parametrize("wrong", ["foo", "n_embd", "x"])
def test_key_without_a_similar_one_gets_no_suggestion(wrong):
    """n_embd stands for a key that this command does not have."""
    assert did_you_mean(wrong, KEYS, SYNONYMS) == ""


@pytest.mark.parametrize(
    ("value", "typed"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (0.1, "0.1"),
        (3, "3"),
        ("flash", "flash"),
        ([64, 64, None], "[64,64,null]"),
        ([], "[]"),
        ({"a": 1, "b": None}, "{a:1,b:null}"),
    ],
)
def test_value_is_formatted_as_typed_on_the_command_line(value, typed):
    assert format_value(value) == typed


@pytest.mark.parametrize("word", ["", "a/b", "..", "a..b", ".a", "-a", "a b", "é", "a" * 101])
def test_word_that_is_no_folder_name_is_refused(word):
    with pytest.raises(UserError, match="is not a folder name; use up to 100 letters"):
        check_path_component("name", word)
