"""train.micro_batch_size=auto: what fits and no more, and a run that is the one with that number written out."""

from pathlib import Path

import pytest
import torch
from helpers import TINY, metrics, summary, untimed

from common import system
from common.errors import UserError
from configs.cli import parse_config
from model.attention import get_attention_fn
from model.gpt import GPT
from training.distributed import Dist
from training.planning.memory import simulate_memory
from training.planning.micro_batch import GPU_RESERVE, MEMORY_SAFETY, probe_on_device, resolve_micro_batch_size

CPU = torch.device("cpu")
AUTO = "train.micro_batch_size=auto"
SMALL = ["model.n_layer=1", "train.batch_size=4", "optimizer=adamw"]


def config_of(*overrides):
    return parse_config("train", "", [*TINY, *SMALL, AUTO, *overrides])


def beyond_the_weights(config, size: int, accumulation: int) -> int:
    """Bytes that training takes beside the model itself, with `size` sequences at a time."""
    model, attend = GPT(config.model, 100, get_attention_fn(config.attention)), get_attention_fn(config.attention)
    told = simulate_memory(
        model, attend, config.optimizer, B=size, T=config.model.block_size, accumulation=accumulation,
        dtype=torch.float32, device=CPU, document_mask=False,
    )  # fmt: skip
    return told.reserved - sum(p.nbytes for p in model.parameters())


@pytest.fixture
def free(monkeypatch):
    """free(bytes): so much memory is free, of which CERTAIN counts."""
    return lambda size: monkeypatch.setattr(system, "free_memory", lambda device: size)


@pytest.mark.parametrize(("size", "accumulation"), [(2, 2), (1, 4)])
def test_it_is_the_most_that_the_free_memory_holds(workdir, free, size, accumulation):
    config = config_of()
    needed = beyond_the_weights(config, size, accumulation) / MEMORY_SAFETY
    model = GPT(config.model, 100, get_attention_fn(config.attention))
    random, weights = torch.get_rng_state(), {name: w.clone() for name, w in model.state_dict().items()}
    free(needed + 1)
    assert resolve_micro_batch_size(config, model, torch.float32, Dist()) == (size, accumulation)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    free(needed - 8)
    if size == 1:
        with pytest.raises(UserError, match=r"even one sequence of model.block_size=16 tokens .* set a smaller"):
            resolve_micro_batch_size(config, model, torch.float32, Dist())
    else:
        assert resolve_micro_batch_size(config, model, torch.float32, Dist())[0] < size


def test_processes_share_a_machines_memory_and_take_what_fits_for_all(workdir, free, monkeypatch):
    config = config_of()
    model = GPT(config.model, 100, get_attention_fn(config.attention))
    agreed = []
    monkeypatch.setattr(Dist, "all_reduce_min", lambda self, value: agreed.append(value) or 1)
    for more_or_less in (2, -16):
        free(2 * beyond_the_weights(config, 2, 2) / MEMORY_SAFETY + more_or_less)
        assert resolve_micro_batch_size(config, model, torch.float32, Dist(0, 2, 0, 2)) == (1, 2)
    assert agreed == [2, 1]


def test_a_run_is_the_one_with_the_number_written_out(train, free, capsys):
    settings = [*SMALL, "model.dropout=0.1"]
    free(beyond_the_weights(config_of(*settings), 2, 2) / MEMORY_SAFETY + 1)
    assert train("name=a", AUTO, *settings) == 0
    assert "in 2 parts, 2 sequences at a time, as many as fit" in capsys.readouterr().out
    told = summary("a")
    assert (told["micro_batch_size"], told["accumulation"]) == (2, 2)
    assert train("name=b", "train.micro_batch_size=2", *settings) == 0
    assert "as many as fit" not in capsys.readouterr().out
    assert untimed(metrics("a")) == untimed(metrics("b"))


def test_where_nothing_fits_there_is_a_sentence_and_no_run(train, free, workdir, capsys):
    free(1000)
    assert train("name=a", *SMALL, "train.batch_size=1", AUTO) == 2
    assert "the free memory is too small for training with even one sequence" in capsys.readouterr().err
    assert not (workdir / "runs").exists()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="NOT RUN: memory can be bounded so on Linux alone")
def test_a_trial_stops_at_a_real_bound_and_leaves_no_trace(workdir):
    """As on CUDA, but on a CPU whose allocations fail beyond 200 MiB; 128 sequences' scores take 256 at once."""
    import resource

    config = config_of("attention=naive", "model.block_size=512", "model.dropout=0.1", "train.batch_size=128")
    model = GPT(config.model, 100, get_attention_fn(config.attention))
    random, weights = torch.get_rng_state(), {name: w.clone() for name, w in model.state_dict().items()}
    used = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmData"))
    bounds = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(used.split()[1]) + 200 * 2**20, bounds[1]))
    try:
        most = probe_on_device(config, model, torch.float32, Dist())
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, bounds)
    assert 1 <= most < 128
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_container_that_may_use_less_than_the_machine_has_is_told_apart(tmp_path, monkeypatch):
    if system.free_memory(CPU) is None:
        pytest.skip("NOT RUN: this system does not tell")
    before = system.free_memory(CPU)
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    version_1 = any(line.split(":")[1] == "memory" for line in groups)
    folder, names = tmp_path, ("memory.max", "memory.current", "inactive_file")
    if version_1:
        folder, names = tmp_path / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        folder.mkdir()
    (folder / names[0]).write_text(f"{50 * 2**20}\n")
    (folder / names[1]).write_text(f"{30 * 2**20}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {2**20}\n")
    monkeypatch.setattr(system, "CGROUP_ROOT", tmp_path)
    assert system.free_memory(CPU) == 21 * 2**20 < before
    (folder / names[0]).write_text("max\n")
    assert system.free_memory(CPU) > 21 * 2**20


@pytest.mark.gpu
def test_on_cuda_it_is_tried_out_and_the_run_goes_through(train):
    """Within a gibibyte, of which the scores of 64 sequences take more than a half per layer."""
    settings = ["device=cuda", "dtype=float32", "compile=false", "attention=naive", "model.block_size=512",
                "model.n_layer=4", "train.batch_size=64", "eval.batches=1", "train.steps=3"]  # fmt: skip
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(GPU_RESERVE + 2**30 / total)
    try:
        assert train("name=a", AUTO, *settings) == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    chosen = summary("a")["micro_batch_size"]
    assert 1 <= chosen < 64
    assert train("name=b", f"train.micro_batch_size={chosen}", *settings) == 0
    for a, b in zip(metrics("a"), metrics("b"), strict=True):
        assert a.get("train/loss") == pytest.approx(b.get("train/loss"), abs=1e-5)
