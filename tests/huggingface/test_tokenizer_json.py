"""tokenizer.json: ids of tiktoken, round trips, and tokenizers that cannot be imported."""

import base64
import json
from dataclasses import replace

import pytest
import tiktoken
import tokenizers
from data_helpers import UNUSUAL_TEXTS, build
from helpers import BPE, BYTE, CHAR, TEXT
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.tokenizer import BPE_PATTERN, END_OF_TEXT, encode, from_spec, to_spec
from huggingface.tokenizer_json import GPT2_PATTERN, from_tokenizer_json, to_tokenizer_json

PATTERNS = {
    "ours": BPE_PATTERN,
    "gpt2": GPT2_PATTERN,
    "cl100k_base": BPE_PATTERN.replace("{1,2}", "{1,3}"),
}
NAMES = ["char", "byte", *PATTERNS]
MIXED = TEXT + "".join(UNUSUAL_TEXTS) + "字 слово 's 'LL 12345 67 !?!?  \r\n\n"


@pytest.fixture(scope="module")
def specs() -> dict[str, dict]:
    """A tokenizer of each kind. OpenAI's patterns are combined with a small vocabulary."""
    documents = [MIXED, MIXED[::-1]]
    bpe = to_spec(build(documents, replace(BPE, vocab_size=2000)))
    return {
        "char": to_spec(build(documents, CHAR)),
        "byte": to_spec(build(documents, BYTE)),
        **{name: bpe | {"pattern": pattern} for name, pattern in PATTERNS.items()},
    }


def load(spec: dict) -> tokenizers.Tokenizer:
    """The tokenizer in the library `tokenizers`. Special tokens in a text are text, as here."""
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(to_tokenizer_json(spec)))
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.fixture(scope="module")
def pairs(specs) -> dict[str, tuple[tokenizers.Tokenizer, tiktoken.Encoding]]:
    """Each tokenizer in the library `tokenizers` and here."""
    return {name: (load(spec), from_spec(spec)) for name, spec in specs.items()}


# Characters at which the patterns differ.
SPACES_AND_MARKS = st.text(
    st.sampled_from(list("  \n\r\tabcs9.,'é/\u3000\xa0\x85\x1e")), max_size=14
)


@pytest.mark.parametrize("name", ["byte", *PATTERNS])
@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=40) | SPACES_AND_MARKS)
@example(text="aaaaa" * 9 + " " * 99)
@example(text=END_OF_TEXT)
def test_ids_equal_those_of_tiktoken(pairs, name, text):
    theirs, ours = pairs[name]
    ids = encode(ours, text).tolist()
    assert theirs.encode(text).ids == ids
    assert theirs.decode(ids) == text


def reload(content: dict) -> dict:
    """The content of a tokenizer.json that `tokenizers` has read and written."""
    return json.loads(tokenizers.Tokenizer.from_str(json.dumps(content)).to_str())


@pytest.mark.parametrize("name", NAMES)
def test_mixed_text_has_the_ids_of_tiktoken_also_after_the_import(specs, pairs, name):
    theirs, ours = pairs[name]
    ids = encode(ours, MIXED).tolist()
    assert theirs.encode(MIXED).ids == ids
    imported = from_tokenizer_json(reload(to_tokenizer_json(specs[name])), "t.json")
    assert encode(from_spec(imported), MIXED).tolist() == ids


@pytest.mark.parametrize("name", ["char", "byte", "ours", "gpt2"])
def test_imported_spec_is_the_exported_one(specs, name):
    assert from_tokenizer_json(to_tokenizer_json(specs[name]), "t.json") == specs[name]


def test_unknown_character_is_an_error_of_char(specs):
    """It is not skipped."""
    with pytest.raises(Exception, match="not found in the vocabulary"):
        load(specs["char"]).encode("\u0e01")


@pytest.fixture
def content(specs) -> dict:
    """A tokenizer.json that a test can change."""
    return json.loads(json.dumps(to_tokenizer_json(specs["ours"])))


def test_tokenizer_of_openai_is_imported(specs):
    """Merges are strings, and the pre-tokenizer implies GPT-2's pattern."""
    content = to_tokenizer_json(specs["gpt2"])
    content["post_processor"] = {"type": "ByteLevel", "trim_offsets": False}
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    content["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
    }
    assert from_tokenizer_json(content, "t.json") == specs["gpt2"]


TEXT_A = [{"Sequence": {"id": "A", "type_id": 0}}]
TEMPLATE = {"type": "TemplateProcessing", "single": TEXT_A, "pair": TEXT_A, "special_tokens": {}}
START = [{"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}]
ADDS_START = TEMPLATE | {"single": START + TEXT_A}


@pytest.mark.parametrize(
    "post_processor",
    [TEMPLATE, {"type": "Sequence", "processors": [{"type": "ByteLevel"}, TEMPLATE]}],
    ids=["template", "sequence"],
)
def test_post_processor_that_adds_no_token_is_imported(specs, content, post_processor):
    content["post_processor"] = post_processor
    assert from_tokenizer_json(content, "t.json") == specs["ours"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"type": "BPE"', '"type": "Unigram"', "another model than BPE"),
        ('"normalizer": null', '"normalizer": {"type": "NFC"}', "normalizer"),
        ('"pre_tokenizer":', '"pre_tokenizer": {"type": "Metaspace"}, "old":', "pre_tokenizer"),
        ('"behavior": "Isolated"', '"behavior": "Removed"', "pre_tokenizer"),
        ('"Regex": "', '"Regex": "", "old": "', "pre_tokenizer"),
        ('"pretokenizers": [', '"pretokenizers": [{"type": "Digits"}, ', "pre_tokenizer"),
        ('"!": ', '"!": 1', "ids with gaps"),
        ('"special": true', '"special": false', "added tokens that are not special"),
        ('"post_processor": null', f'"post_processor": {json.dumps(ADDS_START)}', "post_processor"),
    ],
)
def test_other_tokenizer_is_refused_with_the_reason(content, old, new, reason):
    text = json.dumps(content, ensure_ascii=False)
    assert old in text
    with pytest.raises(UserError, match=rf"t\.json has .*{reason}.*; set another folder"):
        from_tokenizer_json(json.loads(text.replace(old, new, 1)), "t.json")


def test_merges_in_another_order_than_the_ids_are_refused(content):
    content["model"]["merges"].reverse()
    with pytest.raises(UserError, match=r"t\.json has .*merges.*; set another folder"):
        from_tokenizer_json(content, "t.json")


def test_tokenizer_without_a_token_for_a_byte_is_refused(specs):
    spec = specs["ours"] | {"special": {}}
    last_byte = base64.b64encode(b"\xff").decode()
    tokens = [token for token in spec["tokens"] if token != last_byte]
    with pytest.raises(UserError, match="no token for some bytes"):
        from_tokenizer_json(to_tokenizer_json(spec | {"tokens": tokens}), "t.json")
