"""Many runs from one command: python train.py -m attention=naive,sdpa,flash seed=1,2,3

Every job is composed and checked before anything is made. Hydra's launchers start them: one after another here, or,
with hydra/launcher=submitit_slurm, on a cluster. Started again under the same name, a sweep does what is missing.
"""

import itertools
import os
import re
import shlex
import sys
import time
from argparse import Namespace
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import OmegaConf

from common.errors import UserError
from common.files import read_json, write_json
from common.interrupt import sigterm_as_keyboard_interrupt
from common.run_dir import JOB, SWEEPS, make_new_folder
from compare.runs.comparison import compare, show
from compare.sweep.jobs import Job, Outcome, SweepProgress, recover, train
from configs.composition import composing, is_hydras, quote
from training.wandb_logger import log_table_to_wandb


def run_multirun(flags: Namespace, overrides: list[str]) -> int:
    """Train every combination of the values given -> the exit code: 1 where any failed, 2 where all were refused."""
    if flags.cfg:
        raise UserError("--cfg shows the config of one run; leave out -m, and give one value for each key")
    words = [word for word in overrides if not is_hydras(word.split("=", 1)[0])]
    launch = [word for word in overrides if word not in words]
    with composing(flags.config_dir) as search:
        combinations = expand(words)
        composed = [_compose(each.values(), words, search) for each in combinations]
        launcher_config = _launcher_config(launch + search)
        names = _names(combinations)
        name = composed[0].name or make_new_folder(SWEEPS, f"{composed[0].data.label}-{composed[0].model.name}")
        each_words = [_words(values.values(), words) for values in combinations]
        jobs = [_job(name, *each, flags.config_dir) for each in zip(names, composed, each_words, strict=True)]
        return _run(name, jobs, composed[0], launcher_config)


def expand(words: list[str]) -> list[dict[str, str]]:
    """Every combination of the keys that have several values -> [{key: "key=value"}, ...].

    The last key runs fastest, and the seed slowest, so that a machine that drifts does so for all settings alike.
    Raises UserError where no key has several values, or one is given twice.
    """
    loader = GlobalHydra.instance().config_loader()
    parsed = OverridesParser.create(config_loader=loader).parse_overrides([quote(word) for word in words])
    swept = {o.key_or_group: [f"{o.key_or_group}={v}" for v in o.sweep_string_iterator()]
             for o in parsed if o.is_discrete_sweep()}  # fmt: skip
    if not any(len(values) > 1 for values in swept.values()):
        raise UserError("-m takes several values for at least one key; set, say, seed=1,2,3, or leave out -m")
    for key in swept:
        if sum(word.split("=", 1)[0] == key for word in words) > 1:
            raise UserError(f"{key} is given twice; give all of its values at once, as in {key}=A,B")
    swept = dict(sorted(swept.items(), key=lambda item: item[0] != "seed"))
    return [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]


def _words(values: Any, words: list[str]) -> list[str]:
    """The command line of one job: `values` in the place of the keys that they give."""
    keys = {value.split("=", 1)[0] for value in values}
    return [word for word in words if word.split("=", 1)[0] not in keys] + list(values)


def _compose(values: Any, words: list[str], search: list[str]) -> Any:
    config = OmegaConf.to_object(compose("train", overrides=[quote(w) for w in _words(values, words)] + search))
    config.check()
    if config.plan:
        raise UserError("plan=true tells of one run; leave out -m, and give one value for each key")
    if config.name is not None and "/" in config.name:
        raise UserError(f"name={config.name} is one run of a sweep; leave out -m, or set the sweep's own name")
    return config


def _names(combinations: list[dict[str, str]]) -> list[str]:
    """Each job's name: its values in the order of their keys, so that it is found again however they are typed."""
    names = [",".join(values[key] for key in sorted(values)) for values in combinations]
    names = [re.sub(r"[^A-Za-z0-9._=,+-]", "_", name.replace("'", "")) for name in names]
    for name in names:
        if not JOB.fullmatch(name):
            raise UserError(f"{name[:60]}... is too long for the name of a run's folder; sweep over fewer keys at once")
        if names.count(name) > 1:
            raise UserError(f"{name} would be trained twice; give each value once")
    return names


def _job(sweep: str, name: str, config: Any, words: list[str], config_dir: str | None) -> Job:
    own = {"name": f"sweeps/{sweep}/{name}", "wandb.group": config.wandb.group or sweep}
    full = asdict(config) | {"name": own["name"]}
    full["wandb"] |= {"group": own["wandb.group"]}
    folder = ["--config-dir", config_dir] if config_dir is not None else []
    keep = [word for word in words if word.split("=", 1)[0] not in own]
    return Job(name, SWEEPS / sweep / name, [*folder, *keep, *(f"{key}={own[key]}" for key in own)], full)


def _launcher_config(overrides: list[str]) -> Any:
    """Hydra's own config: its launcher as `overrides` set it, and nothing of its own written beside our runs."""
    quiet = ["hydra.output_subdir=null", "hydra/hydra_logging=none", "hydra/job_logging=none", "hydra.sweep.subdir=."]
    return compose("train", overrides=[*overrides, *quiet, "hydra.job.name=train"], return_hydra_config=True)


def _run(name: str, jobs: list[Job], config: Any, launcher_config: Any) -> int:
    folder = SWEEPS / name
    for job in jobs:
        job.check()
    folder.mkdir(parents=True, exist_ok=True)
    _remember(folder, jobs)
    todo = [job for job in jobs if not job.is_done()]
    done = f", {len(jobs) - len(todo)} of them finished before" if len(todo) < len(jobs) else ""
    print(f"sweep    {folder}, {len(jobs)} runs{done}", flush=True)
    outcomes = _launch(todo, launcher_config, jobs) if todo else {}
    try:
        rows = compare([folder], folder)
        show(rows, folder)
        if todo:
            group = config.wandb.group or name
            log_table_to_wandb(
                config.wandb, "comparison", f"{name}-comparison", group, rows, folder / "comparison.png", {}
            )
    finally:
        code = _report(folder, jobs, outcomes)
    return code


def _remember(folder: Path, jobs: list[Job]) -> None:
    """Write sweep.json: the command, and the names of all jobs that the sweep ever had."""
    names = read_json(folder / "sweep.json").get("jobs", [])
    names += [job.name for job in jobs if job.name not in names]
    write_json(folder / "sweep.json", {"command": shlex.join(["python", *sys.argv]), "jobs": names})


def _launch(todo: list[Job], config: Any, jobs: list[Job]) -> dict[str, Outcome]:
    """Start the jobs through Hydra's launcher -> how each ended. Raises KeyboardInterrupt when asked to stop."""
    config.hydra.sweep.dir = str(todo[0].folder.parent)
    # The launcher composes each job anew, from these: without it Hydra makes a folder of its own, multirun/.
    config.hydra.overrides.hydra.append(f"hydra.sweep.dir={config.hydra.sweep.dir}")
    context = HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=Callbacks())
    task = partial(_task, {job.config["name"]: job for job in todo})
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
    here = str(Path(__file__).parent.parent)  # a launcher's processes on other machines import this module by its name
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    began = time.time()
    try:
        with sigterm_as_keyboard_interrupt(), SweepProgress(jobs, todo):
            returned = launcher.launch([[quote(word) for word in job.words[-2:]] for job in todo], initial_job_idx=0)
        return {job.name: each.return_value for job, each in zip(todo, returned, strict=True)}
    except KeyboardInterrupt:
        name = todo[0].folder.parent.name
        elsewhere = "" if config.hydra.runtime.choices["hydra/launcher"] == "basic" else ", but for jobs elsewhere"
        raise KeyboardInterrupt(f"stopped{elsewhere}; the same command with name={name} goes on") from None
    except Exception as error:  # a launcher is a plugin with exceptions of its own; the jobs' files say how they ended
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return {job.name: recover(job, began, reason) for job in todo}


def _task(jobs: dict[str, Job], config: Any) -> Outcome:
    """What a launcher runs, here or on another machine; `config` is Hydra's, of which the name alone is needed."""
    try:
        return train(jobs[config.name])
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {error}")


def _report(folder: Path, jobs: list[Job], outcomes: dict[str, Outcome]) -> int:
    """Say what did not finish -> the exit code."""
    for name, outcome in outcomes.items():
        if outcome.status not in ("finished", "refused"):  # a refusal is a row, and its reason below the table
            log = f" ({folder / name / 'train.log'})" if outcome.status == "failed" else ""
            print(f"{outcome.status:<9}{name}: {outcome.reason}{log}", file=sys.stderr)
    ended = {outcome.status for outcome in outcomes.values()}
    if "failed" in ended:
        print(f"the same command with name={folder.name} tries the missing ones again", file=sys.stderr)
        return 1
    if "interrupted" in ended:
        return 75
    return 2 if ended == {"refused"} and len(outcomes) == len(jobs) else 0
