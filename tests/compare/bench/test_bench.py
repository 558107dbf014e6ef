"""bench.py: what a row says is what ran, took and held; what cannot run is a row with its reason."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from math import sqrt
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from hypothesis import given
from hypothesis import strategies as st
from kernel_profiler import reserve

from common import system
from compare.bench.cases import PHASES, BenchSettings, Case, flops, inputs, measure, write_reference
from compare.bench.plot import draw
from compare.bench.results import Timing, TimingsFile, crossovers, group_by_phase, rankings, recommendation, spread
from compare.bench.runner import run_interleaved, summarize
from compare.bench.table import notes
from compare.bench.worker import IsolatedCallFailed, run_isolated
from model import AttentionConfig
from model.attention import AttentionRequest, all_variants, attention_mask, get_attention_fn, naive
from model.flops import attention_flops, flops_per_token
from training import speed

COLUMNS = (
    "backend,resolved,impl,status,reason,phase,device,dtype,B,T,H,G,D,Dv,ms_median,ms_q1,ms_q3,tokens_per_second,"
    "flops_per_second,peak_share,peak_memory_bytes,error_y,error_dq,error_dk,error_dv,compile_s"
)
CPU = torch.device("cpu")
CASE = Case(AttentionConfig("naive", None, None), "forward", CPU, torch.float32, B=2, T=16, H=4, G=2, D=8, Dv=6)
SETTINGS = BenchSettings(None, None, 64, False, False, seed=1, rounds=1, repeats=2, seconds=0.001, time_limit=60.0)
QUICK = [
    "model.n_layer=1", "model.n_embd=16", "model.n_head=2", "optimizer=adamw", "vocab_size=64", "rounds=1", "repeats=1",
    "seconds=0.001", "wandb.mode=disabled", "block_sizes=[8,16]", "name=x",
]  # fmt: skip


@pytest.fixture
def bench(workdir, capsys):
    """bench("phases=[step]", ...) -> (exit code, the rows of attention.csv, what it printed)."""
    from bench import main
    from configs.cli import parse_config, run_main

    def go(*overrides: str) -> tuple[int, list[dict], str]:
        own = {override.split("=")[0] for override in overrides}
        code = run_main(
            main, parse_config("bench", "", [*(q for q in QUICK if q.split("=")[0] not in own), *overrides])
        )
        printed = "".join(capsys.readouterr())
        with open("runs/bench/x/attention.csv", newline="") as file:
            return code, list(csv.DictReader(file)), printed

    return go


def timing(backend, T, ms, spread=0.01, **changes):
    """A made-up row; ms None: it ran out of memory."""
    row = Timing(backend, backend, None, "finished", None, "forward", "cpu", "float32", 1, T, 2, 2, 64, 64)
    if ms is None:
        return replace(row, resolved=None, status="out of memory", reason="needed 8.0 GiB more", **changes)
    return replace(row, ms_median=ms, ms_q1=ms * (1 - spread), ms_q3=ms * (1 + spread), **changes)


def lines(**times):
    """Made-up rows from {backend: {T: ms}}."""
    return [timing(backend, T, ms) for backend, line in times.items() for T, ms in line.items()]


# What rows come to.


@given(at=st.floats(70, 4000), steep=st.floats(1.5, 3))
def test_the_crossover_of_two_power_laws_is_found_where_they_cross(at, steep):
    Ts = (64, 256, 1024, 4096)
    rows = lines(a={T: (T / at) ** steep for T in Ts}, b={T: T / at for T in Ts})
    clear = all(max(a, b) > 1.1 * min(a, b) for T in Ts for a, b in [((T / at) ** steep, T / at)])
    found = crossovers(rows)
    if clear and 64 < at < 4096:
        (each,) = found
        assert (each.before, each.after) == ("a", "b")
        assert pytest.approx(at, rel=1e-6) == each.T and each.ms == pytest.approx(1.0, rel=1e-6)
    assert len(found) <= 1


def test_backends_that_are_alike_do_not_cross():
    times = {64: 1.0, 256: 2.0, 1024: 9.0}
    rows = lines(a={64: 2.0, 256: 5.0, 1024: 40.0}, b=times, c={64: 1.05, 256: 1.9, 1024: 9.3})
    assert [each.names for each in rankings(rows)] == [{"b", "c"}] * 3
    assert crossovers(rows) == []
    wide = [*lines(a=times), *(timing("b", T, 1.3 * ms, spread=0.3) for T, ms in times.items())]
    assert all(each.names == {"a", "b"} for each in rankings(wide)), "quartiles overlap"


def test_a_crossover_is_passed_on_through_those_that_are_alike():
    """a, then a or b, then b: they changed places, though at no T from one clear winner to the next."""
    rows = lines(a={64: 1.0, 128: 2.0, 256: 8.0, 512: 32.0}, b={64: 1.5, 128: 2.1, 256: 4.0, 512: 8.0})
    (each,) = crossovers(rows)
    assert (each.before, each.after) == ("a", "b") and 128 < each.T < 256


def test_one_kernel_does_not_overtake_itself():
    rows = lines(sdpa={64: 1.0, 512: 9.0}, flash={64: 2.0, 512: 6.0})
    assert len(crossovers(rows)) == 1
    assert crossovers([replace(row, resolved="flash") for row in rows]) == []


def test_the_answer_says_which_and_by_how_much():
    mib = 2**20
    rows = [
        timing("slow", 64, 1.0), timing("fast", 64, 2.0),
        timing("slow", 256, 6.0, peak_memory_bytes=20 * mib), timing("fast", 256, 3.0, peak_memory_bytes=4 * mib),
        timing("slow", 512, 36.0, peak_memory_bytes=80 * mib), timing("fast", 512, 9.0, peak_memory_bytes=8 * mib),
        timing("slow", 1024, None), timing("fast", 1024, 20.0),
    ]  # fmt: skip
    assert recommendation(rows) == [
        ("forward, float32", "T = 64", "slow, 2.0 times as fast as fast"),
        ("forward, float32", "T = 256 to 512", "fast, 2.0 to 4.0 times as fast as slow, with 10 to 20 % of its memory"),
        ("forward, float32", "T = 1,024", "fast; slow: out of memory"),
    ]
    assert any("needed 8.0 GiB more" in note for note in notes(rows))
    assert recommendation([timing("a", 8, None)]) == [("forward, float32", "T = 8", "none: a out of memory")]
    wavy = lines(a={64: 2.0, 128: 9.0, 256: 2.4}, b={64: 1.0, 128: 1.0, 256: 1.0})
    assert recommendation(wavy)[0][2] == "b, 2.0 to 9.0 times as fast as a", "the least and the largest, not the ends"
    steps = [timing("a", 8, 1.0), timing("a", 8, 1.0, phase="step")]
    assert [line[0] for line in recommendation(steps)] == ["step, float32", "forward, float32"], (
        "what one trains with leads"
    )
    assert recommendation([timing("a", 8, 1.0), timing("b", 8, 1.0)])[0][2] == "a or b (alike)"
    assert recommendation([timing("a", 8, 1.0)])[0][2] == "a"


def test_a_machine_that_is_not_still_is_told_of():
    assert spread(lines(a={64: 1.0})) == pytest.approx(1.01 / 0.99) and spread([timing("a", 8, None)]) is None
    assert spread([timing("a", T, 1.0, spread=0.5) for T in (8, 16)]) == pytest.approx(3.0)


def test_a_row_is_on_the_disk_before_the_next_is_measured(tmp_path):
    with TimingsFile(tmp_path / "attention.csv") as file:
        file.write(timing("a", 64, 1.23456789, peak_memory_bytes=5))
        header, row = (tmp_path / "attention.csv").read_text().splitlines()
    assert header == COLUMNS
    assert row.startswith("a,a,,finished,,forward,cpu,float32,1,64,2,2,64,64,1.23457,") and ",5,,,,," in row


@pytest.mark.parametrize("rows", [
    lines(a={64: 1.0, 256: 9.0}, b={64: 2.0, 256: 4.0}),
    [timing("a", 64, None), timing("b", 64, 1.0, peak_memory_bytes=2**20)],
    [timing("a", 64, 1.0, dtype=dtype, phase=phase) for dtype in ("float32", "x") for phase in ("decode", "step")],
    [timing("a", 64, None), timing("a", 128, None)],
    [timing(f"b{i}", T, T * 1.2**i) for i in range(9) for T in (2**k for k in range(4, 14))],
])  # fmt: skip
def test_a_picture_of_whatever_there_is(rows, tmp_path):
    import matplotlib.image

    draw(rows, tmp_path / "attention.png", "made up")
    height, width, _ = matplotlib.image.imread(tmp_path / "attention.png").shape
    assert width >= 750 and height >= 900


# A process for each.


def test_a_run_isolated_returns_what_it_returns():
    assert run_isolated(sqrt, 4.0) == 2.0
    assert run_isolated(os.getpid) != os.getpid()


@pytest.mark.parametrize("function, arguments, status, reason", [
    (speed.peak_flops, ("a", "b"), "failed", "AttributeError: 'str' object has no attribute 'type'"),
    (bytearray, (2**60,), "out of memory", "MemoryError"),
    (os._exit, (3,), "failed", "its process was ended with 3"),
    (os.abort, (), "failed", "its process was killed by SIGABRT"),
    (signal.raise_signal, (signal.SIGKILL,), "out of memory", "killed, probably by Linux"),
    (time.sleep, (60,), "time limit", "took longer than 0.5 s"),
])  # fmt: skip
def test_a_run_isolated_says_how_it_ended(function, arguments, status, reason):
    with pytest.raises(IsolatedCallFailed) as ended:
        run_isolated(function, *arguments, time_limit=0.5 if function is time.sleep else None)
    assert ended.value.status == status and reason in ended.value.reason


def test_ctrl_c_while_processes_start_is_told_to_nobody_else():
    ask = """
from compare.bench.worker import run_isolated
import time
print("asking", flush=True)
try:
    run_isolated(time.sleep, 300)
except KeyboardInterrupt:
    print("stopped")
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    asking = subprocess.Popen([sys.executable, "-c", ask], cwd=ROOT, **pipes)
    asking.stdout.readline()
    time.sleep(0.7)  # the server imports torch now
    os.killpg(asking.pid, signal.SIGINT)
    out, err = asking.communicate(timeout=60)
    assert (out, err, asking.returncode) == ("stopped\n", "", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_whoever_measures_ends_with_whoever_asked_though_it_is_killed():
    ask = "import time; from compare.bench.worker import run_isolated; run_isolated(time.sleep, 300.125)"
    asking = subprocess.Popen([sys.executable, "-c", ask], cwd=ROOT, env={**os.environ, "WHO_ASKS": str(os.getpid())})

    def sleeping() -> int:
        mine = f"WHO_ASKS={os.getpid()}".encode()
        return sum(mine in environ(path) for path in Path("/proc").glob("[0-9]*"))

    def environ(path) -> bytes:
        try:
            return (path / "environ").read_bytes()
        except OSError:
            return b""

    until = time.monotonic() + 60
    while sleeping() < 4 and time.monotonic() < until:  # it, multiprocessing's two servers, and the child
        time.sleep(0.1)
    assert sleeping() == 4
    asking.kill()
    asking.wait()
    while sleeping() and time.monotonic() < until:
        time.sleep(0.1)
    assert sleeping() == 0


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="memory is bounded on Linux alone")
def test_what_does_not_fit_fails_before_the_machine_swaps():
    """Linux hands out more memory than there is, to those that do not touch it."""
    known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    size = (int(known["MemAvailable"].split()[0]) + 2**19) * 1024
    assert run_isolated(reserve, 2**30, bounded=True) == 2**30
    with pytest.raises(IsolatedCallFailed) as ended:
        run_isolated(reserve, size, bounded=True)
    assert ended.value.status == "out of memory"


# What is measured.


@given(Tq=st.integers(1, 40), more=st.integers(0, 40), Dv=st.integers(1, 9), grad=st.booleans())
def test_flops_are_those_of_what_queries_see(Tq, more, Dv, grad):
    need = AttentionRequest(B=2, Tq=Tq, Tk=Tq + more, H=3, G=1, D=8, Dv=Dv, dtype=torch.float32, device=CPU, grad=grad)
    pairs = int(attention_mask(Tq, Tq + more).sum())
    products = 2 * 8 + 2 * Dv  # of a query with a key, and of a weight with a value
    assert attention_flops(need) == 2 * 3 * pairs * products * (3 if grad else 1)


def test_flops_of_a_step_are_those_of_its_own_context():
    from configs.cli import parse_config

    config = parse_config("bench", "", ["model.window=128", "model.block_size=128"])
    settings = replace(SETTINGS, model=config.model, vocab_size=64)
    case = replace(CASE, phase="step", B=1, T=1024)
    expected = flops_per_token(replace(config.model, block_size=1024), 64, 1024) * 1024
    everything = flops_per_token(replace(config.model, block_size=1024, window=None), 64, 1024) * 1024
    assert flops(case, settings) == expected < everything


@pytest.mark.parametrize("phase", ["forward", "forward+backward", "decode"])
def test_the_reference_is_naive_in_float64_on_the_same_inputs(phase, tmp_path):
    case = replace(CASE, phase=phase)
    write_reference(case, 7, tmp_path / "r.pt")
    found = torch.load(tmp_path / "r.pt")
    q, k, v, dy = (each.double().requires_grad_(case.trains) for each in inputs(case, 7))
    assert q.shape[1] == (1 if phase == "decode" else 16)
    y = naive(q, k, v)
    expected = {"y": y.detach()}
    if case.trains:
        expected |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(y, (q, k, v), dy), strict=True))
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype, least, most", [(torch.float32, 0.0, 5e-6), (torch.bfloat16, 1e-4, 0.1)])
def test_errors_are_the_distance_from_float64(dtype, least, most, tmp_path):
    case = replace(CASE, phase="forward+backward", dtype=dtype)
    write_reference(case, SETTINGS.seed, tmp_path / "r.pt")
    found = measure(case, SETTINGS, tmp_path / "r.pt")
    assert found.errors.keys() == {"y", "dq", "dk", "dv"} and all(least < e < most for e in found.errors.values())
    wrong = torch.load(tmp_path / "r.pt")
    wrong["dk"][0, 3, 1, 2] += 5.0
    torch.save(wrong, tmp_path / "r.pt")
    assert 4.5 < measure(case, SETTINGS, tmp_path / "r.pt").errors["dk"] < 5.5
    assert measure(case, SETTINGS, tmp_path / "nothing.pt").errors == {}


def test_figures_are_of_all_processes_together():
    one = measure(CASE, SETTINGS, Path("nothing"))
    found = [replace(one, seconds=seconds, peak_memory_bytes=size, compile_s=took, tokens=10, flops=1000)
             for seconds, size, took in (([1.0] * 500, 5, 9.0), ([3.0], 7, 1.0), ([4.0, 4.0], 6, 1.0))]  # fmt: skip
    row = summarize(found, peak=1000.0)
    assert (row["ms_q1"], row["ms_median"], row["ms_q3"]) == (1000.0, 3000.0, 4000.0), "each process counts the same"
    assert summarize(found, peak=None)["peak_share"] is None
    assert row["tokens_per_second"] == pytest.approx(10 / 3) and row["flops_per_second"] == pytest.approx(1000 / 3)
    assert row["peak_share"] == pytest.approx(1 / 3)
    assert row["peak_memory_bytes"] == 7 and row["compile_s"] == 9.0
    assert row["resolved"] == "naive" and row["impl"] is None


def test_no_cache_holds_the_inputs_from_the_call_before(monkeypatch):
    seen = []

    def attend(q, k, v):
        seen.append((q.data_ptr(), k.data_ptr(), v.data_ptr()))
        return q[..., :6]

    monkeypatch.setattr(system, "cache_bytes", lambda device: 100_000)
    monkeypatch.setattr("compare.bench.cases.get_attention_fn", lambda config: attend)
    work = PHASES["forward"](CASE, SETTINGS)
    for _ in range(50):
        work.call()
    q, k, v, dy = inputs(CASE, SETTINGS.seed)
    between = seen.index(seen[0], 1)  # calls until the same inputs come again
    assert between * sum(each.nbytes for each in (q, k, v, dy)) > 100_000
    assert len({q for q, _, _ in seen}) == between


def test_a_cache_is_laid_out_head_by_head():
    _, k, v, _ = inputs(replace(CASE, phase="decode"), 1)
    assert k.transpose(1, 2).is_contiguous() and v.transpose(1, 2).is_contiguous()
    assert inputs(CASE, 1)[1].is_contiguous(), "as keys come out of a linear layer"


def test_a_later_round_that_is_too_long_leaves_what_the_earlier_ones_found():
    settings = replace(SETTINGS, rounds=100_000, time_limit=2.0)
    (found,) = run_interleaved({"naive": CASE}, settings, Path("nothing"))[0].values()
    assert 1 <= len(found) < 10_000


def test_what_compiles_finds_an_empty_cache_and_others_keep_theirs(monkeypatch):
    from bench import empty_compile_cache

    for before in ("/somewhere", None):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if before is not None:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        with empty_compile_cache():
            assert not any(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).iterdir())
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def test_as_many_calls_are_timed_as_fit_and_never_fewer_than_asked_for():
    calls = []
    assert len(speed.time_calls(lambda: calls.append(1), CPU, repeats=7, seconds=0.0, most=100)) == 7
    assert 2 < len(speed.time_calls(lambda: time.sleep(0.01), CPU, repeats=2, seconds=0.3, most=100)) <= 30
    seconds = speed.time_calls(lambda: time.sleep(0.01), CPU, repeats=2, seconds=10.0, most=5)
    assert len(seconds) == 5 and all(each >= 0.01 for each in seconds)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is counted on Linux alone")
def test_memory_is_what_the_scores_take_and_with_flash_it_grows_with_t_alone():
    scores = 2 * 2048**2 * 4  # bytes, of 2 heads
    case = replace(CASE, phase="forward+backward", B=1, T=2048, H=2, G=2, D=32, Dv=32)
    taken = run_isolated(measure, case, SETTINGS, Path("nothing")).peak_memory_bytes
    assert taken == pytest.approx(3 * scores, rel=0.2), "weights, their gradient and that of the scores"
    long = replace(case, attention=AttentionConfig("flash", None, None), phase="forward", D=64, Dv=64)
    taken = [
        run_isolated(measure, replace(long, T=T), SETTINGS, Path("nothing")).peak_memory_bytes
        for T in (2048, 4096, 8192)
    ]
    assert taken[1] - taken[0] == pytest.approx(2048 * 2 * 64 * 4, rel=0.35), "y, and a little"
    assert taken[2] - taken[1] == pytest.approx(4096 * 2 * 64 * 4, rel=0.35)


@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["forward", "forward+backward", "decode", "step"])
def test_rows_on_cuda(bench, phase):
    words = [f"phases=[{phase}]", "device=cuda", "dtypes=[bfloat16]", "block_sizes=[128,1024]", "head_size=64"]
    code, rows, printed = bench(*words, "compile=false", "model.n_embd=128")
    assert code == 0, printed
    assert {row["status"] for row in rows} == {"finished"}, printed
    assert all(0 < float(row["peak_share"]) < 1 for row in rows)


@pytest.mark.gpu
def test_out_of_memory_on_cuda_is_a_row(bench):
    _, rows, _ = bench("phases=[forward]", "device=cuda", "backends=[naive]", "block_sizes=[1048576]")
    assert [row["status"] for row in rows] == ["out of memory"]


def test_every_spelling_is_a_way_to_compute_attention():
    ways = all_variants()
    assert {"naive", "sdpa", "sdpa:math", "sdpa:efficient", "flash", "flash:FA3"} <= ways.keys()
    for config in ways.values():
        get_attention_fn(config)
    assert ways["sdpa:math"].kernels == ["math"] and ways["flash:FA3"].impl == "FA3"


# The command.


def test_a_table_a_picture_and_a_summary(bench):
    code, rows, printed = bench("backends=[naive,flash,cudnn]", "wandb.mode=offline", "n_kv_head=1", "block_sizes=[8]")
    assert code == 0
    assert len(rows) == 4 * 3
    finished = [row for row in rows if row["status"] == "finished"]
    assert {row["backend"] for row in finished} == {"naive", "flash"}
    assert all(row["resolved"] == row["backend"] and float(row["ms_q1"]) <= float(row["ms_median"]) for row in finished)
    assert all(float(row["error_y"]) < 1e-5 for row in finished if row["phase"] != "step")
    assert {(row["phase"] == "step", row["H"], row["G"]) for row in rows} == {(False, "2", "1"), (True, "2", "2")}
    for row in finished:
        tokens = 1 if row["phase"] == "decode" else 8
        assert float(row["tokens_per_second"]) == pytest.approx(tokens / float(row["ms_median"]) * 1000, rel=1e-4)
    refused = [row for row in rows if row["backend"] == "cudnn"]
    assert {(row["status"], row["ms_median"]) for row in refused} == {("refused", "")}
    assert all("does not run on cpu" in row["reason"] for row in refused)
    assert printed.index("fastest here") < printed.index("MiB") and "cudnn: refused" in printed
    folder = Path("runs/bench/x")
    assert (folder / "attention.png").stat().st_size > 10_000 and (folder / "config.yaml").exists()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["rows"] == 12 and summary["answer"]
    assert summary["device_name"] and summary["versions"]["torch"] and summary["threads"] >= 1
    (table,) = folder.glob("wandb/offline-run-*/files/media/table/attention_*.table.json")
    told = json.loads(table.read_text())
    assert told["columns"] == COLUMNS.split(",") and len(told["data"]) == 12
    assert list(folder.glob("wandb/offline-run-*/files/media/images/attention_picture_*.png"))


def test_a_whole_step_takes_memory_for_its_model(bench):
    _, rows, _ = bench(
        "phases=[step]",
        "backends=[naive]",
        "block_sizes=[8]",
        "model.n_embd=512",
        "vocab_size=4096",
        "model.max_ngram=1",
    )
    weights = (12 * 512**2 + 2 * 4096 * 512) * 4
    assert 4 * weights < int(rows[0]["peak_memory_bytes"]) < 5 * weights, "weights, gradients, two moments, activations"


def test_out_of_memory_is_a_row(bench):
    code, rows, printed = bench("phases=[forward]", "backends=[naive]", "block_sizes=[8,1048576]", "n_head=1")
    assert code == 0
    assert [row["status"] for row in rows] == ["finished", "out of memory"]
    assert "GiB more" in rows[1]["reason"] and "out of memory" in printed


def test_the_time_limit_is_a_row_and_longer_contexts_are_not_tried(bench):
    words = ["phases=[forward]", "backends=[naive]", "block_sizes=[8,2048,4096]", "time_limit=0.3"]
    code, rows, _ = bench(*words, "n_head=16", "batch_size=4", "head_size=64")
    assert code == 0
    assert [row["status"] for row in rows] == ["finished", "time limit", "time limit"]
    assert rows[1]["reason"] == "took longer than 0.3 s"
    assert rows[2]["reason"] == "not tried, as T = 2,048 took longer than 0.3 s"


def test_where_all_are_refused_it_ends_with_2(bench):
    code, rows, printed = bench("backends=[cudnn]", "phases=[decode]")
    assert code == 2 and {row["status"] for row in rows} == {"refused"} and "none" in printed


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_measured(workdir):
    words = [word for word in QUICK if not word.startswith("block_sizes")]
    command = [sys.executable, str(ROOT / "bench.py"), *words, f"block_sizes={list(range(8, 500))}".replace(" ", "")]
    bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    table = workdir / "runs/bench/x/attention.csv"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (table.exists() and table.read_text().count("\n") > 4):
        time.sleep(0.1)
    os.killpg(bench.pid, signal.SIGINT)  # as a terminal does: to all of its processes
    out, err = bench.communicate(timeout=60)
    assert bench.returncode == 75, err
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 3 and {row["status"] for row in rows} == {"finished"}
    assert f"stopped after {len(rows)} rows" in err and "Traceback" not in err + out
    assert "fastest here" in out and (table.parent / "attention.png").exists()
    assert json.loads((table.parent / "summary.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize("words, says", [
    (["backends=[naiv]"], "backends: naiv is unknown; set some of naive, sdpa, sdpa:cudnn"),
    (["backends=[]"], "backends=[] leaves nothing to measure"),
    (["backends=[naive,naive]"], "backends=[naive,naive] says something twice"),
    (["phases=[backward]"], "phases: backward is unknown; set one or more of forward, forward+backward"),
    (["dtypes=[int8]"], "dtypes: int8 is unknown; set some of float32"),
    (["block_sizes=[0]"], "takes numbers of tokens from 1"),
    (["block_sizes=64"], "block_sizes takes a list of whole numbers"),
    (["n_head=4", "n_kv_head=3"], "n_kv_head=3 does not divide the 4 heads"),
    (["time_limit=0"], "time_limit=0.0 must be a finite number greater than 0"),
    (["name=a/b"], "cannot name a folder"),
    (["train.steps=3"], "train: there is no such key"),
    (["attention=flash"], "attention: there is no such key"),
    (["device=cuda"], "device=cuda is not on this machine"),
])  # fmt: skip
def test_wrong_words(words, says, workdir, capsys):
    from bench import main
    from configs.cli import parse_config, run_main

    if words == ["device=cuda"] and torch.cuda.is_available():
        pytest.skip("there is one")
    try:
        code = run_main(main, parse_config("bench", "", words))
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr().err
    assert code == 2 and says in said and said.count("\n") == 1
    assert not (workdir / "runs").exists()


def test_a_bench_is_not_written_over(bench):
    bench("phases=[decode]", "backends=[naive]")
    before = Path("runs/bench/x/attention.csv").read_text()
    code, _, printed = bench("phases=[decode]", "backends=[naive]")
    assert code == 2 and "runs/bench/x is there already; set another name" in printed
    assert Path("runs/bench/x/attention.csv").read_text() == before


def test_shapes_are_the_models_unless_others_are_set():
    from configs.cli import parse_config

    shape = lambda *words: parse_config("bench", "", ["model=gpt2", *words]).kernel_shape()  # noqa: E731
    assert shape() == (12, 12, 64, 64)
    assert shape("model.n_kv_head=3") == (12, 3, 64, 64)
    assert shape("model.n_kv_head=3", "n_head=8") == (8, 8, 64, 64)
    assert shape("n_head=8", "n_kv_head=2", "head_size=16", "value_size=32") == (8, 2, 16, 32)


def test_every_column_is_documented_and_in_order():
    assert ",".join(field.name for field in fields(Timing)) == COLUMNS
    assert list(group_by_phase(lines(a={1: 1.0}))) == [("forward", "float32")]
