"""Compare finished runs: losses with confidence intervals over seeds, divergence, step time, memory.

    python compare.py runs/a runs/b                       any runs; runs that differ only in the seed become one row
    python compare.py runs/sweeps/cmp                     all runs of a sweep
    python compare.py runs/sweeps/cmp runs/c --out figs   both; the files go to another folder

Prints a table, and writes comparison.csv (all statistics), comparison.md and comparison.png. The files of a single
sweep are written into its folder, all others into runs/comparison. Differences are relative to the first setting.
"""

if __name__ == "__main__":  # before the slow imports below
    from configs.cli import start_process

    start_process()

import argparse
from pathlib import Path

from common.errors import UserError
from compare.runs.comparison import choose_out_folder, compare, print_comparison
from configs.cli import run_process


def main(flags: argparse.Namespace) -> int:
    if flags.out == "":
        raise UserError("--out is empty; set a folder")
    out = Path(flags.out or choose_out_folder(flags.folders))
    print_comparison(compare(flags.folders, out), out)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="folder of a run or of a sweep")
    parser.add_argument("--out", metavar="DIR", help="folder to write the files into")
    run_process(main, parser.parse_args())
