"""Document masks and windows in complete runs: training and sampling."""

import pytest
from data_helpers import write_table
from helpers import TRAINS_ON_CPU, metrics

LOSSES = ("train/loss", "val/loss")


def test_document_mask_of_a_single_document_is_refused(train, capsys):
    assert train("data.document_mask=true") == 2
    assert "data.document_mask=true needs the <|endoftext|> token" in capsys.readouterr().err


def test_document_mask_acts_in_training_and_validation(train, workdir):
    """Every backend gives the losses of naive."""
    lines = [f"the {n}th document says {n * n} and ends" for n in range(60)]
    write_table("table.jsonl", text=lines)
    words = ["data.path=table.jsonl", "model.window=[5,null]", "model.n_kv_head=1"]
    words += ["tokenizer=byte", "eval.windows=null", "train.steps=2"]
    assert train(*words, "data.document_mask=false", "name=plain") == 0
    losses = {}
    for name in TRAINS_ON_CPU:
        masked = [f"attention={name}", "data.document_mask=true"]
        assert train(*words, *masked, f"name={name}") == 0
        rows = metrics(name)
        losses[name] = [row[key] for row in rows for key in LOSSES if key in row]
        assert losses[name] == pytest.approx(losses["naive"], abs=1e-5)
    assert metrics("plain")[0]["val/loss"] != metrics("naive")[0]["val/loss"]
    assert metrics("plain")[1]["train/loss"] != metrics("naive")[1]["train/loss"]


def test_sampling_uses_the_windows_of_the_checkpoint(train, sample, workdir):
    assert train("model.window=[4,null]", "name=a", "train.steps=1") == 0
    texts = set()
    for name in TRAINS_ON_CPU:
        text = sample("run=a", f"attention={name}", "temperature=0", "max_new_tokens=20")
        texts.add(text)
    assert len(texts) == 1
