"""train.micro_batch_size=auto: halves the micro batch until training fits. The run equals one with that number set."""

import re
from pathlib import Path

import pytest
import torch
from helpers import TINY, metrics, summary

from common.errors import UserError
from configs.cli import parse_config
from model.attention import get_attention_fn
from model.gpt import GPT
from training.device import Runtime
from training.distributed import Dist
from training.parallel import DDP
from training.planning import micro_batch
from training.planning.micro_batch import GPU_RESERVE_FRACTION, fit_micro_batches, fits

AUTO = "train.micro_batch_size=auto"
DEVICE = torch.device("cpu")
CPU = Runtime(Dist(), DDP(1, DEVICE, torch.float32), DEVICE, torch.float32, False, 1, 1, None)


def make(*overrides):
    config = parse_config("train", "", [*TINY, "model.n_layer=1", AUTO, *overrides])
    return config, GPT(config.model, 100, get_attention_fn(config.attention))


@pytest.mark.parametrize(
    ("share", "largest", "size"), [(12, 12, 12), (12, 4, 3), (12, 2, 1), (7, 6, 1)]
)
def test_auto_is_the_first_half_that_fits(workdir, monkeypatch, share, largest, size):
    config, model = make(f"train.batch_size={share}")
    monkeypatch.setattr(micro_batch, "fits", lambda size, *_: size <= largest)
    runtime = fit_micro_batches(config, CPU, model)
    assert (runtime.micro_batch_size, runtime.accumulation) == (size, share // size)


def test_auto_is_the_size_that_fits_on_all_processes(workdir, monkeypatch):
    config, model = make("train.batch_size=12")
    monkeypatch.setattr(micro_batch, "fits", lambda *_: True)
    monkeypatch.setattr(Dist, "all_reduce", lambda self, value, op: [1])
    runtime = fit_micro_batches(config, CPU, model)
    assert (runtime.micro_batch_size, runtime.accumulation) == (1, 12)


def test_auto_refuses_a_model_of_which_one_sequence_does_not_fit(workdir, monkeypatch):
    config, model = make("train.batch_size=12")
    monkeypatch.setattr(micro_batch, "fits", lambda *_: False)
    with pytest.raises(UserError, match="set a smaller model.block_size"):
        fit_micro_batches(config, CPU, model)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="NOT RUN: only Linux has this memory limit"
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_trial_stops_at_the_memory_limit_and_changes_nothing(workdir, optimizer):
    """On a CPU whose allocations fail beyond 200 MiB. The scores of 128 sequences need 256 MiB."""
    import resource

    large = [
        "attention=naive",
        "model.block_size=512",
        "model.dropout=0.1",
        f"optimizer={optimizer}",
    ]
    config, model = make(*large)
    random_state, weights = (
        torch.get_rng_state(),
        {k: w.clone() for k, w in model.state_dict().items()},
    )
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    kilobytes = int(
        re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1]
    )
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * kilobytes + 200 * 2**20, limits[1]))
    try:
        assert not fits(128, config, CPU, model)
        assert fits(1, config, CPU, model)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("words", [[], ["plan=true"]])
def test_cpu_needs_a_number_and_no_run_is_left(train, workdir, capsys, words):
    assert train("name=a", "device=cpu", AUTO, *words) == 2
    assert "train.micro_batch_size=auto needs device=cuda" in capsys.readouterr().err
    assert sorted(path.name for path in workdir.iterdir()) == ["text.txt"]


@pytest.mark.gpu
def test_auto_on_cuda_fits_and_trains(train):
    """The limit is 1 GiB. The scores of 64 sequences need more than half of that in each layer."""
    settings = [
        *(
            "device=cuda",
            "dtype=float32",
            "compile=false",
            "attention=naive",
            "model.block_size=512",
        ),
        *("model.n_layer=4", "train.batch_size=64", "eval.windows=64", "train.steps=3"),
    ]
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(GPU_RESERVE_FRACTION + 2**30 / total)
    try:
        assert train("name=a", AUTO, *settings) == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    size = summary("a")["micro_batch_size"]
    assert 1 <= size < 64
    assert train("name=b", f"train.micro_batch_size={size}", *settings) == 0
    for a, b in zip(metrics("a"), metrics("b"), strict=True):
        assert a.get("train/loss") == pytest.approx(b.get("train/loss"), abs=1e-5)
