"""Compare finished runs: losses with confidence intervals, divergence, step time and memory.

    python compare.py runs/a runs/b             runs; those that differ only in the seed are one row
    python compare.py runs/sweeps/cmp           all runs of a sweep
    python compare.py sweeps/cmp c out=figs     both; the folder runs/ may be omitted
    python compare.py                           the verdicts of all sweeps in runs/sweeps

keys:
  out=DIR               folder to write the files into
  difference=0.01       a relative difference of losses that counts as none

Prints a table, and writes comparison.png and comparison.csv. The default folder is the
folder of a single sweep, else runs/comparison. The first row is the baseline of all differences.
"""

if __name__ == "__main__":  # before the slow imports below, so that a typo is reported immediately
    from configs.cli import parse_config

    config = parse_config("compare", __doc__)

import os
from pathlib import Path

from common.process import run_process
from common.run_paths import RUNS, SWEEPS
from configs.schema import CompareConfig
from results.compare import compare, print_comparison, print_history
from results.read import is_sweep


def main(config: CompareConfig) -> int:
    """Compare the runs, write the files, and print the table. Returns exit code 0.

    Without runs, print the verdicts of all sweeps.
    """
    if not config.folders:
        print_history(SWEEPS)
        return 0
    folders = [
        RUNS / name if (RUNS / name).is_dir() else Path(os.path.expanduser(name))
        for name in config.folders
    ]
    out = RUNS / "comparison"
    if config.out is not None:
        out = Path(os.path.expanduser(config.out))
    elif len(folders) == 1 and is_sweep(folders[0]):
        out = folders[0]
    rows = compare(folders, out, config.difference)
    print_comparison(rows, out)
    return 0


if __name__ == "__main__":
    run_process(main, config)
