"""train.micro_batch_size=auto: finds the largest micro batch that fits. The run equals one with that number set."""

from pathlib import Path

import pytest
import torch
from helpers import TINY, metrics, summary, untimed

from common import system
from common.errors import UserError
from configs.cli import parse_config
from model.attention import get_attention_fn
from model.gpt import GPT
from training.device import Runtime
from training.distributed import Dist
from training.planning.memory import StepSpec, simulate_memory
from training.planning.micro_batch import (
    GPU_RESERVE_FRACTION,
    USABLE_MEMORY_FRACTION,
    probe_on_device,
    resolve_micro_batch_size,
)

CPU, ONE_PROCESS = torch.device("cpu"), Dist()
AUTO = "train.micro_batch_size=auto"
SMALL = ["model.n_layer=1", "train.batch_size=4", "optimizer=adamw"]


def make_config(*overrides):
    return parse_config("train", "", [*TINY, *SMALL, AUTO, *overrides])


def make_step(config, dist: Dist = ONE_PROCESS) -> StepSpec:
    return StepSpec.from_config(config, 100, Runtime(dist, CPU, torch.float32, False))


def make_model(config) -> GPT:
    return GPT(config.model, 100, get_attention_fn(config.attention))


def resolve(config, model, dist: Dist = ONE_PROCESS) -> tuple[int, int]:
    return resolve_micro_batch_size(config.train, make_step(config, dist), dist, model)


def bytes_beyond_weights(config, micro_batch_size: int, accumulation: int) -> int:
    """Estimated memory of training, without the weights, which are allocated before."""
    memory = simulate_memory(make_step(config), micro_batch_size, accumulation)
    return memory.reserved - sum(p.nbytes for p in make_model(config).parameters())


@pytest.fixture
def set_free_memory(monkeypatch):
    """set_free_memory(size): the system reports `size` bytes of free memory."""
    return lambda size: monkeypatch.setattr(system, "free_memory", lambda device: size)


@pytest.fixture
def assert_unchanged():
    """assert_unchanged(model) -> a function that checks that the weights and the random state are still the same."""

    def remember(model):
        random_state, weights = torch.get_rng_state(), {k: w.clone() for k, w in model.state_dict().items()}

        def check():
            assert torch.equal(torch.get_rng_state(), random_state)
            assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
            assert all(p.grad is None for p in model.parameters())

        return check

    return remember


@pytest.mark.parametrize(("size", "accumulation"), [(2, 2), (1, 4)])
def test_auto_is_the_largest_size_that_fits(workdir, set_free_memory, assert_unchanged, size, accumulation):
    config = make_config()
    required = bytes_beyond_weights(config, size, accumulation) / USABLE_MEMORY_FRACTION
    model = make_model(config)
    check = assert_unchanged(model)
    set_free_memory(required + 1)
    assert resolve(config, model) == (size, accumulation)
    check()
    set_free_memory(required - 8)
    if size == 1:
        with pytest.raises(UserError, match=r"too small for one sequence of model.block_size=16 tokens; set a smaller"):
            resolve(config, model)
    else:
        assert resolve(config, model)[0] < size


def test_processes_share_memory_and_use_the_smallest_size(workdir, set_free_memory, monkeypatch):
    config = make_config()
    model = make_model(config)
    sizes = []
    monkeypatch.setattr(Dist, "all_reduce_min", lambda self, value: sizes.append(value) or 1)
    for difference in (2, -16):
        set_free_memory(2 * bytes_beyond_weights(config, 2, 2) / USABLE_MEMORY_FRACTION + difference)
        assert resolve(config, model, Dist(0, 2, 0, 2)) == (1, 2)
    assert sizes == [2, 1]


def test_run_with_auto_equals_run_with_the_number_set(train, set_free_memory, capsys):
    settings = [*SMALL, "model.dropout=0.1"]
    set_free_memory(bytes_beyond_weights(make_config(*settings), 2, 2) / USABLE_MEMORY_FRACTION + 1)
    assert train("name=a", AUTO, *settings) == 0
    assert (summary("a")["micro_batch_size"], summary("a")["accumulation"]) == (2, 2)
    assert train("name=b", "train.micro_batch_size=2", *settings) == 0
    assert untimed(metrics("a")) == untimed(metrics("b"))


def test_too_little_memory_is_an_error_and_leaves_no_run(train, set_free_memory, workdir, capsys):
    set_free_memory(1000)
    assert train("name=a", *SMALL, "train.batch_size=1", AUTO) == 2
    assert "the free memory is too small for one sequence" in capsys.readouterr().err
    assert not (workdir / "runs").exists()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="NOT RUN: only Linux has this memory limit")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_probe_stops_at_the_memory_limit_and_changes_nothing(workdir, assert_unchanged, optimizer):
    """The CUDA probe on a CPU whose allocations fail beyond 200 MiB; the scores of 128 sequences need 256 MiB."""
    import resource

    config = make_config(
        "attention=naive", "model.block_size=512", "model.dropout=0.1", "train.batch_size=128", f"optimizer={optimizer}"
    )
    model = make_model(config)
    check = assert_unchanged(model)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (system.process_memory("VmData") + 200 * 2**20, limits[1]))
    try:
        size = probe_on_device(model, make_step(config), share=128, world_size=1)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    assert 1 <= size < 128
    check()


@pytest.mark.gpu
def test_auto_on_cuda_fits_and_trains(train):
    """The limit is 1 GiB. The scores of 64 sequences need more than half of that in each layer."""
    settings = [
        "device=cuda",
        "dtype=float32",
        "compile=false",
        "attention=naive",
        "model.block_size=512",
        "model.n_layer=4",
        "train.batch_size=64",
        "eval.batches=1",
        "train.steps=3",
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
