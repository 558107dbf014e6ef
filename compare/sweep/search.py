"""Hyperparameter search: python train.py -m sweep.trials=20 'optimizer.lr=log(1e-4,1e-2)' name=lr

Optuna suggests the values of each trial from the losses of the trials before it. A trial is an ordinary job of a
sweep, or one job per seed. sweep.json lists the values of the trials, and their runs have the losses. There is no
other state, so a search that is killed loses nothing.
"""

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, RangeSweep

from common.errors import TrainingFailed, UserError
from common.files import read_json
from common.plots import COLORS, make_figure, style_axes
from common.run_dir import SWEEPS, read_summary
from compare.sweep.jobs import Job, Outcome
from compare.sweep.launch import finish_sweep, launch, write_sweep_file

DIGITS = 4  # of suggested numbers
MAX_DRAWS = 50  # suggestions in a row that are invalid or were tried before, until the search ends
MAX_FAILED = 3  # the search stops if all of its first trials failed
# Losses per token cannot be compared if these sections or their keys are searched.
CHANGES_TOKENS = ("tokenizer", "data", "text_size", "experiment")
Values = dict[str, str]  # {key: value as on the command line}


@dataclass
class Trial:
    """values: of the searched keys. loss: lowest validation loss, mean over seeds; None: a run did not finish."""

    values: Values
    loss: float | None = None


def import_optuna() -> Any:
    """Import Optuna. Raises UserError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise UserError("sweep.trials needs Optuna; install it: pip install 'optuna>=5,<6'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def make_distribution(word: str, override: Override, is_int: bool) -> Any:
    """Make Optuna's distribution of a searched key. override: the parsed word. is_int: of whole numbers.

    Raises UserError if the range is invalid.
    """
    kinds, sweep = import_optuna().distributions, override.value()
    try:
        if isinstance(sweep, RangeSweep) and isinstance(sweep.start + sweep.stop + sweep.step, int):
            numbers = range(sweep.start, sweep.stop, sweep.step)
            return kinds.IntDistribution(numbers[0], numbers[-1], step=sweep.step)
        if override.is_discrete_sweep():
            return kinds.CategoricalDistribution(list(override.sweep_string_iterator()))
        is_log = "log" in sweep.tags
        if is_int:
            return kinds.IntDistribution(math.ceil(sweep.start), math.floor(sweep.end), log=is_log)
        if math.isfinite(sweep.start) and math.isfinite(sweep.end):
            return kinds.FloatDistribution(sweep.start, sweep.end, log=is_log)
    except (ValueError, OverflowError, IndexError, TypeError):  # TypeError: Hydra's range(4)
        pass
    options = "log(A,B) with 0 < A < B, interval(A,B) or range(A,B) with A < B, or a list A,B"
    raise UserError(f"{word} is not a range; set {options}")


def run_search(
    name: str,
    space: dict[str, Any],
    make_jobs: Callable[[Values], list[Job]],
    n_trials: int,
    launcher_config: Any,
    fixed_words: list[str],
) -> int:
    """Train trials until there are n_trials, and compare all runs. Returns the exit code, as run_sweep.

    space: distributions of the searched keys. make_jobs: composes the jobs of a trial, one for each seed; it raises
    UserError for invalid combinations. fixed_words: the settings that all trials have in common.
    """
    folder = SWEEPS / name
    loss_key = "best_val_bpb" if any(key.startswith(CHANGES_TOKENS) for key in space) else "best_val_loss"
    known = read_json(folder / "sweep.json").get("trials", [])
    for values in known:
        if values.keys() != space.keys():
            raise UserError(f"{folder} is a search of {', '.join(values)}; search these keys, or set another name")
    earlier = [values for values in known if _to_optuna(Trial(values), space) is not None]
    trials: list[Trial] = []
    all_jobs: list[Job] = []
    outcomes: dict[str, Outcome] = {}
    started = f", {min(len(earlier), n_trials)} of them started before" if earlier else ""
    print(f"search   {folder}, {n_trials} trials{started}", flush=True)
    while len(trials) < n_trials:
        if len(trials) < len(earlier):
            values = earlier[len(trials)]
            jobs = make_jobs(values)
        else:
            suggestion = suggest(space, trials, make_jobs)
            if suggestion is None:
                print(f"search   ends after {len(trials)} trials: no other valid combination of values was found")
                break
            values, jobs = suggestion
            known.append(values)
        for job in jobs:
            job.check_folder()
        trial = Trial(values)
        trials.append(trial)
        all_jobs += jobs
        write_sweep_file(folder, all_jobs, trials=known)
        if todo := [job for job in jobs if not job.is_done()]:
            outcomes |= launch(todo, launcher_config, jobs)
        losses = [read_summary(job.folder).get(loss_key) for job in jobs if job.is_done()]
        if len(losses) == len(jobs) and None not in losses:
            trial.loss = math.fsum(losses) / len(losses)
        if len(trials) == MAX_FAILED and all(trial.loss is None for trial in trials):
            reasons = [outcome.reason for outcome in outcomes.values()] or ["it has no validation loss"]
            raise TrainingFailed(f"the first {MAX_FAILED} trials failed, so the search stops; the last: {reasons[-1]}")
    code = finish_sweep(folder, all_jobs, outcomes)
    if finished := [trial for trial in trials if trial.loss is not None]:
        best = min(finished, key=lambda trial: trial.loss)
        words = [f"{key}={value}" for key, value in best.values.items()]
        unit = "bits per byte" if loss_key == "best_val_bpb" else "nats per token"
        plot_search(folder / "search.png", space, finished, best, f"lowest validation loss, {unit}")
        print(f"picture  {folder / 'search.png'}")
        print(f"best     {' '.join(words)}: {best.loss:.4f} {unit}, the lowest of {len(finished)} finished trials")
        print(f"train    {shlex.join(['python', 'train.py', *fixed_words, *words])}", flush=True)
    return code


def suggest(
    space: dict[str, Any], trials: list[Trial], make_jobs: Callable[[Values], list[Job]]
) -> tuple[Values, list[Job]] | None:
    """Suggest new, valid values with Optuna's TPE sampler, and compose their jobs. None: no such values were found.

    The values depend on the arguments only. Raises UserError if all values are invalid.
    """
    optuna = import_optuna()
    tried, reason = [trial.values for trial in trials], None
    finished = [_to_optuna(trial, space) for trial in trials]
    for draw in range(MAX_DRAWS):
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=MAX_DRAWS * len(trials) + draw))
        study.add_trials(finished)
        params = study.ask(space).params
        values = {key: _format_param(params[key], distribution) for key, distribution in space.items()}
        if values not in tried:
            try:
                return values, make_jobs(values)
            except UserError as error:
                tried.append(values)
                reason = error
    if reason is not None and not trials:
        raise UserError(f"{len(tried)} combinations of values were tried, and all are invalid; the last: {reason}")
    return None


def _format_param(value: Any, distribution: Any) -> str:
    """A suggested value as on the command line. Numbers are rounded, but not out of their range."""
    if isinstance(value, float):
        value = min(max(float(f"{value:.{DIGITS}g}"), distribution.low), distribution.high)
    return str(value)


def _to_optuna(trial: Trial, space: dict[str, Any]) -> Any:
    """Convert a trial for Optuna. None: its values are not in the ranges."""
    optuna = import_optuna()
    state = optuna.trial.TrialState.FAIL if trial.loss is None else optuna.trial.TrialState.COMPLETE
    types = {optuna.distributions.IntDistribution: int, optuna.distributions.FloatDistribution: float}
    try:
        params = {key: types.get(type(space[key]), str)(value) for key, value in trial.values.items()}
        return optuna.trial.create_trial(state=state, value=trial.loss, params=params, distributions=space)
    except ValueError:
        return None


def plot_search(path: Path, space: dict[str, Any], trials: list[Trial], best: Trial, label: str) -> None:
    """Plot the losses of finished trials over each searched key, and mark the best trial."""
    columns = min(3, len(space))
    rows = math.ceil(len(space) / columns)
    figure = make_figure(max(4.5, 3.4 * columns), 3.2 * rows)
    for index, key in enumerate(space):
        axes = figure.add_subplot(rows, columns, index + 1)
        choices = getattr(space[key], "choices", None)
        numbers = [
            float(trial.values[key]) if choices is None else choices.index(trial.values[key]) for trial in trials
        ]
        axes.scatter(numbers, [trial.loss for trial in trials], color=COLORS[0], alpha=0.8, linewidths=0)
        axes.scatter(numbers[trials.index(best)], best.loss, color=COLORS[1], marker="*", s=170, zorder=3)
        if choices is not None:
            axes.set_xticks(range(len(choices)), choices)
            axes.set_xlim(-0.5, len(choices) - 0.5)
        else:
            axes.scatter([space[key].low, space[key].high], [best.loss] * 2, alpha=0)  # the axis shows the range
            axes.set_xscale("log" if space[key].log else "linear")
        style_axes(axes, key)
    figure.supylabel(label, fontsize=10)
    figure.suptitle(f"{len(trials)} trials (star: the best)", fontsize=10.5, x=0.01, ha="left")
    figure.savefig(path)
