"""Document masks and windows in complete runs: data, training, resuming and sampling."""

from contextlib import chdir
from dataclasses import replace

import pytest
import torch
from data_helpers import write_table
from helpers import BYTE, TEXT_SOURCE, TRAINS_ON_CPU, metrics, train_here

from data.loader import Loader
from data.prepare import prepare

END_OF_TEXT = 256  # of the byte tokenizer


@pytest.fixture
def make_loader(workdir):
    """make_loader(document_mask) -> a loader of 30 short documents."""
    path = write_table("table.jsonl", text=[f"document {n}" * (1 + n % 3) for n in range(30)])

    def make(document_mask: bool) -> Loader:
        config = replace(TEXT_SOURCE, path=path, val_fraction=0.3, document_mask=document_mask)
        data = prepare(config, BYTE, 40)
        return Loader(data, 40, seed=0, document_mask=document_mask)

    return make


def complete_batch(loader: Loader, split: str):
    count = loader.val_windows if split == "val" else sum(loader.windows)
    return loader.batch(split, 0, count)


@pytest.mark.parametrize("split", ["train", "val"])
def test_doc_ids_change_after_each_end_of_text(make_loader, split):
    x, _, doc_ids = complete_batch(make_loader(document_mask=True), split)
    assert doc_ids.shape == x.shape
    assert torch.equal(doc_ids.diff(dim=1), (x[:, 1:] == END_OF_TEXT).long())
    assert doc_ids.max() > 1


@pytest.mark.parametrize("split", ["train", "val"])
def test_document_mask_does_not_change_the_tokens(make_loader, split):
    x, y, _ = complete_batch(make_loader(document_mask=True), split)
    plain_x, plain_y, doc_ids = complete_batch(make_loader(document_mask=False), split)
    assert torch.equal(x, plain_x)
    assert torch.equal(y, plain_y)
    assert doc_ids is None


def test_document_mask_of_a_single_document_is_refused(train, capsys):
    assert train("data.document_mask=true") == 2
    assert "data.document_mask=true needs the <|endoftext|> token" in capsys.readouterr().err


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, list[dict]]:
    """Rows of the metrics of runs on 60 documents: of each backend, and of one without the mask."""
    lines = [f"the {n}th document says {n * n} and ends" for n in range(60)]
    words = [
        "data.path=table.jsonl",
        "model.window=[5,null]",
        "model.n_kv_head=1",
        "tokenizer=byte",
        "eval.windows=null",
    ]
    rows = {}
    with chdir(tmp_path_factory.mktemp("documents")):
        write_table("table.jsonl", text=lines)
        for name in TRAINS_ON_CPU:
            masked = [f"attention={name}", "data.document_mask=true"]
            assert train_here(*words, *masked, f"name={name}") == 0
            rows[name] = metrics(name)
        assert train_here(*words, "data.document_mask=false", "name=plain") == 0
        rows["plain"] = metrics("plain")
    return rows


def losses(rows: list[dict]) -> list[float]:
    return [row[key] for row in rows for key in ("train/loss", "val/loss") if key in row]


@pytest.mark.parametrize("name", TRAINS_ON_CPU)
def test_every_backend_gives_the_losses_of_naive(runs, name):
    assert losses(runs[name]) == pytest.approx(losses(runs["naive"]), abs=1e-5)


def test_document_mask_acts_in_validation(runs):
    assert runs["plain"][0]["val/loss"] != runs["sdpa"][0]["val/loss"]


def test_document_mask_acts_in_training(runs):
    assert runs["plain"][1]["train/loss"] != runs["sdpa"][1]["train/loss"]


def test_sampling_uses_the_windows_of_the_checkpoint(train, sample, workdir):
    assert train("model.window=[4,null]", "name=a") == 0
    texts = set()
    for name in TRAINS_ON_CPU:
        text = sample("run=a", f"attention={name}", "temperature=0", "max_new_tokens=20")
        texts.add(text)
    assert len(texts) == 1
