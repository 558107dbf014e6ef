"""Time attention backends side by side: attention alone, and complete training steps.

    python bench.py                        the default model's attention, in one to two minutes
    python bench.py model=gpt2 phases=[forward,forward+backward] block_sizes=[256,1024,4096]
    python bench.py 'backends=[naive,sdpa:math,flash,flex]' phases=[decode] block_sizes=[1024,4096]
    python bench.py device=cuda dtypes=[bfloat16] n_head=16 head_size=128 block_sizes=[1024,16384]

most used keys:
  backends=[A,B]        the first is the baseline; sdpa:KERNEL and flash:PACKAGE are more specific
  phases=[P,Q]          of forward, forward+backward, decode (one query), step (a training step)
  masks=[causal]        or window:256 (keys per query), documents:256 (tokens per document)
  block_sizes=[N,M]     context lengths in tokens
  batch_size=N          sequences per call
  n_head=N              heads of attention alone; also n_kv_head, head_size and value_size
  model.n_layer=N       the model of phase step, with the other model keys
  dtypes=[float32]      or bfloat16, float16
  rounds=N              each backend has one turn per round, of seconds=X; time_limit=X for a turn

The results are in runs/bench/NAME: attention.csv, attention.png, summary.json and a wandb run.
"""

if __name__ == "__main__":  # before the slow imports below, so that a typo is reported immediately
    from configs.cli import parse_config

    config = parse_config("bench", __doc__)

from dataclasses import asdict, replace

from attention_bench.cases import build_groups
from attention_bench.config import BENCHES, BenchConfig
from attention_bench.plot import plot_results
from attention_bench.results import FAILED, REFUSED, Timing, recommend
from attention_bench.runner import measure_groups
from attention_bench.table import describe_bench, print_results
from attention_bench.wandb_runs import make_bench_runs
from common.console import print_text
from common.files import write_json
from common.machine import describe_environment, resolve_device
from common.process import run_process
from common.run_paths import make_new_folder
from training.run_folder import write_config
from training.runtime import resolve_compile
from training.wandb_logger import WandbLogger


def main(config: BenchConfig) -> int:
    """Run a bench. Returns exit code 1 if a row failed, and 2 if all rows were refused."""
    device = resolve_device(config.device)
    groups = build_groups(config, device)
    config = replace(config, compile=resolve_compile(config.compile, device))
    folder = BENCHES / (
        config.name or make_new_folder(BENCHES, f"{device.type}-{config.model.name}")
    )
    if config.name is not None:
        folder.mkdir(parents=True)  # raises FileExistsError
    write_config(folder, asdict(config))
    environment = describe_environment(device)
    title = describe_bench(config, environment)
    print_text(f"bench    {folder}: {', '.join(case.name for case in groups[0])}")
    print_text(title)

    rows: list[Timing] = []
    status = "finished"
    try:
        measure_groups(groups, config, folder / "attention.csv", rows)
    except KeyboardInterrupt:
        status = "interrupted"
    results = {"name": folder.name, "status": status, "rows": len(rows), "answer": recommend(rows)}
    write_json(folder / "summary.json", results | environment)
    if rows:
        picture = folder / "attention.png"
        plot_results(rows, picture, title)
        print_results(rows, folder)
        runs = make_bench_runs(rows, config, environment, folder)
        WandbLogger(config.wandb, runs).finish()
    if status == "interrupted":
        raise KeyboardInterrupt(f"stopped after {len(rows)} rows, which are in {folder}")
    statuses = {row.status for row in rows}
    if FAILED in statuses:
        return 1
    return 2 if statuses == {REFUSED} else 0


if __name__ == "__main__":
    run_process(main, config)
