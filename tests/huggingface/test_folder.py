"""Folders for transformers: what is written, what is read again, and what cannot be read."""

import json
from pathlib import Path

import pytest
import torch
from data_helpers import build
from helpers import BYTE, TEXT
from model_helpers import GPT2, make_model

from common.errors import UserError
from common.files import write_json
from data.tokenizer import END_OF_TEXT, from_spec, to_spec
from huggingface.folder import find_folder, read_folder, write_folder


def make_checkpoint(spec: dict) -> dict:
    """A checkpoint of a small GPT-2 with random weights."""
    vocab_size = from_spec(spec).n_vocab
    model = make_model(GPT2, vocab_size)
    return {
        "model_config": GPT2,
        "vocab_size": vocab_size,
        "tokenizer": spec,
        "model": model.state_dict(),
    }


def write(folder: Path, checkpoint: dict) -> Path:
    """Write a checkpoint as the folder `exported`."""
    (folder / "exported").mkdir()
    write_folder(folder / "exported", checkpoint, "gpt2", torch.float32)
    return folder / "exported"


@pytest.fixture(scope="module")
def checkpoint() -> dict:
    """Its tokenizer has an end-of-text token."""
    return make_checkpoint(to_spec(build([TEXT, TEXT], BYTE)))


@pytest.fixture
def exported(tmp_path, checkpoint) -> Path:
    return write(tmp_path, checkpoint)


def change_json(path: Path, **values) -> None:
    content = json.loads(path.read_bytes())
    write_json(path, content | values)


def test_folder_is_read_as_the_checkpoint_that_was_written(exported, checkpoint):
    found = read_folder(exported)
    assert found["tokenizer"] == checkpoint["tokenizer"]
    assert found["vocab_size"] == checkpoint["vocab_size"]
    for name, weight in checkpoint["model"].items():
        assert torch.equal(weight, found["model"][name]), name


def test_end_of_text_token_with_another_name_is_found(exported, checkpoint):
    """Llama's is </s>. config.json has its id."""
    path = exported / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(END_OF_TEXT.encode(), b"</s>"))
    assert read_folder(exported)["tokenizer"] == checkpoint["tokenizer"]


@pytest.mark.parametrize(("bos", "start"), [(7, 7), (50256, ord("\n"))], ids=["token", "no token"])
def test_samples_start_from_bos_token_id_without_an_end_of_text_token(tmp_path, bos, start):
    folder = write(tmp_path, make_checkpoint(to_spec(build([TEXT], BYTE))))
    change_json(folder / "config.json", bos_token_id=bos)
    assert from_spec(read_folder(folder)["tokenizer"]).start_token == start


CHARACTER_REGEX = rb"[\\s\\S]"
ADDED = b'"added_tokens": ['


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("model.safetensors", b"{", b""),
        ("config.json", b"}", b""),
        ("config.json", b'"gpt2"', b'"bert"'),
        ("config.json", b'"gelu_new"', b'"tanh"'),
        ("config.json", b'"n_layer": 2', b'"n_layer": "2"'),
        ("tokenizer.json", b"}", b""),
        ("tokenizer.json", b'"model"', b'"modle"'),
        ("tokenizer.json", CHARACTER_REGEX, b"("),
        ("tokenizer.json", ADDED, ADDED + b'{"id": -1, "content": "x"}, '),
    ],
)
def test_damaged_file_is_refused_with_its_name(exported, file, old, new):
    path = exported / file
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(UserError, match=file) as error:
        read_folder(exported)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_refused_with_its_name(exported, file):
    (exported / file).unlink()
    with pytest.raises(UserError, match=rf"{file} cannot be read .*; set hf:FOLDER with config"):
        read_folder(exported)


@pytest.mark.parametrize("changed", [{"n_layer": 3}, {"n_embd": 64}], ids=str)
def test_weights_of_another_model_are_refused(exported, changed):
    change_json(exported / "config.json", **changed)
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        read_folder(exported)


@pytest.mark.parametrize("name", ["no/such", "some/where/else"])
def test_name_that_is_no_folder_and_cannot_be_downloaded_is_refused(monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=f"hf:{name} is not a folder"):
        find_folder(name)
