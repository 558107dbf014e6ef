"""Times attention backends side by side: attention alone, and complete training steps.

    python bench.py                                       the default model's attention, in one to two minutes
    python bench.py model=gpt2 phases=[forward,forward+backward] block_sizes=[256,1024,4096]
    python bench.py 'backends=[naive,sdpa:math,flash,flex]' phases=[forward,decode] block_sizes=[1024,4096]
    python bench.py device=cuda dtypes=[bfloat16] n_head=16 head_size=128 block_sizes=[1024,4096,16384]

most used keys:
  backends=[A,B]        the first is the baseline; sdpa:KERNEL and flash:IMPL select a kernel
  phases=[P,Q]          some of forward, forward+backward, decode (one query on T keys) and step (a training step)
  block_sizes=[N,M]     context lengths in tokens
  batch_size=N          sequences per call
  n_head=N              shape of attention alone, with n_kv_head, head_size and value_size; default: the model's
  model.n_layer=N       the model of phase step, with the other model keys
  dtypes=[float32]      or bfloat16, float16
  rounds=N              each backend has one turn per round; seconds=X is the duration of a turn
  time_limit=SECONDS    for all turns of a row

The results are in runs/bench/NAME: attention.csv, attention.png, summary.json and a wandb run.
"""

if __name__ == "__main__":  # parsed before the slow imports below, so that a wrong key is reported immediately
    from configs.cli import parse_config

    config = parse_config("bench", __doc__)

import itertools
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from common import system
from common.console import ProgressBar, format_number, pluralize
from common.errors import UserError
from common.interrupt import sigterm_as_keyboard_interrupt
from common.run_dir import BENCHES, make_new_folder, write_config, write_summary
from compare.bench.cases import BenchSettings, Case
from compare.bench.plot import plot_results
from compare.bench.results import Timing, append_row, recommend
from compare.bench.runner import estimate_seconds, start_runner
from compare.bench.table import describe_shapes, print_results
from configs.cli import exit_fast, run_main
from configs.schema import Bench
from model.attention import BACKENDS, AttentionRequest, all_variants
from training.device import DTYPES, resolve_compile, resolve_device, resolve_dtype
from training.wandb_logger import log_table_to_wandb


def main(config: Bench) -> int:
    device = resolve_device(config.device)
    groups = build_groups(config, device)
    settings = BenchSettings(
        model=config.model,
        optimizer=config.optimizer,
        vocab_size=config.vocab_size,
        compile=resolve_compile(config.compile, device),
        tf32=config.tf32,
        seed=config.seed,
        rounds=config.rounds,
        repeats=config.repeats,
        seconds=config.seconds,
        time_limit=config.time_limit,
    )
    folder = make_bench_folder(config.name, f"{device.type}-{config.model.name}")
    environment = system.describe_environment(device)
    summary = {"name": folder.name, "status": "running"} | environment
    write_config(folder, asdict(config))
    write_summary(folder, summary)
    print(
        f"bench    {folder}: {', '.join(case.name for case in groups[0])}\nruns on  {environment['device_name']}",
        flush=True,
    )

    rows: list[Timing] = []

    def save_row(row: Timing) -> None:
        append_row(folder / "attention.csv", row)
        rows.append(row)

    status = "failed"
    try:
        with sigterm_as_keyboard_interrupt():
            measure_groups(groups, settings, save_row)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        if not rows:
            shutil.rmtree(folder)
            raise KeyboardInterrupt("stopped before the first row") from None
        print("stopped; plotting the finished rows", flush=True)
    finally:
        if folder.exists():
            write_summary(folder, summary | {"status": status, "rows": len(rows), "answer": recommend(rows)})
    picture = folder / "attention.png"
    plot_results(rows, picture, describe_bench(config, rows[0], environment))
    log_table_to_wandb(
        config.wandb, "attention", folder.name, config.wandb.group, rows, picture, asdict(config) | environment
    )
    print_results(rows, folder)
    if status == "interrupted":
        raise KeyboardInterrupt(f"stopped after {len(rows)} rows, which are in {folder}")
    statuses = {row.status for row in rows}
    return 1 if "failed" in statuses else 2 if statuses == {"refused"} else 0


def build_groups(config: Bench, device: torch.device) -> list[list[Case]]:
    """List all cases: one group per dtype, phase and T, from short contexts to long ones. Raises UserError."""
    variants = all_variants()
    backends = config.backends
    if backends is None:
        backends = [
            name
            for name, backend in BACKENDS.items()
            if device.type in backend.on and backend.on[device.type].gradients
        ]
    dtypes = DTYPES | {"auto": resolve_dtype("auto", device)}
    for key, names, choices in (("backends", backends, variants), ("dtypes", config.dtypes, dtypes)):
        for name in names:
            if name not in choices:
                raise UserError(f"{key}: {name} is unknown; set one or more of {', '.join(choices)}")
    groups = []
    for dtype, phase, T in itertools.product(
        dict.fromkeys(dtypes[name] for name in config.dtypes), config.phases, sorted(config.block_sizes)
    ):
        H, G, D, Dv = config.kernel_shape()
        if phase == "step":
            H, G, D, Dv = config.model.n_head, config.model.kv_heads, config.model.head_dim, config.model.head_dim
        request = AttentionRequest(
            B=config.batch_size,
            Tq=1 if phase == "decode" else T,
            Tk=T,
            H=H,
            G=G,
            D=D,
            Dv=Dv,
            dtype=dtype,
            device=device,
            grad=phase in ("forward+backward", "step"),
        )
        groups.append([Case(name, variants[name], phase, request) for name in backends])
    return groups


def make_bench_folder(name: str | None, label: str) -> Path:
    """Create the folder of a bench in runs/bench/. Raises UserError if the name is taken."""
    if name is None:
        return BENCHES / make_new_folder(BENCHES, label)
    folder = BENCHES / name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{folder} exists; set another name") from None
    return folder


def measure_groups(groups: list[list[Case]], settings: BenchSettings, save_row: Callable[[Timing], None]) -> None:
    """Measure all groups, with a progress bar."""
    backends = [case.name for case in groups[0]]
    with start_runner(settings, backends) as runner, ProgressBar() as progress:
        first_cases = {group[0].dtype_name: group[0] for group in groups}
        peaks = {dtype: runner.measure_peak_flops(case) for dtype, case in first_cases.items()}
        estimates = [estimate_seconds(group, settings, peaks[group[0].dtype_name]) for group in groups]
        progress.restart(sum(estimates))
        width = max(len(str(group[0])) for group in groups)
        for index, group in enumerate(groups):
            label, done, estimate = f"{group[0]!s:<{width}}", sum(estimates[:index]), estimates[index]
            show_progress = lambda part: progress.update(done + part * estimate, label)  # noqa: B023, E731
            rows = runner.run_group(group, show_progress)
            for row in rows:
                save_row(row)
            times = [f"{row.backend} {format_number(row.ms_median) if row.is_finished else row.status}" for row in rows]
            progress.print(f"{label}  ms: {', '.join(times)}")


def describe_bench(config: Bench, row: Timing, environment: dict) -> str:
    """Compose the title of the plot: shapes, model and machine."""
    parts = []
    if set(config.phases) != {"step"}:
        parts.append(f"attention: {describe_shapes(row)}")
    if "step" in config.phases:
        sequences = pluralize(config.batch_size, "sequence")
        parts.append(f"training step: model={config.model.name}, optimizer={config.optimizer.name}, {sequences}")
    machine = (
        f"{environment['device_name']}, {environment['threads']} threads, torch {environment['versions']['torch']}"
    )
    return "; ".join([*parts, machine])


if __name__ == "__main__":
    exit_fast(run_main(main, config))
