"""Document masks and windows in complete runs: data, training, resuming and sampling."""

from dataclasses import replace

import pytest
import torch
from data_helpers import write_table
from helpers import BYTE, TEXT_SOURCE, TRAINS_ON_CPU, metrics

from data.loader import Loader
from data.prepare import prepare


def test_doc_ids_change_after_each_end_of_text(workdir):
    """Token 256 is the end-of-text token."""
    path = write_table("table.jsonl", text=[f"document {n}" * (1 + n % 3) for n in range(30)])
    configs = [
        replace(TEXT_SOURCE, path=path, val_fraction=0.3, document_mask=mask)
        for mask in (True, False)
    ]
    loader, plain = (
        Loader(prepare(c, BYTE, 40), 40, seed=0, document_mask=c.document_mask) for c in configs
    )
    for split, count in (("train", sum(loader.windows)), ("val", loader.val_windows)):
        x, y, doc_ids = loader.batch(split, 0, count)
        assert doc_ids.shape == x.shape
        assert torch.equal(doc_ids.diff(dim=1), (x[:, 1:] == 256).long())
        assert doc_ids.max() > 1
        without = plain.batch(split, 0, count)
        assert torch.equal(without[0], x) and torch.equal(without[1], y) and without[2] is None


def test_document_mask_of_a_single_document_is_refused(train, capsys):
    assert train("data.document_mask=true") == 2
    assert "data.document_mask=true needs the <|endoftext|> token" in capsys.readouterr().err


@pytest.mark.parametrize("position", ["rotary", "learned"])
def test_every_backend_gives_the_same_losses_with_windows_and_document_masks(
    train, workdir, position
):
    path = write_table(
        "table.jsonl", text=[f"the {n}th document says {n * n} and ends" for n in range(60)]
    )
    settings = [f"data.path={path}", "data.document_mask=true", "model.window=[5,null]", "tokenizer=byte",
                "eval.windows=null", f"model.position={position}", "model.n_kv_head=1"]  # fmt: skip
    losses, first = {}, {}
    for name in TRAINS_ON_CPU:
        assert train(*settings, f"attention={name}", f"name={name}") == 0
        rows = metrics(name)
        losses[name] = [
            row[key] for row in rows for key in ("train/loss", "val/loss") if key in row
        ]
        first[name] = rows[0]["val/loss"], rows[1]["train/loss"]
    for name in TRAINS_ON_CPU:
        assert losses[name] == pytest.approx(losses["naive"], abs=1e-5)
    assert train(*settings, "data.document_mask=false", "name=plain") == 0
    plain = metrics("plain")
    assert plain[0]["val/loss"] != first["naive"][0], "the mask has no effect in validation"
    assert plain[1]["train/loss"] != first["naive"][1], "the mask has no effect in training"


def test_sampling_uses_the_windows_of_the_checkpoint(train, sample, workdir):
    assert train("model.window=[4,null]", "name=a") == 0
    texts = {
        sample("run=a", f"attention={name}", "temperature=0", "max_new_tokens=20")
        for name in TRAINS_ON_CPU
    }
    assert len(texts) == 1
