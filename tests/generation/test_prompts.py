"""Prompts of sample.py: escape sequences, files, tokens and seeds."""

import json
from pathlib import Path

import pytest
from generation_helpers import BYTES

from common.errors import UserError
from common.settings import unescape
from generation.engine import Prompt
from generation.prompts import encode_prompts, load_prompts, read_prompts

PROMPTS = ["The 1", "T", "The 22nd line says"]


def write_jsonl(path, prompts):
    rows = [json.dumps({"prompt": prompt, "id": 1}) for prompt in prompts]
    Path(path).write_text("\n".join(rows), encoding="utf-8")


def test_escapes_are_replaced_once():
    assert unescape([r"\r\n\t", r"\\n", r"\x", 1]) == ["\r\n\t", r"\n", r"\x", 1]


def test_prompt_of_the_command_line_has_escapes():
    assert load_prompts(r"a\nb\\n\t", None, None) == ["a\nb\\n\t"]


def test_lines_of_a_text_file_have_escapes(workdir):
    (workdir / "p.txt").write_text("a\\nb\n", encoding="utf-8")
    assert load_prompts("", None, "p.txt") == ["a\nb"]


def test_prompts_of_a_jsonl_file_have_no_escapes(workdir):
    write_jsonl("p.jsonl", [r"a\nb"])
    assert load_prompts("", None, "p.jsonl") == [r"a\nb"]


@pytest.mark.parametrize("content", [b"a\\nb\n", b"The\r\n"])
def test_prompt_file_is_exact(workdir, content):
    (workdir / "p.txt").write_bytes(content)
    assert load_prompts("", "p.txt", None) == [content.decode()]


def test_text_file_has_a_prompt_per_line(workdir):
    (workdir / "p.txt").write_text("\n\n".join(PROMPTS) + "\n", encoding="utf-8")
    assert read_prompts("p.txt") == PROMPTS


def test_text_file_is_split_at_line_ends_only(workdir):
    """Windows line ends and a byte order mark are not part of a prompt, but U+2028 is."""
    (workdir / "p.txt").write_bytes("\ufeffThe\r\nsays\x0c1\u20282\r\n".encode())
    assert read_prompts("p.txt") == ["The", "says\x0c1\u20282"]


@pytest.mark.parametrize("name", ["p.jsonl", "p.ndjson", "p.JSONL"])
def test_jsonl_file_has_an_object_per_line(workdir, name):
    write_jsonl(name, PROMPTS)
    assert read_prompts(name) == PROMPTS


@pytest.mark.parametrize(
    "line",
    ['{"text": "b"}', "3", "not JSON", '{"prompt": 3}'],
    ids=["key", "number", "text", "number as the prompt"],
)
def test_line_that_is_no_prompt_is_refused(workdir, line):
    (workdir / "wrong.jsonl").write_text('{"prompt": "a"}\n' + line, encoding="utf-8")
    with pytest.raises(UserError, match=r"a line of prompts=wrong\.jsonl is not of the form"):
        read_prompts("wrong.jsonl")


def test_file_without_prompts_is_refused(workdir):
    (workdir / "empty.txt").write_text("\n \n", encoding="utf-8")
    with pytest.raises(UserError, match=r"prompts=empty\.txt contains no prompts"):
        read_prompts("empty.txt")


def test_samples_have_consecutive_seeds():
    prompts = encode_prompts(BYTES, ["a", "bc"], num_samples=2, seed=7)
    a, bc = [97], [98, 99]
    assert prompts == [Prompt(a, 7), Prompt(a, 8), Prompt(bc, 9), Prompt(bc, 10)]


def test_empty_prompt_is_the_start_token():
    assert encode_prompts(BYTES, [""], 1, 0) == [Prompt([BYTES.start_token], 0)]


def test_prompt_that_cannot_be_encoded_has_its_number():
    """It contains a byte of the command line that is not UTF-8."""
    with pytest.raises(UserError, match="prompt 2 cannot be encoded"):
        encode_prompts(BYTES, ["a", "T\udce9"], 1, 0)
