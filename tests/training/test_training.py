"""The parts around the loop: schedules, optimizers, checkpoints, metrics, precision, the run's folder."""

import json
import math
import mmap
import os
import platform
import signal
import subprocess
import sys
import zipfile
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from common import checkpoint_file
from common.console import format_duration
from common.errors import TrainingFailed, UserError
from common.interrupt import StopRequest
from common.run_dir import RunDir, find_run
from common.system import peak_memory_bytes, reset_peak_memory
from model import GPTConfig
from model.attention import naive
from model.gpt import GPT
from training import AdamWConfig, MuonConfig, ScheduleConfig, TrainConfig, checkpoint, optimizer
from training.config import WandbConfig
from training.device import grad_scaler, resolve_compile, resolve_device, resolve_dtype
from training.distributed import Dist
from training.metrics import MetricsFile, MetricsLogger
from training.muon import Muon, orthogonalize
from training.progress import shape
from training.schedule import lr_scale, run_progress
from training.wandb_logger import WandbRun

ADAMW = AdamWConfig(name="adamw", lr=1e-3, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1)
MUON = MuonConfig(
    name="muon", lr=0.02, momentum=0.95, ns_steps=5, weight_decay=0.01, embedding_lr=0.01, head_lr=0.003, norm_lr=0.01,
    betas=[0.9, 0.95], eps=1e-8,
)  # fmt: skip
CPU = torch.device("cpu")
ALONE = Dist()


def tiny_model(**changed):
    torch.manual_seed(0)
    shape = dict(
        name="", n_layer=2, n_head=2, n_kv_head=None, n_embd=16, block_size=8, dropout=0.0, bias=True,
        norm="layernorm", mlp="gelu", position="learned", window=None, qk_norm=False, tie_embeddings=True,
        pad_vocab_multiple=1, max_ngram=1, ngram_table_size=64,
    )  # fmt: skip
    return GPT(GPTConfig(**shape | changed), 20, naive)


def step(model, optimizers, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 20, (4, 9), generator=generator)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    for each in optimizers:
        each.step()
        each.zero_grad()
    return loss.item()


# Schedule and optimizers


def nanogpt_lr(iteration, warmup=100, decay=2000, peak=1e-3, floor=1e-4):
    """The rule that nanoGPT's README recipe follows, from its description: linear warm-up, half a cosine, a floor."""
    if iteration < warmup:
        return peak * (iteration + 1) / (warmup + 1)
    return floor + 0.5 * (1 + math.cos(math.pi * (iteration - warmup) / (decay - warmup))) * (peak - floor)


@given(iteration=st.integers(0, 1999))
def test_cosine_is_nanogpts(iteration):
    config = ScheduleConfig("cosine", warmup_steps=100, final_fraction=0.1, decay_fraction=None)
    fraction = lr_scale(config, iteration, 2000, run_progress(iteration, 2000, 0.0, None))
    assert 1e-3 * fraction == pytest.approx(nanogpt_lr(iteration))


def test_wsd_rises_stays_and_falls_to_its_end():
    config = ScheduleConfig("wsd", warmup_steps=10, final_fraction=0.0, decay_fraction=0.5)
    fractions = [lr_scale(config, i, 110, i / 110) for i in range(110)]
    assert fractions[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    assert fractions[10:60] == pytest.approx([1.0] * 50)
    assert fractions[60:] == pytest.approx([1 - i / 50 for i in range(50)])


@settings(max_examples=50)
@given(
    name=st.sampled_from(["cosine", "wsd"]), warmup=st.integers(0, 50), steps=st.none() | st.integers(1, 100),
    final=st.floats(0, 1), decay=st.floats(0, 1),
)  # fmt: skip
def test_every_schedule_stays_between_its_end_and_its_peak(name, warmup, steps, final, decay):
    config = ScheduleConfig(name, warmup, final, decay)
    for i in range(steps or 100):
        fraction = lr_scale(config, i, steps, i / (steps or 100))
        assert (0 if i < warmup else final) - 1e-9 <= fraction <= 1 + 1e-9


def test_the_larger_part_of_two_budgets_is_the_progress():
    assert run_progress(10, 100, 30.0, None) == 0.1
    assert run_progress(10, 100, 30.0, 1.0) == 0.5
    assert run_progress(10, None, 90.0, 1.0) == 1.0


def test_adamw_decays_matrices_and_embeddings_alone_and_every_parameter_once():
    model = tiny_model()
    (adamw,) = optimizer.build_optimizers(model, ADAMW)
    decay = {p: group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters())) == sum(len(g["params"]) for g in adamw.param_groups)
    assert all(decay[p] == (0.1 if p.ndim >= 2 else 0.0) for p in model.parameters())


def test_adamw_is_torchs_to_the_bit():
    ours, theirs = tiny_model(), tiny_model()
    theirs.load_state_dict(ours.state_dict())
    (a,) = optimizer.build_optimizers(ours, ADAMW)
    groups = [group | {"params": []} for group in a.state_dict()["param_groups"]]
    for group, params in zip(groups, (2, 1), strict=True):
        group["params"] = [p for p in theirs.parameters() if min(p.ndim, 2) == params]
    b = torch.optim.AdamW(groups)
    for seed in range(3):
        step(ours, [a], seed)
        step(theirs, [b], seed)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert all(group["fused"] for group in a.param_groups)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_the_blocks_matrices_and_adamw_the_rest(tied):
    model = tiny_model(tie_embeddings=tied)
    muon, adamw = optimizer.build_optimizers(model, MUON)
    rates = {p: group["peak_lr"] for o in (muon, adamw) for group in o.param_groups for p in group["params"]}
    assert set(rates) == set(model.parameters())
    in_muon = {p for group in muon.param_groups for p in group["params"]}
    assert in_muon == {p for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2}
    assert rates[model.wte.weight] == MUON.embedding_lr
    assert rates[model.lm_head.weight] == (MUON.embedding_lr if tied else MUON.head_lr)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(2, 24), columns=st.integers(2, 24), count=st.integers(1, 3), seed=st.integers(0, 99))
def test_orthogonalised_updates_have_singular_values_near_one(rows, columns, count, seed):
    matrices = torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(seed))
    values = torch.linalg.svdvals(orthogonalize(matrices, 12))
    assert ((values > 0.6) & (values < 1.3)).all()


def test_muon_is_torchs_muon_but_for_its_bfloat16():
    """The same three steps as torch.optim.Muon, on matrices of two shapes."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(12, 8)), torch.nn.Parameter(torch.randn(6, 10))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    a = Muon(ours, lr=0.1, momentum=0.9, weight_decay=0.1, ns_steps=5)
    b = torch.optim.Muon(theirs, lr=0.1, momentum=0.9, weight_decay=0.1, ns_steps=5, adjust_lr_fn="original")
    for seed in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("config", [ADAMW, MUON], ids=["adamw", "muon"])
def test_optimizer_state_survives_by_name_and_the_config_wins(config):
    model = tiny_model()
    optimizers = optimizer.build_optimizers(model, config)
    step(model, optimizers)
    state = deepcopy(optimizer.state_by_name(model, optimizers))
    assert set(state) == {name for name, _ in model.named_parameters()}

    other = tiny_model()
    others = optimizer.build_optimizers(other, config)
    for each in others:
        for group in each.param_groups:
            group["lr"] *= 0.5
    other.load_state_dict(model.state_dict())
    optimizer.load_state_by_name(other, others, state)
    assert [g["lr"] for o in others for g in o.param_groups] == [
        0.5 * g["lr"] for o in optimizers for g in o.param_groups
    ]
    optimizer.set_lr(others, 1.0)
    assert step(model, optimizers, 1) == step(other, others, 1)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_batches_are_planned_or_refused_with_sizes_that_fit():
    def plan(batch, micro, world):
        return TrainConfig(
            steps=1,
            minutes=None,
            batch_size=batch,
            micro_batch_size=micro,
            grad_clip=None,
            profile=False,
            init_from=None,
        ).plan(world)

    assert plan(12, None, 1) == (12, 1)
    assert plan(12, 3, 1) == (3, 4)
    assert plan(12, "auto", 2) == (1, 6)
    assert plan(12, 3, 2) == (3, 2)
    with pytest.raises(UserError, match="set 9 or 12"):
        plan(10, None, 3)
    with pytest.raises(UserError, match="set one of 1, 2, 3, 6"):
        plan(12, 4, 2)


# Checkpoints


@pytest.fixture
def state():
    model = tiny_model()
    optimizers = optimizer.build_optimizers(model, ADAMW)
    step(model, optimizers)
    return checkpoint.TrainState(model, optimizers, grad_scaler(CPU, torch.float32), step=1, seconds=2.5)


def test_a_checkpoint_comes_back_whole_and_under_plain_names(state, tmp_path):
    state.save(tmp_path / "last.pt", {"vocab_size": 20})
    saved = checkpoint_file.load_checkpoint(tmp_path / "last.pt")
    assert (saved["step"], saved["seconds"], saved["vocab_size"]) == (1, 2.5, 20)
    assert set(saved["model"]) == set(state.model.state_dict())
    assert not any("_orig_mod" in name or "module." in name for name in saved["model"])
    fresh = checkpoint.TrainState(tiny_model(), optimizer.build_optimizers(tiny_model(), ADAMW), state.scaler)
    fresh.optimizers = optimizer.build_optimizers(fresh.model, ADAMW)
    fresh.restore(saved)
    assert step(fresh.model, fresh.optimizers, 1) == step(state.model, state.optimizers, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_a_save_that_dies_leaves_the_previous_checkpoint(state, tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    state.save(path, {})

    def dies(content, file):
        file.write(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", dies)
    state.step = 2
    with pytest.raises(OSError, match="disk full"):
        state.save(path, {})
    assert checkpoint_file.load_checkpoint(path)["step"] == 1


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damage_is_noticed_and_said(state, tmp_path, damage):
    path = tmp_path / "last.pt"
    state.save(path, {})
    raw = bytearray(path.read_bytes())
    if damage == "cut":
        raw = raw[: len(raw) // 2]
    else:
        with zipfile.ZipFile(path) as archive:
            largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        raw[largest.header_offset + 200 + largest.file_size // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"last.pt is damaged"):
        checkpoint_file.load_checkpoint(path)


def test_a_format_of_the_future_is_refused(tmp_path):
    torch.save({"format": 99}, tmp_path / "last.pt")
    with pytest.raises(UserError, match="checkpoint format 99, and this version reads 4"):
        checkpoint_file.load_checkpoint(tmp_path / "last.pt")


def test_what_differs_is_listed(tmp_path):
    with pytest.raises(UserError, match=r"model.n_layer=4 \(now 6\), data.name=a \(now b\); set that back"):
        checkpoint.check_identity(
            tmp_path,
            {"model.n_layer": 4, "data.name": "a", "same": 1},
            {"model.n_layer": 6, "data.name": "b", "same": 1},
        )


# Metrics, runs, devices


def tracker(path, step=0, scaler_enabled=False):
    class Silent(WandbRun):
        def __init__(self):
            self.run, self.id, self.start, self.start_seconds = None, None, None, 0.0

    scaler = torch.amp.GradScaler("cpu", enabled=scaler_enabled)
    return MetricsLogger(MetricsFile(path, step), Silent(), scaler, flush_every=1e9)


def test_wandb_is_started_with_the_first_numbers_and_at_the_latest_at_the_end(tmp_path, monkeypatch):
    wandb, heard = pytest.importorskip("wandb"), []
    theirs = SimpleNamespace(
        define_metric=lambda *_, **__: None, log=heard.append, finish=lambda code: heard.append({"exit_code": code})
    )
    monkeypatch.setattr(
        wandb, "init", lambda **told: heard.append({key: told[key] for key in ("id", "resume")}) or theirs
    )
    run = SimpleNamespace(is_main=True, name="a", folder=tmp_path, summary={"attention": {}})
    config = WandbConfig(mode="online", project="p", entity=None, group=None, tags=[])

    fresh = WandbRun(config, run, {"attention": {}}, None)
    assert fresh.id and not heard
    fresh.log([{"step": 0}, {"step": 1}])
    fresh.log([{"step": 2}])
    assert heard == [{"id": fresh.id, "resume": None}, {"step": 0}, {"step": 1}, {"step": 2}]

    heard.clear()
    WandbRun(config, run, {"attention": {}}, "before").finish(1)  # it failed before it had anything to tell
    assert heard == [{"id": "before", "resume": "allow"}, {"exit_code": 1}]

    heard.clear()
    WandbRun(config, run, {"attention": {}}, None).finish(75)  # who wants to stop does not want to wait for it
    assert not heard


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_wait_as_tensors_and_are_written_in_blocks(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with tracker(path) as track:
        track.log({"step": 1, "train/loss": torch.tensor(2.5)}, deferred=lambda: {"step_ms": 3.0})
        track.log({"step": 2, "train/loss": torch.tensor(2.0)})
        assert path.read_text() == ""
        track.flush(sync=True)
        assert rows_of(path) == [{"step": 1, "train/loss": 2.5, "step_ms": 3.0}, {"step": 2, "train/loss": 2.0}]
        assert track.last == {"step": 2, "train/loss": 2.0, "step_ms": 3.0}


def test_resuming_cuts_rows_beyond_the_step_and_half_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "tr')
    with tracker(path, step=2) as track:
        track.log({"step": 3, "again": True})
        track.flush()
    assert rows_of(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    with tracker(path, step=0):
        assert path.read_text() == ""


@pytest.mark.parametrize("key", ["train/loss", "val/loss", "grad_norm"])
def test_a_number_that_is_none_ends_the_run_in_a_sentence_after_writing_it(tmp_path, key):
    path = tmp_path / "metrics.jsonl"
    said = f"{key} is not a finite number at step 3; set a lower optimizer.lr"
    with pytest.raises(TrainingFailed, match=said), tracker(path) as track:
        track.log({"step": 3, key: torch.tensor(math.nan)})
        track.flush()
    assert rows_of(path) == [{"step": 3, key: None}]


def test_a_scaler_takes_care_of_infinite_gradients(tmp_path):
    with tracker(tmp_path / "metrics.jsonl", scaler_enabled=True) as track:
        track.log({"step": 1, "grad_norm": math.inf, "train/loss": 1.0})
        track.flush()


def test_a_run_is_locked_until_its_process_lets_go(workdir):
    with RunDir("a", "", True, ALONE) as run:
        with pytest.raises(UserError, match=f"runs/a is being trained by process {os.getpid()} on {platform.node()}"):
            RunDir("a", "", True, ALONE)
        run.start({"seed": 1}, {"device": "cpu"})
    summary = json.loads((workdir / "runs/a/summary.json").read_text())
    assert (summary["status"], summary["error"], summary["device"]) == ("finished", None, "cpu")
    with pytest.raises(UserError, match="runs/a exists"):
        RunDir("a", "", False, ALONE)


def test_two_unnamed_runs_of_the_same_second_get_folders_of_their_own(workdir):
    runs = [RunDir(None, "label", True, ALONE) for _ in range(3)]
    assert len({run.name for run in runs}) == 3


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("no"), "refused", "no"),
        (TrainingFailed("nan"), "failed", "nan"),
        (KeyboardInterrupt("saved; go on"), "interrupted", "saved; go on"),
        (ValueError("odd"), "failed", "ValueError: odd"),
    ],
)
def test_how_a_run_ended_is_on_record(workdir, error, status, said):
    with pytest.raises(type(error)), RunDir("a", "", True, ALONE) as run:
        run.start({}, {})
        raise error
    summary = json.loads((workdir / "runs/a/summary.json").read_text())
    assert (summary["status"], summary["error"]) == (status, said)


def test_the_newest_run_with_a_checkpoint_is_found_below_sweeps_too(workdir):
    with pytest.raises(UserError, match=r"train one: python train.py"):
        find_run("last")
    for age, name in ((30, "old"), (10, "sweeps/s/seed=1"), (20, "middle")):
        folder = workdir / "runs" / name / "checkpoints"
        folder.mkdir(parents=True)
        (folder / "last.pt").touch()
        os.utime(folder / "last.pt", (1e9 - age, 1e9 - age))
    (workdir / "runs/empty/checkpoints").mkdir(parents=True)
    assert str(find_run("last")) == "runs/sweeps/s/seed=1"
    assert str(find_run("old")) == "runs/old"
    for wrong in ("empty", "nothing", "../runs/old", "/etc"):
        with pytest.raises(UserError, match="run="):
            find_run(wrong)


def test_devices_and_dtypes_resolve_or_refuse(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(UserError, match=r"device=cuda is not on this machine.*device=auto"):
        resolve_device("cuda")
    with pytest.raises(UserError, match="device=tpu is unknown"):
        resolve_device("tpu")
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16
    with pytest.raises(UserError, match="dtype=float16 trains on cuda alone"):
        resolve_dtype("float16", CPU)
    with pytest.raises(UserError, match="dtype=int8 is unknown"):
        resolve_dtype("int8", CPU)
    assert resolve_compile(None, CPU) is False


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_memory_that_a_step_frees_is_there_for_the_next():
    ask = """
import ctypes, resource, torch
from training.device import grad_scaler, resolve_compile, resolve_device, resolve_dtype, configure_backends

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def step():
    blocks = [libc.malloc(24 * 2**20) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 24 * 2**20)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

configure_backends(torch.device("cpu"), False, False)
first, second = step(), step()
print(second - first)
"""
    told = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert int(told) < 1000  # page faults; otherwise each of the 24,576 pages is one, at every step


def test_compiling_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match=r"compile=true needs a C\+\+ compiler"):
        resolve_compile(True, CPU)


def test_a_second_request_stops_at_once_unless_there_are_many_to_come():
    with StopRequest(ignore_repeats=True, silent=True) as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert stop.requested
    with pytest.raises(KeyboardInterrupt, match="stopped at once"), StopRequest(ignore_repeats=False, silent=True):
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)


def test_peak_memory_sees_an_allocation_and_forgets_it_on_reset():
    reset_peak_memory(CPU)
    before = peak_memory_bytes(CPU)
    if before is None:
        pytest.skip("NOT RUN: this system does not tell")
    held = mmap.mmap(-1, 2**28)  # 256 MiB, new from the system: malloc may have as much left of other tests
    for page in range(0, len(held), mmap.PAGESIZE):
        held[page] = 1
    assert peak_memory_bytes(CPU) - before > 200 * 2**20
    held.close()
    reset_peak_memory(CPU)
    assert peak_memory_bytes(CPU) - before < 100 * 2**20


def test_durations_read_as_a_clock():
    assert [format_duration(s) for s in (0, 59.6, 90.4, 3700)] == ["0:00", "1:00", "1:30", "1:01:40"]


def test_a_model_of_one_layer_has_no_layers():
    assert shape(tiny_model().config) == "2 layers, 2 heads, 16 wide, context 8"
    assert shape(tiny_model(n_layer=1, n_head=1).config) == "1 layer, 1 head, 16 wide, context 8"


@pytest.mark.parametrize(
    ("config", "losses"),
    [(ADAMW, [2.99302, 2.96323, 2.93732]), (MUON, [2.99302, 2.88761, 2.78571])],
    ids=["adamw", "muon"],
)
def test_the_first_three_losses_are_those_of_record(config, losses):
    model = tiny_model()
    optimizers = optimizer.build_optimizers(model, config)
    assert [step(model, optimizers) for _ in range(3)] == pytest.approx(losses, abs=2e-4), (
        "the mathematics of the model, its initialisation or the optimizer changed: if that was meant, put the new "
        "numbers here and say in the commit message why they moved; if not, a change that looked harmless was not"
    )
