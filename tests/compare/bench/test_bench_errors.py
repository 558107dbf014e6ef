"""Numerical errors of the backends on the activations of a trained run: bench.py run=NAME."""

import csv
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers import TEXT

from common.checkpoint_file import load_checkpoint
from compare.bench import errors
from compare.bench.errors import measure_errors, record_inputs
from configs.cli import config_from_python
from model import GPTConfig
from model.attention import naive
from model.gpt import GPT

OUTPUTS = ("error_y", "error_dq", "error_dk", "error_dv")


@pytest.fixture
def bench(trained, capsys):
    """bench("run=a", ...) -> (exit code, the rows of errors.csv, the output)."""
    from bench import main
    from configs.cli import parse_config, run_main

    def run(*overrides: str) -> tuple[int, list[dict], str]:
        capsys.readouterr()
        code = run_main(main, parse_config("bench", "", ["name=x", *overrides]))
        table = Path("runs/bench/x/errors.csv")
        return code, list(csv.DictReader(table.open())) if table.exists() else [], "".join(capsys.readouterr())

    return run


def test_bfloat16_errors_are_larger_than_those_of_float32(bench):
    code, rows, printed = bench("run=a")
    assert code == 0
    by_case = {}
    for row in rows:
        where = tuple(row[key] for key in ("backend", "inputs", "layer", "head"))
        by_case.setdefault(where, {})[row["dtype"]] = [float(row[output]) for output in OUTPUTS]
    layers_and_heads = [(str(layer), str(head)) for layer in (1, 2) for head in (1, 2)]
    assert {where[2:] for where in by_case if where[:2] == ("naive", "real")} == set(layers_and_heads)
    for values in by_case.values():
        assert all(0 < error < 1e-5 for error in values["float32"])
        assert all(small < large < 0.1 for small, large in zip(values["float32"], values["bfloat16"], strict=True))
    variances = {row["inputs"]: float(row["score_variance"]) for row in rows}
    assert variances["random"] == pytest.approx(1, abs=0.5) and variances["random"] != variances["real"]
    assert printed.count("bfloat16") == printed.count("float16") / 2 == 3, "a line for each backend and dtype"
    assert "Variance of the scaled scores: random" in printed
    folder = Path("runs/bench/x")
    assert (folder / "errors.png").stat().st_size > 10_000 and (folder / "config.yaml").exists()
    assert json.loads((folder / "summary.json").read_text())["rows"] == len(rows)


def test_failing_backends_do_not_end_the_table(bench, monkeypatch):
    def get_broken_function(config):
        def attend(q, k, v, **_):
            raise RuntimeError("broken kernel")

        return attend if config.backend == "flash" else naive

    monkeypatch.setattr(errors, "get_attention_fn", get_broken_function)
    code, rows, printed = bench("run=a", "backends=[flash,cudnn,naive]", "dtypes=[float32,bfloat16]")
    assert code == 1 and {row["backend"] for row in rows} == {"naive"}
    assert "flash: failed (float32, bfloat16): RuntimeError: broken kernel\n" in printed
    assert "cudnn: refused (float32, bfloat16): attention=cudnn does not run on cpu\n" in printed


def test_missing_data_of_the_run_are_refused(bench):
    shutil.rmtree("data")
    code, _, printed = bench("run=a")
    assert code == 2 and "is missing; run prepare.py with the data settings of the run" in printed
    assert not Path("runs/bench").exists()


@pytest.fixture
def gqa_run(workdir, train):
    """A run with windows, shared key/value heads and a document mask."""
    documents = [json.dumps({"text": line}) for line in TEXT[:8000].split(",")]
    Path("documents.jsonl").write_text("\n".join(documents))
    model = ["model.n_head=4", "model.n_kv_head=2", "model.n_embd=32", "model.window=[5,null]"]
    assert train("name=g", *model, "data.path=documents.jsonl", "data.document_mask=true", "model.block_size=64") == 0


def test_layers_with_linear_attention_are_left_out(train, bench, workdir):
    assert train("name=mixed", "model.mixer=[linear,softmax]", "model.attention_softcap=2", "attention=naive") == 0
    code, rows, printed = bench("run=mixed", "dtypes=[float32]")
    assert code == 0 and {(row["layer"], row["backend"]) for row in rows} == {("2", "naive")}
    assert "sdpa: refused (float32): attention=sdpa on cpu does not support softcaps" in printed
    assert all(0 < float(row[output]) < 1e-5 for row in rows for output in OUTPUTS)
    assert train("name=linear", "model.mixer=linear") == 0
    code, _, printed = bench("run=linear", "dtypes=[float32]")
    assert code == 2 and "has only linear attention, which has no other backends; set another run" in printed


def test_errors_of_a_head_match_a_direct_computation(gqa_run):
    cpu = torch.device("cpu")
    config = config_from_python("bench", run="g", backends=["naive"], dtypes=["bfloat16"], batch_size=2)
    layers = [inputs for inputs in record_inputs(config, cpu) if inputs.name == "real"]
    rows, failures = measure_errors(config, layers)
    assert not failures and len(rows) == 2 * 4 and [inputs.mask["window"] for inputs in layers] == [5, None]
    for inputs in layers:
        doc_ids, window, T = inputs.mask["doc_ids"], inputs.mask["window"] or 64, 64
        assert doc_ids.max() > 0
        i, j = torch.arange(T).view(T, 1), torch.arange(T)
        visible = (j <= i) & (j > i - window) & (doc_ids.unsqueeze(2) == doc_ids.unsqueeze(1))  # (B, T, T)
        # query head 3 reads key/value head 2, which query head 4 shares
        rounded = [tensor.bfloat16() for tensor in inputs.tensors]
        q, k, v, dy = (tensor.double().requires_grad_() for tensor in rounded)
        y = {}
        for head in (2, 3):
            scores = q[:, :, head] @ k[:, :, 1].mT / math.sqrt(8)
            y[head] = scores.masked_fill(~visible, -math.inf).softmax(-1) @ v[:, :, 1]
        dk, dv = torch.autograd.grad(sum((y[head] * dy[:, :, head]).sum() for head in y), (k, v))
        half = [tensor.clone().requires_grad_() for tensor in rounded[:3]]
        half_y = naive(*half, **inputs.mask)
        _, half_dk, half_dv = torch.autograd.grad(half_y, half, rounded[3])
        row = next(row for row in rows if (row.layer, row.head) == (inputs.layer, 3))
        pairs = (half_y[:, :, 2], y[2]), (half_dk[:, :, 1], dk[:, :, 1]), (half_dv[:, :, 1], dv[:, :, 1])
        expected = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs]
        assert [row.error_y, row.error_dk, row.error_dv] == pytest.approx(expected, rel=1e-6)
        exact = (inputs.tensors[0][:, :, 2] @ inputs.tensors[1][:, :, 1].mT / math.sqrt(8))[visible]
        assert row.score_variance == pytest.approx(exact.var().item(), rel=1e-2)


def test_recorded_inputs_are_those_of_the_model(gqa_run):
    """Attention of the recorded q, k and v is what the model's projections read, and dy is its scaled gradient."""
    config = config_from_python("bench", run="g", checkpoint="last")
    layers = [inputs for inputs in record_inputs(config, torch.device("cpu")) if inputs.name == "real"]
    checkpoint = load_checkpoint(Path("runs/g/checkpoints/last.pt"))
    model = GPT(GPTConfig(**checkpoint["model_config"]), checkpoint["vocab_size"], naive, weights=checkpoint["model"])
    read: list[torch.Tensor] = []
    for block in model.blocks:
        block.attn.proj.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    (prepared,) = Path("data/prepared").glob("text-*")
    meta = json.loads((prepared / "meta.json").read_text())
    tokens = torch.from_numpy(errors.PreparedData(prepared, meta).tokens("val")[:65].astype("int64")).unsqueeze(0)
    model(tokens[:, :-1], tokens[:, 1:], doc_ids=layers[0].mask["doc_ids"]).backward(inputs=read)
    for inputs, y in zip(layers, read, strict=True):
        q, k, v, dy = inputs.tensors
        torch.testing.assert_close(naive(q, k, v, **inputs.mask).flatten(2), y)
        torch.testing.assert_close(dy.flatten(2), y.grad / y.grad.square().mean().sqrt(), atol=1e-4, rtol=1e-4)
