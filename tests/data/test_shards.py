"""Prepared folders: token files, meta.json, verify and inspect."""

from dataclasses import replace

import pytest
from data_helpers import prepare_text, write_jsonl
from helpers import CHAR, TEXT_SOURCE

from common.errors import UserError
from data import encode
from data.shards import verify


def test_several_shards_read_like_one_file(workdir, monkeypatch):
    write_jsonl(workdir / "rows.jsonl", [f"document {n}" * 9 for n in range(99)])
    config = replace(TEXT_SOURCE, path="rows.jsonl")
    one = prepare_text(config, CHAR)
    tokens = one.tokens("train")[:]
    one.folder.rename("one")
    monkeypatch.setattr(encode, "CHUNK_CHARS", 300)
    monkeypatch.setattr(encode, "SHARD_TOKENS", 1000)
    many = prepare_text(config, CHAR)
    assert len(list(many.folder.glob("train*.bin"))) > 5
    read = many.tokens("train")
    assert len(read) == len(tokens)
    for part in (slice(None), slice(990, 1010), slice(999, 3001), slice(1000, 2000), slice(5, 5), slice(-3, None)):
        assert (read[part] == tokens[part]).all()


def test_more_than_65536_tokens_are_stored_as_uint32(workdir):
    """70,000 distinct characters: more than 65,536 tokens need four bytes."""
    text = "".join(chr(c) for c in range(0x10000, 0x10000 + 70_000)) * 2
    (workdir / "wide.txt").write_text(text, encoding="utf-8")
    prepared = prepare_text(replace(TEXT_SOURCE, path="wide.txt"), CHAR, 16)
    assert prepared.meta["dtype"] == "uint32"
    assert prepared.tokenizer.decode(prepared.tokens("train")[-5:].tolist()) == text[: int(len(text) * 0.9)][-5:]


def test_changed_and_short_files_are_detected(workdir):
    prepared = prepare_text(TEXT_SOURCE, CHAR, 16)
    assert verify(prepared) == "verified: the SHA-256 of train.bin, val.bin is correct"
    path = prepared.folder / "val.bin"
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    for check in (lambda: verify(prepared), lambda: prepare_text(TEXT_SOURCE, CHAR, 16)):
        with pytest.raises(UserError, match=r"val.bin was changed after it was written .*; remove the folder"):
            check()
    path.write_bytes(content[:-2])
    with pytest.raises(UserError, match=r"val.bin has [\d,]+ bytes instead of [\d,]+; remove the folder"):
        prepare_text(TEXT_SOURCE, CHAR, 16)
