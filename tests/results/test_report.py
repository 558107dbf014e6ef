"""The page of a comparison, report.html."""

import re
from pathlib import Path

import pytest
from comparison_helpers import KERNEL, write_run

from results.read import read_settings
from results.report import write_report
from results.statistics import compute_stats

ATTACK = "<script>alert(1)</script>\x1b[2J"


def make_page(*folders: Path) -> str:
    settings = read_settings(list(folders))
    picture = folders[0].parent / "a.png"
    picture.write_bytes(b"picture")
    path = picture.with_name("report.html")
    write_report(settings, compute_stats(settings), picture, path)
    return path.read_text(encoding="utf-8")


@pytest.fixture
def page(tmp_path) -> str:
    """The page of two finished runs and a refused one."""
    return make_page(
        write_run(tmp_path / "a", command="python train.py", versions={"torch": "2.99"}),
        write_run(tmp_path / "b", 2, commit="abc123"),
        write_run(tmp_path / "no", status="refused", error="needs a GPU", changes=KERNEL),
    )


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("Comparison of 3 runs in 2 settings", id="title"),
        pytest.param("<td>val loss</td><td>1.0000", id="statistics"),
        pytest.param("<td>attention.backend</td><td>naive</td><td>flex</td>", id="config"),
        pytest.param("needs a GPU", id="reason"),
        pytest.param("python train.py", id="command"),
        pytest.param("torch:2.99", id="versions"),
        pytest.param("abc123", id="commit"),
    ],
)
def test_page_has_the_results_and_how_to_repeat_them(page, text):
    assert text in page


def test_page_has_only_the_config_values_that_differ(page):
    assert "optimizer.lr" not in page


def test_page_contains_its_picture(page):
    assert page.count("data:image/png;base64,cGljdHVyZQ==") == 1


def test_page_loads_nothing(page):
    assert not re.search(r"https?://|\b(src|href)=\"(?!data:image/png;base64,)|url\(|@import", page)


def test_text_of_runs_does_not_control_the_page(tmp_path):
    page = make_page(
        write_run(tmp_path / "a", command=ATTACK, commit=ATTACK, versions={"torch": ATTACK}),
        write_run(tmp_path / "b", changes={"model.name": ATTACK}, dtype=ATTACK),
        write_run(tmp_path / "c", status="refused", error=ATTACK),
    )
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 6
