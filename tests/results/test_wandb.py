"""What wandb gets of runs, sweeps and benches, and that training continues if wandb fails."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, TINY, metrics, summary, wait_for_step
from run_helpers import train_in
from wandb_helpers import OfflineRun, read_offline_runs
from wandb_server import ServerRun, WandbServer, wandb_server

from results import wandb as exporter
from results.wandb import WandbExport, follow_rows, is_logged
from training.config import WandbConfig


@pytest.fixture
def server():
    with wandb_server() as server:
        yield server


def export(folder: Path, *words: str, **environment: str) -> str:
    """Export a folder by hand. Returns the output."""
    done = subprocess.run(
        [sys.executable, "-m", "results.wandb", folder, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


# A training run

WORDS = [
    "name=a", "wandb.mode=offline", "wandb.project=p", "wandb.tags=[x]", "wandb.group=g",
    "wandb.log_model=true", "eval.attention_maps=true",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a run that was exported while it was trained. Tests only read it."""
    folder = tmp_path_factory.mktemp("trained")
    train_in(folder, *WORDS)
    return folder


@pytest.fixture
def in_folder(folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def logged(folder) -> OfflineRun:
    return read_offline_runs(folder / "runs/a")["a"]


@pytest.mark.parametrize(
    ("key", "value"), [("job_type", "train"), ("project", "p"), ("run_group", "g"), ("tags", ["x"])]
)
def test_run_has_its_labels(logged, key, value):
    assert logged.run[key] == value


def test_config_is_nested_and_has_the_resolved_values(logged, in_folder):
    for key in ("dtype", "device", "device_name", "n_params", "versions", "command"):
        assert logged.config[key] == summary("a")[key]
    assert logged.config["model"]["n_layer"] == 2
    assert logged.config["data"]["path"] == "text.txt"
    attention = logged.config["attention"]
    assert (attention["requested"], attention["resolved"]) == ("auto", "flash")


def test_summary_has_the_results_which_the_config_lacks(logged, in_folder):
    for key in ("status", "step_ms", "overfitting", "mfu", "best_step", "last_val_loss"):
        assert logged.summary[key] == pytest.approx(summary("a")[key])
        assert key not in logged.config
    assert logged.summary["kernel"] == "flash"


def test_rows_are_those_of_metrics_jsonl(logged, in_folder):
    assert logged.steps == list(range(7))
    for row, expected in zip(logged.rows, metrics("a"), strict=True):
        numbers = {key: value for key, value in expected.items() if not isinstance(value, str)}
        assert numbers.items() <= row.items()


@pytest.mark.parametrize("key", ["train/loss", "val/loss", "val/bpb"])
def test_curves_are_over_the_step_and_their_summary_is_the_minimum(logged, in_folder, key):
    assert {logged.metrics[name]["step_metric"] for name in ("*", key)} == {"step"}
    smallest = min(row[key] for row in metrics("a") if key in row)
    assert logged.summary[key] == {"min": pytest.approx(smallest)}


def test_samples_are_tables(logged, in_folder):
    expected = [[row["step"], row["sample"]] for row in metrics("a") if "sample" in row]
    assert logged.read_table("sample") == expected


def test_attention_maps_are_pictures(logged, in_folder):
    paths = [row["attention_maps"] for row in metrics("a") if "attention_maps" in row]
    assert logged.read_media("attention_maps") == [Path("runs/a", p).read_bytes() for p in paths]


def test_best_weights_are_an_artifact_of_type_model(logged):
    (artifact,) = (entry for entry in logged.artifacts if entry["type"] == "model")
    assert artifact["manifest"]["contents"][0]["path"] == "best.pt"


def test_wandb_shows_the_command_of_the_training(logged, in_folder):
    (command,) = ([e["program"], *e.get("args", [])] for e in logged.environment if "program" in e)
    assert command == shlex.split(summary("a")["command"])[1:]


@pytest.mark.parametrize(
    ("mode", "environment", "is_started"),
    [(None, "disabled", False), ("disabled", "offline", False), ("offline", "disabled", True)],
)
def test_config_decides_before_the_environment(mode, environment, is_started, workdir, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", environment)
    with WandbExport({"mode": mode}) as export:
        export.start(workdir)
    assert (export.process is not None) == is_started


@pytest.mark.parametrize(
    ("key", "value"),
    [("MODE", "of"), ("PROJECT", "my/project"), ("PROJECT", "p" * 129), ("TAGS", "a," + "t" * 65)],
)
def test_environment_that_wandb_refuses_is_refused_before_training(key, value, train, monkeypatch):
    monkeypatch.setenv(f"WANDB_{key}", value)
    assert train("name=a", "wandb.mode=null" if key == "MODE" else "wandb.mode=offline") == 2
    assert not Path("runs").exists()


def test_dryrun_is_offline():
    assert WandbConfig().resolve({"WANDB_MODE": "dryrun"}).mode == "offline"


@pytest.mark.slow
def test_export_writes_below_the_run_only(train, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/proc")  # not writable
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    assert train("name=a", "wandb.mode=offline") == 0
    assert read_offline_runs(Path("runs/a"))["a"].steps == list(range(7))
    assert Path("runs/a/wandb/artifacts").exists()
    assert not Path("runs/a/.wandb-temporary").exists()


# Which rows are logged, and until when


@pytest.mark.parametrize("seconds", [0.0, 1e6])
@pytest.mark.parametrize(
    ("step", "expected"),
    [(1, True), (1999, True), (2001, False), (2002, True), (4002, False), (4004, True)],
)
def test_step_alone_decides_which_rows_are_logged(step, expected, seconds):
    assert is_logged({"step": step, "seconds": seconds}) == expected


def test_every_evaluation_is_logged():
    assert is_logged({"step": 10_001, "val/loss": 1.0})


@pytest.fixture
def running(tmp_path, monkeypatch) -> Path:
    """The folder of a run whose last row is incomplete. While it is waited for, the run ends."""

    def finish(seconds):
        with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write('": 1}\n{"step": 2}\n')
        write_files(tmp_path, **{"summary.json": {"status": "finished"}})

    rows = '{"step": 0}\n{"step'
    files = {"config.yaml": {}, "summary.json": {"status": "running"}, "metrics.jsonl": rows}
    write_files(tmp_path, **files)
    monkeypatch.setattr("time.sleep", finish)
    return tmp_path


def write_files(folder: Path, **files: str | dict) -> None:
    """Write texts and JSON, which YAML can also read."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")


def test_rows_are_followed_until_the_run_has_ended(running):
    assert [row["step"] for row in follow_rows(running, os.getppid())] == [0, 1, 2]


def test_export_by_hand_does_not_wait_for_rows(running):
    assert [row["step"] for row in follow_rows(running, None)] == [0]


def test_export_ends_with_the_process_that_trains(running, monkeypatch):
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit):
        list(follow_rows(running, os.getpid()))  # which is not the parent process


# A process that fails or hangs

# Packages that replace wandb, and the lines that report them.
FAILURES = {
    "missing": ("raise ModuleNotFoundError('wandb')", "wandb: ModuleNotFoundError('wandb')"),
    "refusing": ("def init(**arguments): raise TimeoutError", "wandb: TimeoutError()"),
    "ending": ("import os; os._exit(3)", "wandb did not finish (exit code 3)"),
    "hanging": ("import time; time.sleep(1000)", "wandb did not finish (exit code -9)"),
}


@pytest.fixture(params=FAILURES)
def broken_wandb(request, tmp_path_factory, monkeypatch) -> str:
    """Replaces wandb in new processes. Returns the line that reports it."""
    package, message = FAILURES[request.param]
    site = tmp_path_factory.mktemp("site")
    write_files(site, **{"wandb.py": package})
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(exporter, "FINISH_TIMEOUT_S", 1 if request.param == "hanging" else 60)
    return message


def test_training_continues_and_one_line_says_that_wandb_failed(broken_wandb, train, capfd):
    assert train("name=a", "wandb.mode=offline") == 0
    assert [row["step"] for row in metrics("a")] == list(range(7))
    assert summary("a")["status"] == "finished"
    lines = [line for line in capfd.readouterr().out.splitlines() if "wandb" in line]
    (line,) = [line for line in lines if "waiting" not in line]
    assert line.startswith(broken_wandb)


@pytest.mark.slow
@pytest.mark.parametrize("broken_wandb", ["hanging"], indirect=True)
def test_ctrl_c_while_a_finished_run_waits_for_wandb_only_ends_the_wait(broken_wandb, workdir):
    command = [sys.executable, "-u", ROOT / "train.py", *TINY, "name=a", "wandb.mode=offline"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        while not process.stdout.readline().startswith("waiting for wandb"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    assert (process.returncode, error) == (0, "")


# Runs that are killed and resumed. The server is the one of wandb_server.py.


def start_training(mode: str, server: WandbServer) -> subprocess.Popen:
    words = ["name=a", "train.steps=40", "checkpoint.every=10", "eval.every=1"]
    command = [sys.executable, ROOT / "train.py", *TINY, *words, f"wandb.mode={mode}"]
    environment = os.environ | server.environment
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def check_complete(run: ServerRun) -> None:
    """Check that the server has got each row of metrics.jsonl once."""
    expected = [(row["step"], row.get("val/loss")) for row in metrics("a")]
    assert [(row["_step"], row.get("val/loss")) for row in run.rows] == expected
    assert run.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("offline", "online")])
def test_killed_and_resumed_run_has_each_step_once(workdir, server, first, second):
    process = start_training(first, server)
    wait_for_step("a", 15, process)
    process.kill()
    process.communicate()
    process = start_training(second, server)
    printed, _ = process.communicate()
    assert "resumed from step" in printed
    if second == "offline":
        assert read_offline_runs(Path("runs/a"))["a"].steps == list(range(41))
        export(Path("runs/a"), "--mode", "online", **server.environment)
    (run,) = server.runs.values()
    check_complete(run)


@pytest.mark.slow
def test_rows_that_the_server_has_are_not_sent_again(trained, server):
    path = Path("runs/a/metrics.jsonl")
    rows = path.read_text(encoding="utf-8")
    for count in (4, 7):
        path.write_text("".join(rows.splitlines(keepends=True)[:count]), encoding="utf-8")
        printed = export(Path("runs/a"), "--mode", "online", **server.environment)
    (run,) = server.runs.values()
    check_complete(run)
    assert len(run.rows) == 7
    url = f"{server.environment['WANDB_BASE_URL']}/me/trilgpt/runs/{summary('a')['wandb_id']}"
    assert printed == f"wandb    {url}\n"


@pytest.mark.slow
def test_run_that_failed_sends_an_alert(trained, server):
    failed = summary("a") | {"status": "failed", "error": "the loss is nan"}
    write_files(Path("runs/a"), **{"summary.json": failed})
    export(Path("runs/a"), "--mode", "online", **server.environment)
    assert "the loss is nan" in str(server.alerts)
    (run,) = server.runs.values()
    assert run.exit_code == 1


# Benches and comparisons

PICTURE = ROOT / "docs/wandb.png"
BENCH = """\
backend,resolved,phase,mask,dtype,T,ms_median,error_y
naive,naive,forward,causal,float32,128,1.5,
flash,flash,forward,causal,float32,128,0.5,1e-07
flash,flash,decode,window:8,float32,512,2.5,2e-07
flash,,decode,window:8,float32,1024,,
cudnn,,forward,causal,float32,128,,
"""
COMPARISON = """\
variant,status,kernel,device_name,val_loss,val_loss_low,verdict,step_ms,peak_memory_bytes
attention=naive,2 finished,naive,A,1.5,1.4,,12.0,1048576
attention=flash,2 finished,flash,A,1.5,1.4,equal up to rounding,10.0,2097152
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> dict[str, OfflineRun]:
    """The runs of a bench, by name."""
    folder = tmp_path_factory.mktemp("bench") / "b"
    folder.mkdir()
    files = {
        "attention.csv": BENCH,
        "config.yaml": {"n_head": 2, "wandb": {}},
        "summary.json": {"fastest": {"forward, T = 128": "flash"}, "device": "cpu"},
    }
    write_files(folder, **files)
    shutil.copy(PICTURE, folder / "attention.png")
    export(folder)
    return read_offline_runs(folder)


@pytest.mark.slow
def test_bench_has_a_run_for_each_backend(bench):
    assert bench.keys() == {"naive", "flash", "cudnn"}
    run = bench["flash"]
    assert (run.run["job_type"], run.run["run_group"]) == ("bench", "b")
    assert "\nforward, T = 128: flash" in run.run["notes"]
    assert (run.config["n_head"], run.config["device"]) == (2, "cpu")
    assert run.config["attention"] == {"requested": "flash", "resolved": "flash"}


@pytest.mark.slow
def test_columns_of_a_bench_have_the_context_length_as_x_axis(bench):
    assert bench["flash"].metrics["*"]["step_metric"] == "T"
    first, second, *_ = bench["flash"].rows
    assert (first["T"], first["ms_median/forward_causal_float32"]) == (128, 0.5)
    assert (second["T"], second["error_y/decode_window_8_float32"]) == (512, 2e-7)


@pytest.mark.slow
def test_bench_has_its_table_and_its_picture(bench):
    assert [row[5] for row in bench["flash"].read_table("table")] == [128, 512, 1024]
    assert bench["flash"].read_media("picture") == [PICTURE.read_bytes()]


@pytest.mark.slow
def test_sweep_has_its_runs_and_their_comparison(trained):
    sweep = Path("runs/sweeps/s")
    sweep.mkdir(parents=True)
    Path("runs/a").rename(sweep / "seed=1")
    write_files(
        sweep,
        **{
            "sweep.json": {"jobs": ["seed=1"]},
            "comparison.csv": COMPARISON,
            "comparison.json": {
                "runs": ["seed=1"],
                "sentences": ["flash is faster", "naive is the baseline"],
            },
        },
    )
    shutil.copy(PICTURE, sweep / "comparison.png")
    for _ in range(2):
        printed = export(sweep)
    assert printed == "upload   wandb sync runs/sweeps/s/wandb\n"
    runs = read_offline_runs(sweep)
    assert {name: run.run["job_type"] for name, run in runs.items()} == {
        "seed=1": "train",
        "s comparison": "compare",
    }
    comparison = runs["s comparison"]
    assert not any("/" in key for row in comparison.rows for key in row)
    assert comparison.run["run_group"] == "s"
    notes = comparison.run["notes"].splitlines()
    assert notes[:2] == ["flash is faster", "naive is the baseline"]
    assert notes[3].startswith("variant attention=flash; kernel flash; val loss 1.5000; step")
    assert "memory 2 MiB; status 2 finished; verdict equal up to rounding" in notes[3]
    assert comparison.summary["step_ms/attention_flash"] == 10
    assert comparison.summary["verdict/attention_flash"] == "equal up to rounding"
    assert comparison.read_table("table")[1][0] == "attention=flash"
    assert {"2 MiB", "equal up to rounding"} <= {*comparison.read_table("table")[1]}
    assert comparison.read_media("picture") == [PICTURE.read_bytes()]


def test_folder_without_results_is_refused(workdir):
    (workdir / "runs").mkdir()
    command = [sys.executable, "-m", "results.wandb", "runs"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert done.returncode == 2
    assert "set runs/NAME" in done.stderr.splitlines()[-1]


def write_compared(folder: Path, *sections: dict) -> Path:
    """Write runs with these sections wandb, and a comparison of them."""
    for number, section in enumerate(sections):
        run = folder / f"runs/{number}"
        run.mkdir(parents=True)
        write_files(run, **{"config.yaml": {"wandb": section}})
    comparison = folder / "runs/comparison"
    comparison.mkdir(parents=True)
    runs = [f"../{number}" for number in range(len(sections))]
    write_files(comparison, **{"comparison.json": {"runs": runs}, "comparison.csv": COMPARISON})
    shutil.copy(PICTURE, comparison / "comparison.png")
    return comparison


@pytest.mark.slow
def test_output_of_compare_has_the_labels_of_its_runs(workdir):
    folder = write_compared(workdir, {"project": "p", "entity": "e", "tags": ["x"], "group": "g"})
    export(folder)
    run = read_offline_runs(folder)["comparison"].run
    labels = {key: run[key] for key in ("project", "entity", "tags", "run_group")}
    assert labels == {"project": "p", "entity": "e", "tags": ["x"], "run_group": "g"}


def test_comparison_has_the_labels_of_the_first_run_that_was_not_removed(workdir):
    folder = write_compared(workdir, {"project": "p"}, {"project": "q"})
    for number, project in enumerate("pq"):
        config, _ = exporter.read_run(folder)
        assert config == {"wandb": {"project": project}}
        shutil.rmtree(workdir / f"runs/{number}")
    assert exporter.read_run(folder) == ({}, {})


def test_comparison_whose_first_run_was_refused_has_the_labels_of_the_next(workdir):
    folder = write_compared(workdir, {"project": "p"}, {"project": "q"})
    write_files(workdir / "runs/0", **{"summary.json": {"status": "refused"}})
    write_files(workdir / "runs/1", **{"summary.json": {"wandb_id": "b"}})
    assert exporter.read_run(folder) == ({"wandb": {"project": "q"}}, {"wandb_id": "b"})


def test_run_that_was_refused_after_its_start_can_be_exported(workdir):
    write_compared(workdir, {"project": "p"})
    write_files(workdir / "runs/0", **{"summary.json": {"status": "refused"}})
    config, summary = exporter.read_run(workdir / "runs/0")
    assert (config["wandb"], summary) == ({"project": "p"}, {"status": "refused"})


def test_comparison_without_a_list_of_runs_is_exported(workdir):
    folder = write_compared(workdir)
    (folder / "comparison.json").unlink()  # which earlier versions have not written
    assert exporter.read_run(folder) == ({}, {})


@pytest.mark.slow
def test_columns_of_metrics_are_not_in_the_config(folder, workdir):
    shutil.copytree(folder, workdir, dirs_exist_ok=True)
    export("runs/a")
    config = read_offline_runs(workdir / "runs/a")["a"].config
    assert not {"lr", "grad_norm", "error", "last_val_loss"} & config.keys()
    assert config["n_params"] == summary("a")["n_params"]
