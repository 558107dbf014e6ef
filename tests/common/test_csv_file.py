"""CSV files of results."""

import csv
from dataclasses import dataclass

from common.files import write_csv


@dataclass
class Row:
    name: str
    value: float | None


def read(path) -> list[dict]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_fields_are_columns_with_plain_numbers(tmp_path):
    write_csv([Row("a", 1.5e-7), Row("b", None)], tmp_path / "rows.csv")
    expected = [{"name": "a", "value": "1.5e-07"}, {"name": "b", "value": ""}]
    assert read(tmp_path / "rows.csv") == expected


def test_text_may_contain_commas_and_line_breaks(tmp_path):
    write_csv([Row('a,"b"\nc', 1)], tmp_path / "rows.csv")
    assert read(tmp_path / "rows.csv")[0]["name"] == 'a,"b"\nc'
