"""compare.py wandb=view: the saved view of a sweep in wandb. No test uses the network."""

import json
import sys

import pytest

pytest.importorskip("wandb_workspaces")

import yaml

from common.errors import UserError
from compare.runs import wandb_view
from compare.runs.wandb_view import save_view


def write_sweep(folder, settings, group="cmp"):
    """Write the files of a sweep that a view reads. settings: {job: (changes of the flat config, kernel)}."""
    for job, (config, kernel) in settings.items():
        (folder / job).mkdir(parents=True)
        wandb = {"mode": "offline", "project": "p", "entity": None, "group": group, "tags": []}
        content = {"seed": 1, "wandb": wandb, "model": {"name": "gpt2"}, "optimizer": {"lr": 1}} | config
        (folder / job / "config.yaml").write_text(yaml.safe_dump(content))
        summary = {"status": "finished", "attention": {"resolved": kernel}}
        (folder / job / "summary.json").write_text(json.dumps(summary))
    (folder / "sweep.json").write_text(json.dumps({"jobs": list(settings)}))
    return folder


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"attention=naive": ({}, "naive"), "attention=flash": ({}, "flash")}, ["attention.resolved"]),
        (
            {"model=gpt2,optimizer.lr=1,seed=1": ({}, "flash"), "model=gpt2,optimizer.lr=2,seed=1": ({}, "flash")},
            ["model.name", "optimizer.lr"],
        ),
    ],
)
def test_view_without_a_login_is_written_as_json(tmp_path, monkeypatch, settings, keys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", "none")
    sentence = save_view([write_sweep(tmp_path / "s", settings)], tmp_path)
    assert f"{tmp_path}/workspace.json; no wandb login" in sentence
    view = json.loads((tmp_path / "workspace.json").read_text())
    (runs,) = view["spec"]["section"]["runSets"]
    (shown,) = runs["filters"]["filters"]
    assert (shown["key"], shown["op"], shown["value"]) == ({"section": "run", "name": "group"}, "=", "cmp")
    assert runs["grouping"] == [{"section": "config", "name": f"{key}.value"} for key in keys]
    (section,) = view["spec"]["section"]["panelBankConfig"]["sections"]
    metrics = [(panel["config"].get("xAxis"), panel["config"].get("metrics")) for panel in section["panels"]]
    assert metrics[:3] == [("step", ["val/loss"]), ("step", ["step_ms"]), (None, ["peak_memory_bytes"])]
    assert view["project"] == "p"


def test_view_is_saved_with_a_login(tmp_path, monkeypatch):
    from wandb_workspaces.workspaces import Workspace

    sweep = write_sweep(tmp_path / "s", {"seed=1": ({}, "flash")})
    monkeypatch.setattr(wandb_view, "find_entity", lambda entity, project: "me")
    monkeypatch.setattr(Workspace, "save", lambda workspace: workspace)
    monkeypatch.setattr(Workspace, "url", property(lambda workspace: f"https://{workspace.entity}/{workspace.project}"))
    assert save_view([sweep], tmp_path) == "view     https://me/p"
    assert not (tmp_path / "workspace.json").exists()
    monkeypatch.setattr(Workspace, "save", lambda workspace: 1 / 0)
    with pytest.raises(UserError, match=r"wandb cannot save the view \(division by zero\)"):
        save_view([sweep], tmp_path)


def test_runs_without_a_common_group_are_refused(tmp_path, monkeypatch):
    sweeps = [write_sweep(tmp_path / name, {"seed=1": ({}, "flash")}, name) for name in ("a", "b")]
    with pytest.raises(UserError, match="one wandb project and group; name one sweep"):
        save_view(sweeps, tmp_path)
    with pytest.raises(UserError, match=r"train the runs with wandb.group=NAME"):
        save_view([write_sweep(tmp_path / "c", {"seed=1": ({}, "flash")}, None)], tmp_path)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    with pytest.raises(UserError, match="wandb=view needs wandb-workspaces; run: pip install"):
        save_view(sweeps[:1], tmp_path)
