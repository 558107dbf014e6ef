"""Simulates sweeps with seed=auto: wrong verdicts, power, and the number of seeds until a verdict.

    python benchmarks/sweep_verdicts.py
    python benchmarks/sweep_verdicts.py --runs runs/sweeps/mine      also noise of real runs

A simulated sweep draws the differences of the validation losses of pairs of runs, relative to the loss. After each
seed, it asks results/statistics.py for the interval and the verdict. A setting stops when it has one, as in
sweep/launch.py. The noise s is the standard deviation of a difference. Positive differences are worse.

seed=auto is compared with two other procedures. "n seeds" looks once, at Student's t interval. "repeated t" looks after
each seed, at a t interval whose level is so small that 5 % of the sweeps without a difference end with a wrong verdict.
Simulations find this level. It is for at most MAX_SEEDS seeds. All procedures share the error rate among settings.

The exit code is 1 if seed=auto is wrong in more than 5 % of the sweeps with normally distributed noise, by more than
chance explains.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from rich.table import Table
from scipy.special import stdtr, stdtrit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.console import PlainConsole, make_table, pluralize  # noqa: E402
from results import statistics  # noqa: E402
from results.metrics import Value  # noqa: E402
from results.read import Run, Variant, read_variants  # noqa: E402
from results.statistics import (  # noqa: E402
    ERROR_RATE,
    compare_losses,
    estimate_difference,
    find_pairs,
    judge,
)
from training.config import SweepConfig  # noqa: E402

NEGLIGIBLE = SweepConfig.difference
MAX_SEEDS = SweepConfig.max_seeds
SWEEPS = 2000
NUM_SETTINGS = (1, 3, 10)  # besides the baseline
DIFFERENCES = (0.0, 0.005, 0.01, 0.02)
NOISE = (0.0015, 0.003, 0.006, 0.01)
EFFECT_VARIANCES = (1.0, 4.0, 8.0, 16.0, 64.0)
LEVEL_SEQUENCES = 400_000  # simulated for the level of "repeated t"
UNDECIDED = "undecided"
EQUIVALENT = f"no difference above {100 * NEGLIGIBLE:g} %"

# judge needs configs that train differently
BASELINE = Variant([Run(Path(), {"model.window": None}, 1, {}, None, NEGLIGIBLE)])
SETTING = Variant([Run(Path(), {"model.window": 32}, 1, {}, None, NEGLIGIBLE)])

# draw(generator, shape) -> numbers of mean 0 and standard deviation 1
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


@dataclass
class Procedure:
    """How a sweep decides: it looks at an interval after some numbers of seeds."""

    name: str
    estimate: Callable[[Sequence[float]], Value]
    looks: Sequence[int]

    def decide(self, differences: Sequence[float]) -> tuple[str, int]:
        """Returns the verdict on a setting, and its number of seeds."""
        for num_seeds in self.looks:
            difference = self.estimate(differences[:num_seeds])
            verdict = judge(SETTING, BASELINE, difference, {1: 1.0}, NEGLIGIBLE)
            if verdict != UNDECIDED:
                break
        return verdict, num_seeds

    def simulate(self, sequences: np.ndarray) -> tuple[list[str], list[int]]:
        """Decide on each row of (N, seeds). Returns N verdicts, and N numbers of seeds."""
        verdicts, seeds = zip(*(self.decide(row) for row in sequences.tolist()), strict=True)
        return list(verdicts), list(seeds)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, nargs="+", default=[], help="sweeps whose settings have many seeds"
    )
    arguments = parser.parse_args()
    noises: dict[str, Draw] = {
        "normal": draw_normal,
        "t (3 df)": draw_student_t,
        "two clusters": draw_clusters,
    }
    if arguments.runs:
        values = read_differences(arguments.runs)
        print(f"{len(values)} differences of real runs, excess kurtosis {kurtosis(values):.2f}")
        noises["real runs"] = partial(draw_from, values)
    is_right = print_false_verdicts(noises)
    print_false_equivalence()
    for num_settings in NUM_SETTINGS[:2]:
        print_power(num_settings)
    print_effect_variances()
    print_widths()
    return int(not is_right)


# Noise


def draw_normal(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.normal(size=shape)


def draw_student_t(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.standard_t(3, size=shape) / math.sqrt(3)


def draw_clusters(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw numbers near -1 or 1, as if a part of the runs learned something that others do not."""
    centers = generator.choice([-1.0, 1.0], size=shape)
    return (centers + generator.normal(0.0, 0.2, size=shape)) / math.sqrt(1.04)


def draw_from(
    values: np.ndarray, generator: np.random.Generator, shape: tuple[int, ...]
) -> np.ndarray:
    return generator.choice(values, size=shape)


def read_differences(folders: list[Path]) -> np.ndarray:
    """Differences of real pairs of runs, scaled to mean 0 and standard deviation 1.

    Each setting is compared with each other one, and each comparison is scaled for itself.
    """
    scaled = []
    for variant, other in itertools.combinations(read_variants(folders), 2):
        differences = np.array(compare_losses(find_pairs(variant, other)))
        if len(differences) > 2:
            scaled.append((differences - differences.mean()) / differences.std())
    if not scaled:
        raise SystemExit("no two settings have three seeds in common")
    return np.concatenate(scaled)


def kurtosis(values: np.ndarray) -> float:
    """Excess kurtosis of numbers with mean 0 and standard deviation 1. Normal numbers have 0."""
    return float(np.mean(values**4)) - 3


def draw_sweeps(draw: Draw, num_settings: int, num_seeds: int, is_shared: bool) -> np.ndarray:
    """Draw differences (SWEEPS, settings, seeds) of mean 0 and standard deviation 1.

    is_shared: the baseline has half of their variance, so that their correlation is 0.5.
    """
    generator = np.random.default_rng(1)
    noise = draw(generator, (SWEEPS, num_settings, num_seeds))
    if not is_shared:
        return noise
    baseline = draw(generator, (SWEEPS, 1, num_seeds))
    return (noise - baseline) / math.sqrt(2)


# Procedures


def estimate_t(values: Sequence[float], level: float) -> Value:
    """Mean with Student's t interval, which excludes the true mean with the probability `level`."""
    mean = math.fsum(values) / len(values)
    quantile = stdtrit(len(values) - 1, 1 - level / 2)
    margin = float(quantile * np.std(values, ddof=1)) / math.sqrt(len(values))
    return Value(mean, mean - margin, mean + margin)


@cache
def smallest_p_values(max_seeds: int) -> np.ndarray:
    """The smallest p-value of t tests after 2, 3, ..., max_seeds seeds, in simulated sequences."""
    generator = np.random.default_rng(2)
    sequences = generator.normal(size=(LEVEL_SEQUENCES, max_seeds))
    smallest = np.ones(LEVEL_SEQUENCES)
    for num_seeds in range(2, max_seeds + 1):
        values = sequences[:, :num_seeds]
        t = values.mean(axis=1) / values.std(axis=1, ddof=1) * math.sqrt(num_seeds)
        smallest = np.minimum(smallest, 2 * stdtr(num_seeds - 1, -abs(t)))
    return smallest


def list_procedures(num_settings: int) -> list[Procedure]:
    error_rate = ERROR_RATE / num_settings
    repeated_level = float(np.quantile(smallest_p_values(MAX_SEEDS), error_rate))
    looks = range(2, MAX_SEEDS + 1)
    automatic = partial(estimate_difference, num_comparisons=num_settings)
    return [
        Procedure("seed=auto", automatic, looks),
        Procedure("repeated t", partial(estimate_t, level=repeated_level), looks),
        *(
            Procedure(f"{count} seeds", partial(estimate_t, level=error_rate), [count])
            for count in (3, 5, 10)
        ),
    ]


# Tables


def print_false_verdicts(noises: dict[str, Draw]) -> bool:
    """Print how many sweeps without a difference have a setting that is better or worse.

    Returns whether seed=auto has at most the error rate with normal noise, but for chance.
    """
    table = make_table("noise", "settings", "max_seeds", "shared", "independent", "repeated t")
    chance = 4 * math.sqrt(ERROR_RATE * (1 - ERROR_RATE) / SWEEPS)
    is_right = True
    cases = [(name, count, MAX_SEEDS) for name in noises for count in NUM_SETTINGS]
    for name, num_settings, max_seeds in [*cases, *((name, 1, 100) for name in noises)]:
        automatic, repeated, *_ = list_procedures(num_settings)
        automatic.looks = repeated.looks = range(2, max_seeds + 1)
        shared, independent = (
            draw_sweeps(noises[name], num_settings, max_seeds, is_shared)
            for is_shared in (True, False)
        )
        rates = [
            rate_of_wrong_sweeps(automatic, shared),
            rate_of_wrong_sweeps(automatic, independent),
            rate_of_wrong_sweeps(repeated, independent),
        ]
        table.add_row(name, f"{num_settings}", f"{max_seeds}", *map(format_percent, rates))
        if name == "normal":
            is_right &= max(rates[:2]) <= ERROR_RATE + chance
    show("Sweeps without a difference that have a wrong better or worse", table)
    return is_right


def rate_of_wrong_sweeps(procedure: Procedure, sweeps: np.ndarray) -> float:
    """Share of sweeps (N, settings, seeds) in which any setting is better or worse."""
    # much noise, so that no setting stops early without a difference
    verdicts, _ = procedure.simulate(sweeps.reshape(-1, sweeps.shape[-1]))
    is_wrong = np.isin(verdicts, ["better", "worse"]).reshape(sweeps.shape[:2])
    return float(is_wrong.any(axis=1).mean())


def print_false_equivalence() -> None:
    """Print how many settings with a difference get the verdict that they have none."""
    table = make_table("difference", "settings", *(f"s = {100 * s:g} %" for s in NOISE))
    for difference, num_settings in itertools.product((0.005, 0.0075), NUM_SETTINGS):
        procedure = list_procedures(num_settings)[0]
        rates = [
            procedure.simulate(draw_setting(difference, noise))[0].count(EQUIVALENT) / SWEEPS
            for noise in NOISE
        ]
        table.add_row(f"{100 * difference:g} %", f"{num_settings}", *map(format_percent, rates))
    show(f'Settings with a difference that have a wrong "{EQUIVALENT}"', table)


def print_power(num_settings: int) -> None:
    """Print how many settings get the right verdict, and the mean number of seeds until then."""
    procedures = list_procedures(num_settings)
    table = make_table("difference", "s", *(procedure.name for procedure in procedures), left=2)
    for difference, noise in itertools.product(DIFFERENCES, NOISE):
        sequences = draw_setting(difference, noise)
        cells = [measure_power(procedure, sequences, difference) for procedure in procedures]
        table.add_row(f"{100 * difference:g} %", f"{100 * noise:g} %", *cells)
    show(f"Right verdicts (mean number of seeds) with {pluralize(num_settings, 'setting')}", table)


def print_effect_variances() -> None:
    """Print right verdicts and seeds with other values of EFFECT_VARIANCE (g)."""
    names = [f"g = {variance:g}" for variance in EFFECT_VARIANCES]
    original = statistics.EFFECT_VARIANCE
    for num_settings in NUM_SETTINGS[:2]:
        automatic = list_procedures(num_settings)[0]
        table = make_table("difference", "s", *names, left=2)
        for difference, noise in itertools.product(DIFFERENCES, NOISE):
            sequences = draw_setting(difference, noise)
            cells = []
            for statistics.EFFECT_VARIANCE in EFFECT_VARIANCES:
                cells.append(measure_power(automatic, sequences, difference))
            table.add_row(f"{100 * difference:g} %", f"{100 * noise:g} %", *cells)
        show(
            f"Right verdicts (mean number of seeds) with {pluralize(num_settings, 'setting')}",
            table,
        )
    statistics.EFFECT_VARIANCE = original


def print_widths() -> None:
    """Print half the width of the intervals, in standard deviations of a difference."""
    counts = (3, 4, 5, 7, 10)
    table = make_table("settings", "interval", *(f"{count} seeds" for count in counts), left=2)
    for num_settings in NUM_SETTINGS:
        automatic, repeated, once, *_ = list_procedures(num_settings)
        once.name = "t, once"
        for procedure in (automatic, repeated, once):
            cells = []
            for count in counts:
                values = np.arange(count) - (count - 1) / 2
                interval = procedure.estimate((values / values.std(ddof=1)).tolist())
                cells.append("none" if interval.high is None else f"{interval.high:.2f} s")
            table.add_row(f"{num_settings}", procedure.name, *cells)
    show("Half the width of the intervals", table)


def draw_setting(difference: float, noise: float) -> np.ndarray:
    """Draw normal differences (SWEEPS, MAX_SEEDS) of one setting."""
    return difference + noise * draw_sweeps(draw_normal, 1, MAX_SEEDS, is_shared=False)[:, 0]


def measure_power(procedure: Procedure, sequences: np.ndarray, difference: float) -> str:
    verdicts, seeds = procedure.simulate(sequences)
    share = verdicts.count("worse" if difference else EQUIVALENT) / len(verdicts)
    mean = f" ({np.mean(seeds):.1f})" if len(procedure.looks) > 1 else ""
    return format_percent(share, 0) + mean


def format_percent(share: float, decimals: int = 1) -> str:
    return f"{100 * share:.{decimals}f} %"


def show(title: str, table: Table) -> None:
    print(f"\n{title}")
    PlainConsole().print(table)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
