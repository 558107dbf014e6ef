"""Which attention should I use here? Kernels, and whole training steps with them, timed side by side.

    python bench.py                                       the default model's attention, in a minute and a half
    python bench.py model=gpt2 phases=[forward,forward+backward] block_sizes=[256,1024,4096]
    python bench.py 'backends=[naive,sdpa:math,flash,flex]' phases=[forward,decode] block_sizes=[1024,4096]
    python bench.py device=cuda dtypes=[bfloat16] n_head=16 head_size=128 block_sizes=[1024,4096,16384]

the keys most used:
  backends=[A,B]        what to compare, the others with the first; sdpa:KERNEL and flash:IMPL are possible too
  phases=[P,Q]          of forward, forward+backward, decode (one query on T keys) and step (a whole training step)
  block_sizes=[N,M]     contexts, in tokens
  batch_size=N          sequences
  n_head=N              with n_kv_head, head_size and value_size: shapes other than the model's, of attention alone
  model.n_layer=N       and the like: the model whose steps are timed
  dtypes=[float32]      or bfloat16, float16
  rounds=N              how often the backends take turns; seconds=X how long each turn lasts
  time_limit=SECONDS    after which a row is given up

Everything lies in runs/bench/NAME: attention.csv, attention.png, summary.json and a wandb run.
"""

if __name__ == "__main__":  # ahead of the imports below, which take seconds: a wrong word is answered at once
    from configs.cli import parse_config

    config = parse_config("bench", __doc__)

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from common import system
from common.errors import UserError
from common.interrupt import sigterm_as_keyboard_interrupt
from common.run_dir import BENCHES, make_new_folder, write_config, write_summary
from compare.bench.cases import BenchSettings, Case
from compare.bench.plot import draw
from compare.bench.progress import BenchProgress
from compare.bench.results import FINISHED, Timing, TimingsFile, number, recommendation
from compare.bench.runner import BenchGroup, measure_matmul_peak, run_group
from compare.bench.table import show, where
from configs.cli import exit_fast
from configs.cli import run_main as run_main
from configs.schema import Bench
from model.attention import BACKENDS, all_variants
from training.device import DTYPES, resolve_compile, resolve_device, resolve_dtype
from training.wandb_logger import log_table_to_wandb


def main(config: Bench) -> int:
    device = resolve_device(config.device)
    contests = list_contests(config, device)
    settings = BenchSettings(
        config.model, config.optimizer, config.vocab_size, resolve_compile(config.compile, device),
        config.tf32, config.seed, config.rounds, config.repeats, config.seconds, config.time_limit,
    )  # fmt: skip
    folder = claim(config.name, f"{device.type}-{config.model.name}")
    facts = system.describe_environment(device)
    summary = {"name": folder.name, "status": "running"} | facts
    write_config(folder, asdict(config))
    write_summary(folder, summary)
    print(f"bench    {folder}: {', '.join(contests[0].cases)}\nruns on  {facts['device_name']}", flush=True)

    rows, ended = [], "failed"
    try:
        with sigterm_as_keyboard_interrupt(), TimingsFile(folder / "attention.csv") as file, empty_compile_cache():
            measure(contests, settings, lambda row: (rows.append(row), file.write(row)))
        ended = "finished"
    except KeyboardInterrupt:
        ended = "interrupted"
        if not rows:
            shutil.rmtree(folder)  # nothing is lost with it, and the name is free again
            raise KeyboardInterrupt("stopped before the first row") from None
        print("stopped; drawing what there is", flush=True)
    finally:
        if folder.exists():
            write_summary(folder, summary | {"status": ended, "rows": len(rows), "answer": recommendation(rows)})
    picture = folder / "attention.png"
    draw(rows, picture, title(config, rows[0], facts))
    log_table_to_wandb(
        config.wandb, "attention", folder.name, config.wandb.group, rows, picture, asdict(config) | facts
    )
    show(rows, folder)
    if ended == "interrupted":
        raise KeyboardInterrupt(f"stopped after {len(rows)} rows, which are in {folder}")
    statuses = {row.status for row in rows}
    return 1 if "failed" in statuses else 2 if statuses == {"refused"} else 0


def measure(contests: list[BenchGroup], settings: BenchSettings, take: Callable[[Timing], None]) -> None:
    """Hold all contests; `take` is given their rows, a contest at a time."""
    cases = {contest.dtype: next(iter(contest.cases.values())) for contest in contests}
    peaks = {dtype: measure_matmul_peak(case, settings) for dtype, case in cases.items()}
    seconds = [contest.seconds(settings, peaks[contest.dtype]) for contest in contests]
    given_up: dict[tuple, int] = {}
    with BenchProgress([str(contest) for contest in contests], seconds) as progress:
        for contest in contests:
            rows = [Timing(**row) for row in run_group(contest, settings, given_up, progress.advance)]
            for row in rows:
                take(row)
            took = [number(row.ms_median) if row.status == FINISHED else row.status for row in rows]
            progress.end("ms: " + ", ".join(f"{row.backend} {ms}" for row, ms in zip(rows, took, strict=True)))


@contextmanager
def empty_compile_cache() -> Iterator[None]:
    """For processes that are started inside: compiling is measured, and what was compiled another day would hide it."""
    key = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(key)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[key] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[key]
            else:
                os.environ[key] = before


def title(config: Bench, row: Timing, facts: dict) -> str:
    """What was measured, and where, for the picture."""
    parts = []
    if set(config.phases) != {"step"}:
        parts.append(f"attention: {where(row)}")
    if "step" in config.phases:
        parts.append(f"steps: {config.batch_size} x {config.model.name}, {config.optimizer.name}")
    machine = f"{facts['device_name']}, {facts['threads']} threads, torch {facts['versions']['torch']}"
    return "; ".join([*parts, machine])


def list_contests(config: Bench, device: torch.device) -> list[BenchGroup]:
    """Everything to measure: kernels first, each from short contexts to long ones. Raises UserError."""
    known = all_variants()
    here = [name for name, each in BACKENDS.items() if device.type in each.on and each.on[device.type].gradients]
    backends = here if config.backends is None else config.backends
    dtypes = DTYPES | {"auto": resolve_dtype("auto", device)}
    for key, names, choices in (("backends", backends, known), ("dtypes", config.dtypes, dtypes)):
        for name in names:
            if name not in choices:
                raise UserError(f"{key}: {name} is unknown; set some of {', '.join(choices)}")
    model = config.model
    of_model = (model.n_head, model.kv_heads, model.head_dim, model.head_dim)
    contests = []
    for dtype in dict.fromkeys(dtypes[name] for name in config.dtypes):
        for phase in config.phases:
            H, G, D, Dv = of_model if phase == "step" else config.kernel_shape()
            for T in sorted(config.block_sizes):
                cases = {
                    name: Case(known[name], phase, device, dtype, config.batch_size, T, H, G, D, Dv)
                    for name in backends
                }
                contests.append(BenchGroup(phase, str(dtype).removeprefix("torch."), T, cases))
    return contests


def claim(name: str | None, label: str) -> Path:
    """Make the folder of a bench. Raises UserError where something of this name is there."""
    if name is None:
        return BENCHES / make_new_folder(BENCHES, label)
    folder = BENCHES / name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{folder} is there already; set another name") from None
    return folder


if __name__ == "__main__":
    exit_fast(run_main(main, config))
