"""tokenizer.json: ids of tiktoken, round trips, and tokenizers that cannot be imported."""

import base64
import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import tiktoken
import tokenizers
from data_helpers import GPT2S, GPT4, UNUSUAL_TEXTS, build
from helpers import BPE, BYTE, CHAR, TEXT
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.tokenizer import BPE_PATTERN, END_OF_TEXT, encode, from_spec, to_spec
from huggingface.tokenizer_json import from_tokenizer_json, to_tokenizer_json

PATTERNS = {"ours": BPE_PATTERN, "gpt2": GPT2S, "cl100k_base": GPT4[0], "o200k_base": GPT4[1]}
NAMES = ["char", "byte", *PATTERNS]
SCRIPTS = [
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1FAFF),
    (0x400, 0x4FF),
    (0x600, 0x6FF),
    (0x300, 0x36F),
]
SEPARATORS = [
    " ",
    "  ",
    "\r\n",
    "\n\n",
    "\t",
    END_OF_TEXT,
    "'s",
    "'LL",
    "'\u017f",
    " 12345 67",
    "a" * 14,
    "!?!?",
]


def mixed_text() -> str:
    """Lines of English and French, and words of random characters of many scripts."""
    rng = random.Random(0)
    parts = [TEXT, *UNUSUAL_TEXTS]
    for scripts in rng.choices(SCRIPTS, k=4000):
        word = "".join(chr(rng.randint(*scripts)) for _ in range(rng.randint(1, 9)))
        parts.append(word + rng.choice(SEPARATORS))
    return "".join(parts)


@pytest.fixture(scope="module")
def specs() -> dict[str, dict]:
    """A tokenizer of each kind. OpenAI's patterns are combined with a small vocabulary."""
    documents = [mixed_text(), mixed_text()[::-1]]
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
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40) | SPACES_AND_MARKS)
@example(text="aaaaa" * 9 + " " * 99)
@example(text=END_OF_TEXT)
def test_ids_equal_those_of_tiktoken(pairs, name, text):
    theirs, ours = pairs[name]
    ids = encode(ours, text).tolist()
    assert theirs.encode(text).ids == ids
    assert theirs.decode(ids) == text


@pytest.mark.parametrize("name", NAMES)
def test_mixed_text_has_the_ids_of_tiktoken(pairs, name):
    theirs, ours = pairs[name]
    ids = encode(ours, mixed_text()).tolist()
    assert theirs.encode(mixed_text()).ids == ids
    assert theirs.decode(ids) == mixed_text()


def reload(content: dict) -> dict:
    """The content of a tokenizer.json that `tokenizers` has read and written."""
    return json.loads(tokenizers.Tokenizer.from_str(json.dumps(content)).to_str())


@pytest.mark.parametrize("name", NAMES)
def test_imported_tokenizer_has_the_same_ids(specs, name):
    imported = from_tokenizer_json(reload(to_tokenizer_json(specs[name])), "t.json")
    expected = encode(from_spec(specs[name]), mixed_text()).tolist()
    assert encode(from_spec(imported), mixed_text()).tolist() == expected


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


def use_unigrams(content: dict) -> None:
    content["model"] |= {"type": "Unigram", "vocab": [["a", 0.5]]}


def normalize(content: dict) -> None:
    content["normalizer"] = {"type": "NFC"}


def use_metaspace(content: dict) -> None:
    content["pre_tokenizer"] = {"type": "Metaspace"}


def add_prefix_space(content: dict) -> None:
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True}


def remove_separators(content: dict) -> None:
    content["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed"


def match_everywhere(content: dict) -> None:
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = ""


def add_a_step(content: dict) -> None:
    content["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Digits"})


def reverse_merges(content: dict) -> None:
    content["model"]["merges"].reverse()


def leave_a_gap(content: dict) -> None:
    del content["model"]["vocab"]["!"]


def begin_with_special_token(content: dict) -> None:
    vocab = content["model"]["vocab"]
    del vocab[END_OF_TEXT]
    content["model"]["vocab"] = {token: rank + 1 for token, rank in vocab.items()}
    content["model"]["vocab"][END_OF_TEXT] = 0
    content["added_tokens"][0]["id"] = 0


def add_start(content: dict) -> None:
    content["post_processor"] = ADDS_START


def add_start_in_a_sequence(content: dict) -> None:
    content["post_processor"] = {"type": "Sequence", "processors": [ADDS_START]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (use_unigrams, "kind Unigram"),
        (normalize, "normalizer"),
        (use_metaspace, "pre_tokenizer"),
        (add_prefix_space, "pre_tokenizer"),
        (remove_separators, "pre_tokenizer"),
        (match_everywhere, "pre_tokenizer"),
        (add_a_step, "pre_tokenizer"),
        (reverse_merges, "merges"),
        (leave_a_gap, "ids with gaps"),
        (begin_with_special_token, "special tokens before others"),
        (add_start, "post_processor"),
        (add_start_in_a_sequence, "post_processor"),
    ],
)
def test_other_tokenizer_is_refused_with_the_reason(
    content, change: Callable[[dict], None], reason
):
    change(content)
    with pytest.raises(UserError, match=rf"t\.json has .*{reason}.*; set another folder"):
        from_tokenizer_json(content, "t.json")


def test_tokenizer_without_a_token_for_a_byte_is_refused(specs):
    spec = specs["ours"] | {"special": {}}
    last_byte = base64.b64encode(b"\xff").decode()
    tokens = [token for token in spec["tokens"] if token != last_byte]
    with pytest.raises(UserError, match="no token for some bytes"):
        from_tokenizer_json(to_tokenizer_json(spec | {"tokens": tokens}), "t.json")
