"""Saves a workspace view in wandb that shows the runs of a comparison: losses, step times, memory and the table."""

from pathlib import Path

import yaml

from common.errors import UserError
from common.files import atomic_write
from compare.runs.read import CHOICES, Run, read_settings
from training.wandb_logger import find_entity


def save_view(folders: list[Path], out: Path) -> str:
    """Save the view of all runs in `folders`. Returns a sentence for the user. Without a login, writes workspace.json.

    Raises UserError if wandb-workspaces is missing, if wandb cannot save the view, or if the runs have no common group.
    """
    runs = [run for setting in read_settings(folders) for run in setting.runs if run.config is not None]
    configs = [yaml.safe_load((run.folder / "config.yaml").read_text())["wandb"] for run in runs]
    places = {(config["entity"], config["project"], config["group"]) for config in configs}
    if len(places) != 1:
        raise UserError("wandb=view shows runs of one wandb project and group; name one sweep")
    entity, project, group = places.pop()
    if group is None:
        raise UserError("wandb=view finds runs by their group; name a sweep, or train the runs with wandb.group=NAME")
    try:
        found = find_entity(entity, project)
        workspace = make_workspace(found or entity or "", project, group, runs)
        if found is None:
            path = out / "workspace.json"
            atomic_write(path, workspace._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=1))
            return f"view     {path}; no wandb login: run `wandb login`, then the same command again to save it"
        return f"view     {workspace.save().url}"
    except UserError:
        raise
    except Exception as error:  # wandb can raise anything
        raise UserError(f"wandb cannot save the view ({' '.join(str(error).split())}); try again later") from None


def make_workspace(entity: str, project: str, group: str, runs: list[Run]):
    """The wandb_workspaces.workspaces.Workspace of a group. Raises UserError if the package is missing."""
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise UserError("wandb=view needs wandb-workspaces; run: pip install 'wandb-workspaces>=0.4.13'") from None

    shown = [
        panels.LinePlot(title="Validation loss", x="step", y=["val/loss"]),
        panels.LinePlot(title="Step time, ms", x="step", y=["step_ms"]),
        panels.BarPlot(title="Peak memory, bytes", metrics=["peak_memory_bytes"]),
        panels.WeavePanelSummaryTable(table_name="comparison"),  # logged by train.py -m
        panels.RunComparer(diff_only="split"),
    ]
    shown_runs = workspaces.And(workspaces.Metric("group") == group)
    # flat keys such as attention.resolved; without ".value", the package would look for nested ones
    group_by = [workspaces.Config(f"{key}.value") for key in list_group_keys(runs)]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=f"{group} comparison",
        sections=[workspaces.Section(name="Comparison", panels=shown, is_open=True)],
        settings=workspaces.WorkspaceSettings(x_axis="step", max_runs=max(10, len(runs))),
        runset_settings=workspaces.RunsetSettings(filters=shown_runs, groupby=group_by),
    )


def list_group_keys(runs: list[Run]) -> list[str]:
    """The config keys to group runs by: the kernel if it differs, and the swept keys except attention and the seed."""
    kernels = {run.summary["attention"]["resolved"] for run in runs if "attention" in run.summary}
    keys = {word.partition("=")[0] for run in runs for word in run.job or ()} - {"attention"}
    options = [f"{key}{end}" for key in sorted(keys) for end in ("", *CHOICES)]
    return ["attention.resolved"] * (len(kernels) > 1) + [key for key in options if key in runs[0].config]
