"""Hyperparameter search: python train.py -m sweep.trials=20 'optimizer.lr=log(1e-4,1e-2)' name=lr

A trial is a job of a sweep, or one job per seed. Optuna stores the trials in search.journal, to resume the search.
"""

import math
import shlex
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.types import Override
from optuna.trial import TrialState

from common.errors import UserError
from common.files import read_json
from comparison.sweep.launch import find_missing_jobs, finish_sweep, train_jobs
from generation.run_paths import SWEEPS

MAX_REJECTED = (
    50  # consecutive suggestions that are invalid or were tried before, until the search ends
)
optuna.logging.set_verbosity(optuna.logging.WARNING)


def make_distribution(word: str, override: Override, is_int: bool) -> Any:
    """Make Optuna's distribution of a searched key. Raises UserError if the range is invalid.

    word, override: the range as on the command line, and parsed by Hydra. is_int: whether its values are integers.
    """
    distributions, sweep = optuna.distributions, override.value()
    with suppress(ValueError, OverflowError, TypeError):  # TypeError: Hydra's range(4)
        if override.is_discrete_sweep():
            return distributions.CategoricalDistribution(list(override.sweep_string_iterator()))
        if is_int:
            return distributions.IntDistribution(
                math.ceil(sweep.start), math.floor(sweep.end), log="log" in sweep.tags
            )
        if math.isfinite(sweep.start) and math.isfinite(sweep.end):
            return distributions.FloatDistribution(sweep.start, sweep.end, log="log" in sweep.tags)
    raise UserError(
        f"{word} is not a range; set log(A,B) with 0 < A < B, interval(A,B), range(A,B) or a list A,B"
    )


def run_search(
    space: dict[str, Any], make_jobs: Callable, n_trials: int, fixed_words: list[str]
) -> int:
    """Train trials until n_trials are finished, and compare all runs.

    space: distribution of each searched key. fixed_words: the settings of all trials, as on the command line.
    make_jobs: composes one job per seed from the name of the search (None: from the config, or a new one) and
        {key: value as on the command line}. Returns the name and the jobs. Raises UserError for invalid values.
    Returns the exit code of finish_sweep. Raises UserError if no trial is valid, before anything is written.
    """
    _, _, (name, _) = _suggest_trial(optuna.create_study(), space, partial(make_jobs, None), [])
    study = _open_study(folder := SWEEPS / name, space, fixed_words)
    tried = [_format_params(trial) for trial in study.get_trials(states=[TrialState.COMPLETE])]
    for trial in study.get_trials(
        states=[TrialState.FAIL, TrialState.RUNNING]
    ):  # running: interrupted
        study.enqueue_trial(trial.params)  # try again
    print(f"search   {folder}, {n_trials} trials, {len(tried)} of them finished before", flush=True)
    all_jobs, outcomes = [], {}
    while len(tried) < n_trials:
        try:
            trial, values, (_, jobs) = _suggest_trial(study, space, partial(make_jobs, name), tried)
        except UserError:
            print(
                f"search   ends after {len(tried)} trials: no other valid combination of values was found"
            )
            break
        tried.append(values)
        all_jobs += jobs
        outcomes |= train_jobs(find_missing_jobs(folder, jobs))
        losses = [
            read_json(job.folder / "summary.json").get("best_val_bpb") if job.is_done() else None
            for job in jobs
        ]
        loss = None if None in losses else math.fsum(losses) / len(losses)
        study.tell(
            trial.number, loss, state=TrialState.FAIL if loss is None else TrialState.COMPLETE
        )
    code = finish_sweep(folder, all_jobs, outcomes)
    if n_finished := len(study.get_trials(states=[TrialState.COMPLETE])):
        best, loss = (
            [f"{k}={v}" for k, v in _format_params(study.best_trial).items()],
            study.best_value,
        )
        print(
            f"best     {' '.join(best)}: {loss:.4f} bits per byte, the lowest of {n_finished} finished trials"
        )
        print(f"train    {shlex.join(['python', 'train.py', *fixed_words, *best])}", flush=True)
    return code


def _suggest_trial(
    study: Any, space: dict[str, Any], make_jobs: Callable, tried: list[dict]
) -> tuple:
    """Suggest a trial with new values: (trial, values, make_jobs(values)). Raises UserError if none is valid."""
    reason = None
    for _ in range(MAX_REJECTED):
        trial = study.ask(space)
        values = _format_params(trial)
        try:
            if values not in tried:
                return trial, values, make_jobs(values)
        except UserError as error:
            reason = error
        study.tell(trial.number, state=TrialState.PRUNED)
    raise UserError(
        f"all {MAX_REJECTED} combinations of values that were tried are invalid; the last: {reason}"
    )


def _open_study(folder: Path, space: dict[str, Any], fixed_words: list[str]) -> Any:
    """Create or load Optuna's study. Raises UserError if the stored search has other settings, keys or choices."""
    folder.mkdir(parents=True, exist_ok=True)
    journal = optuna.storages.journal.JournalFileBackend(str(folder / "search.journal"))
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(journal), study_name="bpb", load_if_exists=True
    )
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    words = fixed_words + [
        f"{key}={','.join(getattr(space[key], 'choices', ['...']))}" for key in space
    ]
    stored_words = study.user_attrs.get("words", words)
    if stored_words != words:
        raise UserError(
            f"{folder} is a search with {' '.join(stored_words)}; restore these, or set another name"
        )
    study.set_user_attr("words", words)
    return study


def _format_params(trial: Any) -> dict[str, str]:
    """Format the suggested values as on the command line. Floats are rounded to four significant digits."""
    return {
        key: f"{value:.4g}" if isinstance(value, float) else str(value)
        for key, value in trial.params.items()
    }
