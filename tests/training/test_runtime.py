"""Runtime of a run: compiler, parallel training, micro batches, threads, seeds and loss scaling.

tests/common/test_device_settings.py has the settings device and dtype.
"""

import os

import pytest
import torch
from helpers import TINY

from common.errors import UserError
from configs.cli import parse_config
from training.config import RunConfig
from training.parallel import DDP, FSDP2
from training.runtime import (
    Dist,
    Runtime,
    resolve_compile,
    resolve_parallel,
    resolve_runtime,
    seed_device,
    share_cores,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.fixture
def missing(monkeypatch):
    """missing("a compiler"): a machine that lacks it, or with None, nothing."""

    def set_missing(name: str | None) -> None:
        monkeypatch.setattr("training.runtime.missing_compiler", lambda device: name)

    return set_missing


@pytest.mark.parametrize(
    ("device", "lacks", "expected"),
    [(CUDA, None, True), (CUDA, "Triton", False), (CPU, None, False)],
    ids=["GPU", "GPU without Triton", "CPU"],
)
def test_compile_is_the_default_on_gpus_with_triton(missing, device, lacks, expected):
    missing(lacks)
    assert resolve_compile(None, device) is expected


@pytest.mark.parametrize("requested", [True, False])
def test_compile_can_be_chosen(missing, requested):
    missing(None)
    assert resolve_compile(requested, CPU) is requested


def test_compile_without_a_compiler_is_refused(missing):
    missing("a C++ compiler")
    with pytest.raises(UserError, match=r"compile=true needs a C\+\+ compiler.* compile=false"):
        resolve_compile(True, CPU)


@pytest.mark.parametrize(("name", "expected"), [("ddp", DDP), ("fsdp", FSDP2)])
def test_parallel_selects_a_class(name, expected):
    config = RunConfig(parallel=name)
    parallel = resolve_parallel(config, Dist(world_size=2), CPU, torch.bfloat16)
    assert parallel == expected(2, CPU, torch.bfloat16)


@pytest.mark.parametrize(
    ("world_size", "dtype", "message"),
    [
        (1, torch.float32, "parallel=fsdp needs several processes.* torchrun, .* parallel=ddp"),
        (2, torch.float16, "dtype=float16 .* set dtype=bfloat16, or parallel=ddp"),
    ],
    ids=["one process", "float16"],
)
def test_fsdp_that_cannot_run_is_refused(world_size, dtype, message):
    config = RunConfig(parallel="fsdp")
    with pytest.raises(UserError, match=message):
        resolve_parallel(config, Dist(world_size=world_size), CPU, dtype)


def resolve(*words: str) -> Runtime:
    return resolve_runtime(parse_config("train", "", [*TINY, "device=cpu", *words]))


def test_runtime_has_the_micro_batches_of_one_device(workdir, monkeypatch):
    """Of 8 sequences, each of 2 devices has 4, which are 2 micro batches of 2."""
    ranks = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("training.runtime.share_cores", lambda dist: None)
    runtime = resolve("train.batch_size=8", "train.micro_batch_size=2")
    assert runtime.dist == Dist(rank=1, world_size=2, local_rank=1, local_world_size=2)
    assert (runtime.micro_batch_size, runtime.accumulation) == (2, 2)


def test_attention_that_cannot_train_the_model_is_refused(workdir):
    with pytest.raises(UserError, match=r"set model.dropout=0, or attention=naive"):
        resolve("attention=flash", "model.dropout=0.1")


def test_attention_is_resolved_for_training_on_micro_batches_of_documents(workdir, monkeypatch):
    """On a GPU, the kernel depends on them."""
    requests = []

    def record(attention, model, **request) -> tuple[None, None]:
        requests.append(request)
        return None, None

    monkeypatch.setattr("training.runtime.resolve_model", record)
    resolve("data.document_mask=true", "train.micro_batch_size=2", "dtype=bfloat16")
    assert requests == [
        {
            "B": 2,
            "grad": True,
            "dtype": torch.bfloat16,
            "device": CPU,
            "document_mask": True,
        }
    ]


@pytest.fixture
def threads(monkeypatch) -> list[int]:
    """The numbers of threads that torch is set to, on a machine with 8 cores."""
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr("training.runtime.cpu_count", lambda: 8)
    return numbers


@pytest.mark.parametrize(
    ("processes", "omp_num_threads", "expected"),
    [(1, "1", []), (2, "1", [4]), (3, "1", [2]), (16, "1", [1]), (2, "3", [])],
    ids=["one", "two", "three", "more than cores", "number of the user"],
)
def test_processes_of_a_machine_share_its_cores(
    threads, monkeypatch, processes, omp_num_threads, expected
):
    """torchrun sets OMP_NUM_THREADS=1."""
    monkeypatch.setenv("OMP_NUM_THREADS", omp_num_threads)
    share_cores(Dist(world_size=processes, local_world_size=processes))
    assert threads == expected


@pytest.fixture
def backends(monkeypatch):
    """Restores the options of torch."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("value", ["true", "false"])
def test_runtime_configures_torch(workdir, backends, value):
    torch.set_float32_matmul_precision("medium")  # by an earlier run in this process
    resolve(f"tf32={value}", f"deterministic={value}")
    precision = "high" if value == "true" else "highest"
    assert torch.get_float32_matmul_precision() == precision
    assert torch.are_deterministic_algorithms_enabled() == (value == "true")
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == (value == "true")


def draw(*numbers: int) -> list[float]:
    seed_device(CPU, *numbers)
    return torch.rand(3).tolist()


@pytest.mark.parametrize("other", [(1, 2, 4), (1, 3, 3), (2, 2, 3), (1, 3, 2)], ids=str)
def test_each_number_changes_the_seed_of_the_device(other):
    assert draw(1, 2, 3) == draw(1, 2, 3) != draw(*other)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "1"}, "RANK=1 must be less than WORLD_SIZE=1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
    ],
)
def test_incomplete_variables_of_torchrun_are_refused(variables, message, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{message}.*start the processes with torchrun"):
        Dist.from_environment().connect(torch.device("cpu"), torch.float32)
