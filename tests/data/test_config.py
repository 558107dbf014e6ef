"""Rules of DataConfig and TokenizerConfig."""

from dataclasses import replace

import pytest
from data_helpers import HUB, make_mix
from helpers import BPE, TEXT_SOURCE

from common.errors import UserError
from common.settings import check


def test_bpe_vocabulary_smaller_than_256_bytes_is_rejected():
    with pytest.raises(UserError, match=r"tokenizer.vocab_size=100 .* set 512 or more"):
        check(replace(BPE, vocab_size=100), "tokenizer")


@pytest.mark.parametrize(("key", "example"), [("repo", "OWNER/NAME"), ("split", "train")])
def test_hub_source_needs_repo_and_split(key, example):
    with pytest.raises(UserError, match=f"set data.{key}={example}, or data.path=FILE"):
        check(replace(HUB, **{key: None}), "data")


@pytest.mark.parametrize(
    "key", ["path", "val_path", "val_documents", "val_fraction", "max_documents", "text_column", "prompt_column"]
)
def test_keys_of_single_sources_are_rejected_for_a_mix(key):
    value = {"path": "a", "val_path": "a", "val_fraction": 0.3, "text_column": "a", "prompt_column": "a"}.get(key, 3)
    with pytest.raises(UserError, match=rf"data.{key}=.* does not apply to a mix; set data.mix.NAME.{key}"):
        check(make_mix(mix={"one": TEXT_SOURCE}, **{key: value}), "data")
