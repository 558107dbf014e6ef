"""Config dataclasses: limits and choices of fields, and rules between them."""

from dataclasses import dataclass, field
from math import inf, nan

import pytest

from common.errors import UserError
from common.settings import check, format_value, setting


@dataclass
class Section:
    count: int = setting(1, 1, 10)
    share: float = setting(0.5, above=0, below=1)
    sizes: list[int] = setting([2], 1)
    color: str = setting("red", choices=("red", "blue"))
    most: int | None = None

    def rules(self, section):
        yield (
            "most",
            self.most is None or self.most >= self.count,
            f"must be at least {section}.count",
        )


@dataclass
class Complete:
    part: Section = field(default_factory=Section)
    parts: dict[str, Section] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "part.count=0 must be at least 1 and at most 10"),
        ({"count": 11}, "part.count=11 must be at least 1 and at most 10"),
        ({"share": 1.0}, "part.share=1.0 must be above 0 and below 1"),
        ({"share": nan}, "part.share=nan must be"),
        ({"share": inf}, "part.share=inf must be"),
        ({"sizes": [3, 0]}, "part.sizes=0 must be at least 1"),
        ({"color": "green"}, "part.color=green is unknown; set one of red, blue"),
        (
            {"color": "bleu"},
            "part.color=bleu is unknown (did you mean blue?); set one of red, blue",
        ),
        ({"count": 5, "most": 4}, "part.most=4 must be at least part.count"),
    ],
)
def test_invalid_value_is_refused_with_its_key(values, message):
    with pytest.raises(UserError) as error:
        check(Complete(part=Section(**values)))
    assert message in str(error.value)
    with pytest.raises(UserError, match=r"parts\.a"):
        check(Complete(parts={"a": Section(**values)}))


@pytest.mark.parametrize(("value", "typed"), [
    (None, "null"), (True, "true"), (False, "false"), (0.1, "0.1"), (3, "3"), ("flash", "flash"),
    ([64, 64, None], "[64,64,null]"), ([], "[]"), ({"a": 1, "b": None}, "{a:1,b:null}"),
])  # fmt: skip
def test_values_are_printed_as_typed_on_the_command_line(value, typed):
    assert format_value(value) == typed
