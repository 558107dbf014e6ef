"""plan=true: parameters, memory, steps and time, the printed table, and no files left."""

import io
import json
import re
import socket
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path

import pytest
from helpers import TEXT, TINY

from common.console import PlainConsole
from common.errors import UserError
from configs.cli import parse_config
from training.plan import Plan, make_neighbor_table, make_plan, make_plan_table
from training.runtime import resolve_runtime

GIVEN_SPEED = ["plan=true", "flops_per_second=1e9"]
NEIGHBOR_FLOPS = ("2.5e12", "4.0e12", "1.0e13", "2.5e13", "4.0e13")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def plan(folder):
    """plan("model.n_layer=4", ...): the plan of a tiny model, for a speed of 1 GFLOP/s."""

    def plan_tiny_model(*words: str) -> Plan:
        with chdir(folder):
            return make(*TINY, "model.n_layer=1", "optimizer=adamw", *GIVEN_SPEED, *words)

    return plan_tiny_model


def make(*words: str) -> Plan:
    config = parse_config("train", "", list(words))
    return make_plan(config, resolve_runtime(config))


# Memory


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: only Linux counts in kB")
def test_planning_does_not_allocate_the_model(plan):
    import resource

    plan()  # loads libraries
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert plan("model.n_embd=8192").memory["weights"] > 3 * 2**30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20


@DEVICES
def test_weights_and_gradients_are_exact(plan, device):
    planned = plan(f"device={device}", "compile=false")
    n = sum(planned.parameters.values())
    assert planned.memory["weights"] == planned.memory["gradients"] == 4 * n


@DEVICES
@pytest.mark.parametrize(
    ("optimizer", "bytes_per_parameter"), [("adamw", 8), ("muon", 4)], ids=["adamw", "muon"]
)
def test_optimizer_state_has_one_or_two_numbers_for_each_parameter(
    plan, optimizer, bytes_per_parameter, device
):
    planned = plan(f"optimizer={optimizer}", f"device={device}", "compile=false")
    n = sum(planned.parameters.values())
    assert bytes_per_parameter * n <= planned.memory["optimizer state"] <= 8 * n + 1000


@pytest.fixture(scope="module")
def activations(plan):
    """activations("flash", 256): bytes with an attention backend and a context."""
    cache: dict[tuple, int] = {}

    def plan_activations(backend: str, T: int, *words: str) -> int:
        key = (backend, T, *words)
        if key not in cache:
            settings = [f"attention={backend}", f"model.block_size={T}", "model.n_embd=32"]
            cache[key] = plan(*settings, *words).memory["activations"]
        return cache[key]

    return plan_activations


def test_naive_attention_saves_its_scores(activations):
    B, H, layers, T = 4, 2, 1, 256
    scores = layers * B * H * T * T * 4
    assert activations("naive", T) - activations("flash", T) > scores


def test_activations_of_flash_grow_linearly_with_the_context(activations):
    assert 3 < activations("flash", 256) / activations("flash", 64) < 5


def test_activations_are_of_one_micro_batch(activations):
    one_of_four = activations("naive", 256, "train.micro_batch_size=1")
    assert one_of_four < activations("naive", 256) / 2


def test_activation_checkpointing_saves_activations(activations):
    deep = "model.n_layer=4"
    saving = activations("flash", 64, deep, "train.activation_checkpointing=block")
    assert saving < activations("flash", 64, deep) / 2


def plan_processes(plan, device: str, *words: str) -> dict[str, int]:
    """Memory of one process."""
    settings = ["train.batch_size=8", f"device={device}", "compile=false"]
    return plan(*settings, *words).memory


FSDP = ["parallel=fsdp", "world_size=4"]


@DEVICES
@pytest.mark.parametrize("part", ["weights", "gradients", "optimizer state"])
def test_fsdp_divides_memory_among_processes(plan, device, part):
    alone = plan_processes(plan, device)
    assert plan_processes(plan, device, *FSDP)[part] == alone[part] // 4


@DEVICES
def test_ddp_does_not_divide_memory(plan, device):
    alone = plan_processes(plan, device)
    assert plan_processes(plan, device, "world_size=4")["weights"] == alone["weights"]


@DEVICES
def test_fsdp_accumulates_complete_gradients(plan, device):
    gradients = plan_processes(plan, device)["gradients"]
    accumulating = plan_processes(plan, device, *FSDP, "train.micro_batch_size=1")
    assert accumulating["gradients"] == gradients // 4 + gradients


# Steps, FLOPs and time


def test_flops_are_of_all_tokens(plan):
    planned = plan("train.batch_size=8", "train.steps=7")
    assert planned.tokens == 7 * 8 * 16
    assert planned.flops == planned.tokens * sum(planned.flops_per_token.values())


def test_time_is_flops_by_speed(plan):
    planned = plan()
    assert planned.seconds == pytest.approx(planned.flops / 1e9)


def test_measured_speed_is_of_all_processes(plan, monkeypatch):
    monkeypatch.setattr("training.plan.measure_flops_per_second", lambda *args: 2e9)
    assert plan("flops_per_second=null", "world_size=2").flops_per_second == 4e9


def test_epochs_are_relative_to_the_training_tokens(plan, folder):
    planned = plan("train.steps=7")
    (prepared,) = (folder / "data/prepared").glob("text-*")
    meta = json.loads((prepared / "meta.json").read_text(encoding="utf-8"))
    assert planned.epochs == 7 * 4 * 16 / meta["tokens"]["train"]


def test_minutes_become_the_steps_that_fit(plan):
    planned = plan("train.steps=null", "train.minutes=1")
    assert planned.seconds == pytest.approx(60, rel=0.01)


def test_run_ends_at_steps_or_minutes_whichever_comes_first(plan):
    assert plan("train.steps=3", "train.minutes=1").steps == 3


def test_epochs_become_steps(plan):
    one = plan("train.steps=null", "train.epochs=1")
    assert one.epochs >= 1 > one.epochs * (one.steps - 1) / one.steps


def test_plan_shows_the_presets_for_less_and_more_time():
    presets = make_neighbor_table(1e6, 1e13).columns[0].cells
    assert list(presets) == [f"1.0e6-{flops}" for flops in NEIGHBOR_FLOPS]


# The command


def test_plan_leaves_no_run(train, workdir):
    assert train(*GIVEN_SPEED, "wandb.mode=offline") == 0
    assert sorted(path.name for path in workdir.iterdir()) == ["data", "text.txt"]


def test_printed_plan_is_80_columns_wide(train, capsys):
    assert train(*GIVEN_SPEED) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.fixture(scope="module")
def printed(folder) -> dict[str, str]:
    """The printed plan of a run with a measured speed: {title: value}."""
    with chdir(folder):
        config = parse_config("train", "", [*TINY, "plan=true"])
        runtime = resolve_runtime(config)
        table = make_plan_table(config, runtime, make_plan(config, runtime))
    output = io.StringIO()
    with redirect_stdout(output):
        PlainConsole().print(table, width=200)
    lines = [re.split("  +", line.strip()) for line in output.getvalue().splitlines() if line]
    return dict(lines)


@pytest.mark.parametrize(
    ("title", "part"),
    [
        ("model", "2 layers, 2 heads, 16 channels, context 16, vocabulary 33"),
        ("device", "float32, attention auto -> flash"),
        ("memory per process", "MiB"),
        ("optimizer state", "%"),
        ("activations", "%"),
        ("step", "1 process x 1 x 4 = 4 sequences x 16 tokens"),
        ("steps", "6: 384 tokens (0.017 epochs)"),
        ("FLOPs", "FLOP/s (measured)"),
        ("time", "without evaluations"),
    ],
)
def test_printed_plan_has(printed, title, part):
    assert part in printed[title]


@pytest.fixture
def offline(workdir, monkeypatch, tmp_path):
    """No network and no vocabulary of OpenAI."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(socket, "getaddrinfo", None)


OPENWEBTEXT = [
    "experiment=gpt2_124m",
    "model.n_layer=1",
    "model.n_embd=24",
    "model.block_size=32",
    "train.micro_batch_size=1",
    "train.batch_size=2",
    *GIVEN_SPEED,
]


def test_gpt2_124m_is_planned_without_network(offline):
    assert make(*OPENWEBTEXT).vocab_size == 50_257


def test_data_that_is_not_on_this_machine_has_no_epochs(offline):
    assert make(*OPENWEBTEXT).epochs is None
    assert not Path("data").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["tokenizer=byte"], 257), (["tokenizer=bpe", "tokenizer.vocab_size=400"], 400)],
    ids=["byte", "bpe"],
)
def test_vocabulary_of_data_that_is_not_prepared_has_its_largest_size(offline, words, expected):
    assert make(*OPENWEBTEXT, "data=openwebtext", *words).vocab_size == expected


def test_vocabulary_that_depends_on_missing_data_is_refused(offline):
    with pytest.raises(UserError, match=r"vocabulary of tokenizer=char .* run python prepare.py"):
        make(*OPENWEBTEXT, "data=openwebtext", "tokenizer=char")
