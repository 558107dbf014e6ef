"""docs/attention/*.md: pasted into `python` in order, the blocks of a page print what it shows."""

import code
import re
import sys
from itertools import pairwise

import docs_helpers as docs
import pytest
import torch
from docs_helpers import ATTENTION_PAGES

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d*)?(?:e[+-]\d+)?")
BLOCK = re.DOTALL | re.MULTILINE
# blocks, links, pictures, papers, years and the numbers of a list
NOT_PROSE = r"^```.*?^```|\]\(.*?\)|<img.*?>|arXiv:[\d.]+|\(\d{4}\)|^\d\."
SLOW_PAGES = ("errata", "cost", "scaling")


@pytest.fixture
def precise_tensors():
    """Print tensors with more digits than the pages show, so that rounding can be checked."""
    torch.set_printoptions(precision=8)
    yield
    torch.set_printoptions(profile="default")
    torch.set_default_dtype(torch.float32)


def is_same_number(printed: str, shown: str) -> bool:
    """Whether `shown` is `printed`, rounded to the digits of `shown`. Integers must be equal.

    CPUs differ by rounding: 1e-6 of a value, and 2e-7 near zero, where larger values cancel.
    """
    if not re.search(r"\.\d", shown):
        return printed == shown
    mantissa, _, exponent = shown.partition("e")
    last_digit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(printed) - float(shown)) <= 0.5 * last_digit + 1e-6 * abs(float(shown)) + 2e-7


def read_numbers(text: str) -> set[float]:
    """The numbers in a text, except those in names such as float32, 70B and S_{11}."""
    return {
        float(number.replace(",", ""))
        for number in re.findall(rf"(?<![\w^{{.-]){NUMBER.pattern}(?!\w)", text)
    }


def is_same_output(printed: str, shown: str) -> bool:
    """Whether two outputs are equal, apart from white space and the rounding of numbers."""
    printed_tokens, shown_tokens = (
        re.findall(rf"{NUMBER.pattern}|\S", text) for text in (printed, shown)
    )
    return len(printed_tokens) == len(shown_tokens) and all(
        is_same_number(a, b) if NUMBER.fullmatch(a) and NUMBER.fullmatch(b) else a == b
        for a, b in zip(printed_tokens, shown_tokens, strict=True)
    )


@pytest.mark.filterwarnings("ignore:Flash attention")  # PyTorch's reasons to refuse a request
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=pytest.mark.slow if page.stem in SLOW_PAGES else ())
        for page in ATTENTION_PAGES
    ],
)
@pytest.mark.draws
def test_page_prints_what_it_shows(page, workdir, precise_tensors, monkeypatch, capsys):
    # A prompt also shows values that are not printed; only tensors matter.
    monkeypatch.setattr(
        sys, "displayhook", lambda value: isinstance(value, torch.Tensor) and print(value)
    )
    prompt = code.InteractiveConsole()
    blocks = [*docs.blocks(page), (0, "", [])]
    for (first, language, lines), (_, next_language, next_lines) in pairwise(blocks):
        if language != "python":
            continue
        for line in [*lines, ""]:
            prompt.push(line)
        printed, errors = capsys.readouterr()
        assert errors == "", f"{page.name}:{first}"
        shown = "\n".join(next_lines) if next_language == "text" else ""
        assert is_same_output(printed, shown), f"{page.name}:{first} prints\n{printed}"
    for picture in re.findall(r'src="([^"]+)"', page.read_text(encoding="utf-8")):
        assert (workdir / picture).is_file(), f"no block of {page.name} saves {picture}"


@pytest.mark.parametrize("page", ATTENTION_PAGES, ids=lambda page: page.stem)
def test_numbers_of_the_prose_are_in_a_block_of_the_section(page):
    for section in re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        code_and_output = "\n".join(re.findall(r"^```(?:python|text)\n(.*?)^```", section, BLOCK))
        prose = re.sub(NOT_PROSE, "", section, flags=BLOCK)
        numbers = read_numbers(prose) - {0, 1, 2}
        assert numbers <= read_numbers(code_and_output), f"a number is in no block of\n{section}"
