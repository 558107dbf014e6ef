"""Time attention backends side by side.

    python bench.py                        heads of the default model, in one minute
    python bench.py n_head=12 block_sizes=[256,1024,4096] phases=[forward,forward+backward]
    python bench.py 'backends=[naive,sdpa:math,flash,flex]' phases=[decode] block_sizes=[1024,4096]
    python bench.py device=cuda dtypes=[bfloat16] n_head=16 head_size=128 block_sizes=[1024,16384]

most used keys:
  backends=[A,B]        sdpa:KERNEL and flash:PACKAGE are more specific
  phases=[P,Q]          of forward, forward+backward, decode (one query)
  masks=[causal]        or window:256 (keys per query), documents:256 (tokens per document)
  block_sizes=[N,M]     context lengths in tokens
  batch_size=N          sequences per call
  n_head=N              also n_kv_head, head_size and value_size
  dtypes=[float32]      or bfloat16, float16
  rounds=N              each backend has one turn per round, of seconds=X; time_limit=X for a turn

The results are in runs/bench/NAME: attention.csv, attention.png, summary.json and a wandb run.
A sweep measures complete training steps: python train.py -m attention=naive,sdpa,flash
"""

if __name__ == "__main__":  # before the slow imports below, so that a typo is reported immediately
    from configs.cli import parse_config

    config = parse_config("bench", __doc__)

from dataclasses import asdict

from attention_bench.config import BENCHES, BenchConfig
from attention_bench.measure import kill_processes, list_cases, measure_group
from attention_bench.results import describe_case, find_fastest, plot_results, print_results
from common.console import print_text
from common.files import write_csv, write_json
from common.machine import describe_environment, resolve_device
from common.process import run_process
from common.run_paths import make_new_folder
from results.wandb import WandbExport
from training.run_folder import write_config


def main(config: BenchConfig) -> int:
    """Run a bench. Returns exit code 1 if a row failed, and 2 if all rows were refused."""
    export = WandbExport(vars(config.wandb))
    device = resolve_device(config.device)
    groups = list_cases(config, device)
    folder = BENCHES / (config.name or make_new_folder(BENCHES, device.type))
    folder.mkdir(parents=True, exist_ok=config.name is None)  # raises FileExistsError
    write_config(folder, asdict(config))
    environment = describe_environment(device)

    rows: list[dict] = []
    pools: dict = {}  # processes by backend
    status = "interrupted"
    try:
        for group in groups:
            print_text(describe_case(group[0]))
            rows += measure_group(group, config, pools)
            write_csv(rows, folder / "attention.csv")
        for pool in pools.values():
            pool.shutdown()  # a process that is killed leaves its locks in the system
        status = "finished"
    finally:
        kill_processes(pools)
        fastest = {describe_case(row): row["backend"] for row in find_fastest(rows)}
        summary = {"name": folder.name, "status": status, "fastest": fastest, **environment}
        write_json(folder / "summary.json", summary)
        if rows:
            plot_results(rows, environment, folder / "attention.png")
            print_results(rows)
            print_text(f"written  {folder / 'attention.csv'}  {folder / 'attention.png'}")
            with export:
                export.start(folder)
    statuses = {row["status"] for row in rows}
    if "failed" in statuses:
        return 1
    return 2 if statuses == {"refused"} else 0


if __name__ == "__main__":
    run_process(main, config)
