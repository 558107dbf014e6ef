"""plan=true: parameters, memory, steps and time."""

import math
import socket
import sys
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from helpers import TEXT, TINY

from common.errors import UserError
from configs.cli import parse_config
from model.gpt import GPT
from training.config import RunConfig, TrainConfig
from training.plan import count_steps, estimate_memory, make_plan
from training.runtime import resolve_runtime

GIVEN_SPEED = ["plan=true", "flops_per_second=1e9"]
TINY_PLAN = [*TINY, "model.n_layer=1", "optimizer=adamw", *GIVEN_SPEED, "compile=false"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


def make(*words: str) -> dict[str, str]:
    config = parse_config("train", "", list(words))
    return dict(make_plan(config, resolve_runtime(config)))


# Memory


@pytest.fixture
def memory(folder, monkeypatch):
    """memory("model.n_layer=4", ...): bytes of a tiny model with a vocabulary of 20."""
    monkeypatch.chdir(folder)

    def plan_memory(*words: str) -> dict[str, int]:
        config = parse_config("train", "", [*TINY_PLAN, *words])
        with torch.device("meta"):
            model = GPT(config.model, 20)
        return estimate_memory(config, resolve_runtime(config), model)

    return plan_memory


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: only Linux counts in kB")
def test_planning_does_not_allocate_the_model(memory):
    import resource

    memory()  # loads libraries
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert memory("model.n_embd=8192")["weights"] > 3 * 2**30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_gradients_and_optimizer_state_are_exact(memory, optimizer, device):
    planned = memory(f"optimizer={optimizer}", f"device={device}")
    C = 16
    embeddings = 20 * C + 64 * C + 20 * C
    matrices = 12 * C * C
    norms = 3 * C
    per_matrix = 2 if optimizer == "adamw" else 1
    num_states = 2 * (embeddings + norms) + per_matrix * matrices
    num_parameters = embeddings + matrices + norms
    assert planned["weights"] == planned["gradients"] == 4 * num_parameters
    assert 0 <= planned["optimizer state"] - 4 * num_states <= 100  # counters of steps


def saved_bytes(*words: str) -> int:
    """Bytes of the tensors that a forward pass saves for the backward pass, and of the logits."""
    config = parse_config("train", "", [*TINY_PLAN, *words])
    runtime = resolve_runtime(config)
    model = GPT(config.model, 20, runtime.attend)
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    tokens = torch.zeros(runtime.micro_batch_size, config.model.block_size, dtype=torch.int64)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with runtime.autocast(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(tokens, tokens)
    return sum(size for pointer, size in storages.items() if pointer not in parameters)


@pytest.mark.parametrize("model", ["gpt2", "modern", "llama"])
@pytest.mark.parametrize(
    ("backend", "dtype"), [("naive", "float32"), ("flash", "float32"), ("flash", "bfloat16")]
)
def test_activations_are_close_to_what_a_forward_pass_saves(memory, model, backend, dtype):
    size = ["model.n_layer=3", "model.n_embd=64", "model.block_size=128"]
    words = [f"model={model}", *size, f"attention={backend}", f"dtype={dtype}", "device=cpu"]
    assert memory(*words)["activations"] == pytest.approx(saved_bytes(*words), rel=0.25)


FSDP = ["parallel=fsdp", "world_size=4", "train.batch_size=8"]


@pytest.mark.parametrize("part", ["weights", "gradients", "optimizer state"])
def test_fsdp_divides_memory_among_processes(memory, part):
    assert memory(*FSDP)[part] == memory()[part] // 4


def test_fsdp_accumulates_complete_gradients(memory):
    gradients = memory()["gradients"]
    accumulating = memory(*FSDP, "train.micro_batch_size=1")
    assert accumulating["gradients"] == gradients // 4 + gradients


# Steps and time


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"steps": 7}, 7),
        ({"steps": None, "minutes": 1}, 120),
        ({"steps": 3, "minutes": 1}, 3),
        ({"steps": 300, "minutes": 1}, 120),
        ({"steps": None, "epochs": 2.01}, 20.1),
        ({"steps": 9, "epochs": 1}, 9),
    ],
    ids=["steps", "minutes", "steps first", "minutes first", "epochs", "steps before an epoch"],
)
def test_run_ends_at_its_first_limit(limits, expected):
    config = RunConfig(train=TrainConfig(**limits))
    assert count_steps(config, seconds_per_step=0.5, steps_per_epoch=10) == pytest.approx(expected)


def test_epochs_of_data_that_is_not_prepared_are_refused():
    config = RunConfig(train=TrainConfig(steps=None, epochs=1))
    with pytest.raises(UserError, match=r"run python prepare.py"):
        count_steps(config, 0.5, math.inf)


@pytest.fixture(scope="module")
def planned(folder) -> dict[str, str]:
    """A plan for two processes of 1 GFLOP/s each."""
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.plan.measure_flops_per_second", lambda *args: 1e9)
        return make(*TINY, "plan=true", "world_size=2", "train.steps=1000000")


@pytest.mark.parametrize(
    ("title", "part"),
    [
        ("model", "2 layers, 2 heads, 16 channels, context 16, vocabulary 33"),
        ("device", "float32, attention auto -> flash"),
        ("memory per process", "MiB"),
        ("  optimizer state", "%)"),
        ("step", "2 processes x 1 x 2 = 4 sequences x 16 tokens"),
        ("steps", "1,000,000: 64,000,000 tokens (2,797 epochs)"),
        ("FLOPs", "2.96 T at 2 G FLOP/s"),
        ("time", "without evaluations"),
    ],
)
def test_plan_has(planned, title, part):
    assert part in planned[title]


def test_plan_leaves_no_run(train, workdir):
    assert train(*GIVEN_SPEED, "wandb.mode=offline") == 0
    assert sorted(path.name for path in workdir.iterdir()) == ["data", "text.txt"]


OPENWEBTEXT = [
    "experiment=gpt2_124m",
    "model.n_layer=1",
    "model.n_embd=24",
    "model.block_size=32",
    "train.micro_batch_size=1",
    "train.batch_size=2",
    *GIVEN_SPEED,
]


@pytest.fixture
def offline(workdir, monkeypatch, tmp_path):
    """No network and no vocabulary of OpenAI."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(socket, "getaddrinfo", None)


@pytest.mark.parametrize(
    ("words", "size"),
    [([], "50,257"), (["tokenizer=bpe", "tokenizer.vocab_size=400"], "400")],
    ids=["gpt2", "bpe"],
)
def test_data_that_is_not_on_this_machine_is_planned_without_network(offline, words, size):
    planned = make(*OPENWEBTEXT, *words)
    assert planned["model"].endswith(f"vocabulary {size}")
    assert planned["steps"].endswith("(data not prepared yet)")
    assert not Path("data").exists()


def test_vocabulary_that_depends_on_missing_data_is_refused(offline):
    with pytest.raises(UserError, match=r"the vocabulary depends on data .* run prepare.py"):
        make(*OPENWEBTEXT, "data=openwebtext", "tokenizer=char")
