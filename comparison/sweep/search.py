"""Hyperparameter search: python train.py -m sweep.trials=20 'optimizer.lr=log(1e-4,1e-2)' name=lr

A trial is a job of a sweep, or one job per seed. Optuna stores the trials in search.journal, so
that the search can be resumed.
"""

import math
import shlex
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
from hydra.core.override_parser.types import Override
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState

from common.errors import UserError
from common.files import read_json
from comparison.sweep.jobs import Job
from comparison.sweep.launch import find_missing_jobs, finish_sweep, train_jobs

MAX_INVALID = 50  # consecutive suggestions that are invalid, until the search ends
optuna.logging.set_verbosity(optuna.logging.WARNING)


def make_distribution(override: Override, is_int: bool) -> BaseDistribution:
    """Make Optuna's distribution of a searched key. Raises UserError if the range is invalid.

    override: key=range, parsed by Hydra. is_int: whether the values are whole numbers.
    """
    sweep = override.value()
    with suppress(ValueError, OverflowError, TypeError):  # TypeError: Hydra's range(4)
        if override.is_discrete_sweep():
            return CategoricalDistribution(list(override.sweep_string_iterator()))
        is_log = "log" in sweep.tags
        if is_int:
            return IntDistribution(math.ceil(sweep.start), math.floor(sweep.end), log=is_log)
        if math.isfinite(sweep.start) and math.isfinite(sweep.end):
            return FloatDistribution(sweep.start, sweep.end, log=is_log)
    advice = "set log(A,B) with 0 < A < B, interval(A,B), range(A,B) or a list A,B"
    raise UserError(f"{override.key_or_group} has an invalid range; {advice}")


def run_search(
    space: dict[str, BaseDistribution],
    make_jobs: Callable[[str | None, dict[str, str]], list[Job]],
    n_trials: int,
    fixed_words: list[str],
) -> int:
    """Train trials until n_trials are finished, and compare all runs.

    space: distribution of each searched key.
    make_jobs: composes one job per seed from the name of the search (None: from the config, or a
        new one) and {key: value as on the command line}. Raises UserError for invalid values.
    fixed_words: the settings of all trials, as on the command line.
    Returns the exit code of finish_sweep. Raises UserError if no trial is valid, before anything
    is written.
    """
    _, jobs = suggest_trial(optuna.create_study(), space, partial(make_jobs, None))
    folder = jobs[0].folder.parent
    study = open_study(folder, space, fixed_words)
    num_done = len(study.get_trials(states=[TrialState.COMPLETE]))
    # A running trial was interrupted
    for trial in study.get_trials(states=[TrialState.FAIL, TrialState.RUNNING]):
        study.enqueue_trial(trial.params)  # try again
    print(f"search   {folder}, {n_trials} trials, {num_done} of them finished before", flush=True)
    all_jobs = []
    outcomes = {}
    for _ in range(n_trials - num_done):
        trial, jobs = suggest_trial(study, space, partial(make_jobs, folder.name))
        all_jobs += jobs
        outcomes |= train_jobs(find_missing_jobs(folder, jobs))
        if all(job.is_done() for job in jobs):
            losses = [read_json(job.folder / "summary.json")["best_val_bpb"] for job in jobs]
            study.tell(trial, fmean(losses))
        else:
            study.tell(trial, state=TrialState.FAIL)
    exit_code = finish_sweep(folder, all_jobs, outcomes)
    print_best(study, fixed_words)
    return exit_code


def suggest_trial(
    study: optuna.Study,
    space: dict[str, BaseDistribution],
    make_jobs: Callable[[dict[str, str]], list[Job]],
) -> tuple[optuna.Trial, list[Job]]:
    """Suggest a trial, and make its jobs. Raises UserError if no combination of values is valid."""
    reason = None
    for _ in range(MAX_INVALID):
        trial = study.ask(space)
        try:
            return trial, make_jobs(format_params(trial))
        except UserError as error:
            reason = error
        study.tell(trial, state=TrialState.PRUNED)
    problem = f"all {MAX_INVALID} combinations of values that were tried are invalid"
    raise UserError(f"{problem}; the last: {reason}")


def open_study(
    folder: Path, space: dict[str, BaseDistribution], fixed_words: list[str]
) -> optuna.Study:
    """Create or load Optuna's study in the folder of a search.

    Raises UserError if the stored search has other settings, keys or choices.
    """
    folder.mkdir(parents=True, exist_ok=True)
    journal = optuna.storages.journal.JournalFileBackend(str(folder / "search.journal"))
    storage = optuna.storages.JournalStorage(journal)
    study = optuna.create_study(storage=storage, study_name="bpb", load_if_exists=True)
    # A seed for each start, so that a continued search does not repeat its first suggestions
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    words = list(fixed_words)
    for key, distribution in space.items():
        choices = getattr(distribution, "choices", ["..."])  # the limits of a range may change
        words.append(f"{key}={','.join(choices)}")
    stored_words = study.user_attrs.get("words", words)
    if stored_words != words:
        stored = " ".join(stored_words)
        raise UserError(f"{folder} is a search with {stored}; restore these, or set another name")
    study.set_user_attr("words", words)
    return study


def format_params(trial: Any) -> dict[str, str]:
    """Format a trial's values as on the command line, and floats with four significant digits."""
    return {
        key: f"{value:.4g}" if isinstance(value, float) else str(value)
        for key, value in trial.params.items()
    }


def print_best(study: optuna.Study, fixed_words: list[str]) -> None:
    """Print the values of the best trial, and the command that trains with them."""
    num_finished = len(study.get_trials(states=[TrialState.COMPLETE]))
    if num_finished == 0:
        return
    words = [f"{key}={value}" for key, value in format_params(study.best_trial).items()]
    loss = f"{study.best_value:.4f} bits per byte"
    print(f"best     {' '.join(words)}: {loss}, the lowest of {num_finished} finished trials")
    print(f"train    {shlex.join(['python', 'train.py', *fixed_words, *words])}", flush=True)
