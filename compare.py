"""Compare finished runs: losses with intervals over seeds, divergence, step time, memory.

    python compare.py runs/a runs/b                       any runs; runs of one setting and several seeds become a row
    python compare.py runs/sweeps/cmp                     all jobs of a sweep
    python compare.py runs/sweeps/cmp runs/c --out figs   both, written into a folder of your choice

Prints a table and writes comparison.csv (every figure), comparison.md and comparison.png: into the sweep's folder
where it is of one sweep, otherwise into runs/comparison. The first setting is the one that the others are held against.
"""

import argparse
from pathlib import Path

from compare.runs.comparison import compare, default_out, show
from configs.cli import exit_fast, run_main


def main(flags: argparse.Namespace) -> int:
    out = flags.out or default_out(flags.folders)
    show(compare(flags.folders, out), out)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run, or a sweep of them")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write instead")
    exit_fast(run_main(main, parser.parse_args()))
