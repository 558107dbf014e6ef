"""tokenizer.json: the same ids and texts as tiktoken, round trips, and tokenizers that cannot be imported."""

import json
import random
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


def load(spec: dict) -> tokenizers.Tokenizer:
    """The tokenizer of the library `tokenizers`, which encodes special tokens in a text as text, like ours."""
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(to_tokenizer_json(spec)))
    tokenizer.encode_special_tokens = True
    return tokenizer


def mixed_text() -> str:
    """Lines of English and French, and words of random characters of many scripts."""
    rng, parts = random.Random(0), [TEXT, *UNUSUAL_TEXTS]
    for scripts in rng.choices(SCRIPTS, k=4000):
        word = "".join(chr(rng.randint(*scripts)) for _ in range(rng.randint(1, 9)))
        parts.append(word + rng.choice(SEPARATORS))
    return "".join(parts)


@pytest.fixture(scope="module")
def specs() -> dict[str, dict]:
    """A tokenizer of each kind. OpenAI's patterns are combined with a small vocabulary."""
    documents = [mixed_text(), mixed_text()[::-1]]
    bpe = to_spec(build(documents, replace(BPE, vocab_size=2000)))
    return {config.name: to_spec(build(documents, config)) for config in (CHAR, BYTE)} | {
        name: bpe | {"pattern": pattern} for name, pattern in PATTERNS.items()
    }


@pytest.fixture(scope="module")
def pairs(specs) -> dict[str, tuple[tokenizers.Tokenizer, tiktoken.Encoding]]:
    """Each tokenizer in the library `tokenizers` and here."""
    return {name: (load(spec), from_spec(spec)) for name, spec in specs.items()}


@pytest.mark.parametrize("name", ["byte", *PATTERNS])
@settings(max_examples=100, deadline=None)
@given(
    text=st.text(max_size=40)
    | st.text(st.sampled_from(list("  \n\r\tabcs9.,'é/\u3000\xa0\x85\x1e")), max_size=14)
)
@example(text="aaaaa" * 9 + " " * 99)
@example(text=END_OF_TEXT)
def test_ids_equal_those_of_tiktoken(pairs, name, text):
    theirs, ours = pairs[name]
    ids = encode(ours, text).tolist()
    assert theirs.encode(text).ids == ids
    assert theirs.decode(ids) == text


@pytest.mark.parametrize("name", ["char", "byte", *PATTERNS])
def test_mixed_text_has_the_ids_of_tiktoken_also_when_imported(specs, name):
    spec, text = specs[name], mixed_text()
    ids = encode(from_spec(spec), text).tolist()
    assert load(spec).encode(text).ids == ids
    imported = from_tokenizer_json(
        json.loads(json.dumps(to_tokenizer_json(spec))), "tokenizer.json"
    )
    assert encode(from_spec(imported), text).tolist() == ids
    if name in ("char", "byte", "ours", "gpt2"):
        assert imported == spec


def test_tokenizer_of_openai_is_imported(specs):
    """Their tokenizer.json has merges as strings, and a pre-tokenizer that implies GPT-2's pattern."""
    content = to_tokenizer_json(specs["gpt2"]) | {
        "post_processor": {"type": "ByteLevel", "trim_offsets": False}
    }
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    content["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
    }
    assert from_tokenizer_json(content, "tokenizer.json") == specs["gpt2"]


START = [{"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}]
TEXT_A = [{"Sequence": {"id": "A", "type_id": 0}}]
TEMPLATE = {"type": "TemplateProcessing", "single": TEXT_A, "pair": TEXT_A, "special_tokens": {}}
ADDS_START = TEMPLATE | {
    "single": START + TEXT_A,
    "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [0]}},
}


@pytest.mark.parametrize(
    "post_processor",
    [TEMPLATE, {"type": "Sequence", "processors": [{"type": "ByteLevel"}, TEMPLATE]}],
)
def test_post_processor_that_adds_no_token_is_imported(specs, post_processor):
    content = to_tokenizer_json(specs["ours"]) | {"post_processor": post_processor}
    assert from_tokenizer_json(content, "t.json") == specs["ours"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda content: content["model"].update(type="Unigram", vocab=[["a", 0.5]]),
            "kind of tokenizer",
        ),
        (lambda content: content.update(normalizer={"type": "NFC"}), "normalizer"),
        (lambda content: content.update(pre_tokenizer={"type": "Metaspace"}), "kind of tokenizer"),
        (
            lambda content: content["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
            "pre_tokenizer",
        ),
        (lambda content: content["model"]["merges"].reverse(), "merges"),
        (lambda content: content["model"]["vocab"].pop("!"), "ids with gaps"),
        (lambda content: content["added_tokens"][0].update(id=0), "special tokens before others"),
        (lambda content: content.update(post_processor=ADDS_START), "post_processor"),
        (
            lambda content: content.update(post_processor={"type": "BertProcessing"}),
            "post_processor",
        ),
        (
            lambda content: content.update(post_processor={"processors": [ADDS_START]}),
            "adds tokens",
        ),
        (lambda content: content.clear(), "kind of tokenizer"),
    ],
)
def test_other_tokenizers_are_refused_with_the_reason(specs, change, reason):
    content = json.loads(json.dumps(to_tokenizer_json(specs["ours"])))
    change(content)
    with pytest.raises(UserError, match=rf"t\.json has .*{reason}"):
        from_tokenizer_json(content, "t.json")


def test_tokenizer_without_a_token_for_a_byte_is_refused(specs):
    content = to_tokenizer_json(specs["byte"])
    del (
        content["model"]["vocab"]["ÿ"],
        content["model"]["vocab"][END_OF_TEXT],
        content["added_tokens"][0],
    )
    with pytest.raises(UserError, match="no token for some bytes"):
        from_tokenizer_json(content, "t.json")
