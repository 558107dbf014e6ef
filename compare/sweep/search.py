"""Hyperparameter search: python train.py -m sweep.trials=20 'optimizer.lr=log(1e-4,1e-2)' name=lr

A trial is a job of a sweep, or one job per seed. Optuna stores the trials in search.journal, to continue a search.
"""

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, RangeSweep

from common.errors import UserError
from common.run_dir import SWEEPS, read_summary
from compare.sweep.jobs import Job, Outcome
from compare.sweep.launch import find_missing_jobs, finish_sweep, train_jobs

MAX_DRAWS = 50  # suggestions in a row that are invalid or were tried before, until the search ends
# Losses per token cannot be compared if these sections or their keys are searched.
CHANGES_TOKENS = ("tokenizer", "data", "preset", "experiment")


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
    raise UserError(f"{word} is not a range; set log(A,B) with 0 < A < B, interval(A,B), range(A,B) or a list A,B")


def run_search(name: str, space: dict[str, Any], make_jobs: Callable, n_trials: int, fixed_words: list[str]) -> int:
    """Train trials until there are n_trials, and compare all runs. Returns the exit code. Raises UserError.

    space: distributions of the searched keys. make_jobs: composes the jobs of a trial {key: value as on the command
    line}, one for each seed; it raises UserError for invalid combinations. fixed_words: the settings of all trials.
    """
    states, folder = import_optuna().trial.TrialState, SWEEPS / name
    loss_key = "best_val_bpb" if any(key.startswith(CHANGES_TOKENS) for key in space) else "best_val_loss"
    study = _open_study(folder, space, fixed_words)
    tried = [_format_params(trial) for trial in study.get_trials(states=[states.COMPLETE])]
    for failed in study.get_trials(states=[states.FAIL]):
        study.enqueue_trial(failed.params)  # try again
    print(f"search   {folder}, {n_trials} trials, {len(tried)} of them finished before", flush=True)
    all_jobs: list[Job] = []
    outcomes: dict[str, Outcome] = {}
    n_draws, reason = 0, None
    while len(tried) < n_trials and n_draws < MAX_DRAWS:
        trial = next(iter(study.get_trials(states=[states.RUNNING])), None) or study.ask(space)  # resume or start
        values, jobs = _format_params(trial), []
        if values not in tried and values.keys() == space.keys():
            try:
                jobs = make_jobs(values)
            except UserError as error:
                reason = error
        if not jobs:  # invalid, or tried before
            study.tell(trial.number, state=states.PRUNED)
            n_draws += 1
            continue
        n_draws = 0
        tried.append(values)
        all_jobs += jobs
        outcomes |= train_jobs(find_missing_jobs(folder, jobs))
        losses = [read_summary(job.folder).get(loss_key) if job.is_done() else None for job in jobs]
        loss = None if None in losses else math.fsum(losses) / len(losses)
        study.tell(trial.number, loss, state=states.FAIL if loss is None else states.COMPLETE)
    if reason is not None and not tried:
        raise UserError(f"{MAX_DRAWS} combinations of values were tried, and all are invalid; the last: {reason}")
    if len(tried) < n_trials:
        print(f"search   ends after {len(tried)} trials: no other valid combination of values was found")
    code = finish_sweep(folder, all_jobs, outcomes)
    if finished := study.get_trials(states=[states.COMPLETE]):
        unit = "bits per byte" if loss_key == "best_val_bpb" else "nats per token"
        words = [f"{key}={value}" for key, value in _format_params(study.best_trial).items()]
        print(
            f"best     {' '.join(words)}: {study.best_value:.4f} {unit}, the lowest of {len(finished)} finished trials"
        )
        print(f"train    {shlex.join(['python', 'train.py', *fixed_words, *words])}", flush=True)
    return code


def _open_study(folder: Path, space: dict[str, Any], fixed_words: list[str]) -> Any:
    """Create or load Optuna's study. Raises UserError if the stored search has other settings, keys or choices."""
    optuna = import_optuna()
    folder.mkdir(parents=True, exist_ok=True)
    journal = optuna.storages.journal.JournalFileBackend(str(folder / "search.journal"))
    study = optuna.create_study(storage=optuna.storages.JournalStorage(journal), study_name="", load_if_exists=True)
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    choices = {key: ",".join(getattr(distribution, "choices", ["..."])) for key, distribution in space.items()}
    words = [*fixed_words, *map("=".join, choices.items())]
    known = study.user_attrs.get("words", words)
    if known != words:
        raise UserError(f"{folder} is a search with {' '.join(known)}; restore these settings, or set another name")
    study.set_user_attr("words", words)
    return study


def _format_params(trial: Any) -> dict[str, str]:
    """The suggested values as on the command line. Numbers are rounded to four digits."""
    rounded = {key: float(f"{n:.4g}") for key, n in trial.params.items() if isinstance(n, float)}
    return {key: str(value) for key, value in (trial.params | rounded).items()}
