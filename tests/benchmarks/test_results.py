"""The CSV files: appended to, widened, never half written."""

from __future__ import annotations

import csv

import pytest

from benchmarks.results import append_rows, read_json, read_rows, write_json


def test_rows_are_appended_in_order(tmp_path):
    path = tmp_path / "folder" / "case.csv"
    assert read_rows(path) == []
    assert append_rows(path, [{"case": "a", "p50_ms": 1.23456789}]) == 1
    assert append_rows(path, [{"case": "b", "p50_ms": None}, {"case": "c", "p50_ms": True}]) == 2
    assert read_rows(path) == [
        {"case": "a", "p50_ms": "1.23457"},
        {"case": "b", "p50_ms": ""},
        {"case": "c", "p50_ms": "True"},
    ]


def test_new_columns_widen_the_file_and_old_rows_stay(tmp_path):
    path = tmp_path / "case.csv"
    append_rows(path, [{"case": "a", "length": 8}])
    append_rows(path, [{"case": "b", "peak_mib": 2.5}])
    append_rows(path, [{"case": "c", "length": 16}])
    assert path.read_text().splitlines()[0] == "case,length,peak_mib"
    assert read_rows(path) == [
        {"case": "a", "length": "8", "peak_mib": ""},
        {"case": "b", "length": "", "peak_mib": "2.5"},
        {"case": "c", "length": "16", "peak_mib": ""},
    ]


def test_rows_that_are_there_are_not_added_again(tmp_path):
    path = tmp_path / "case.csv"
    rows = [{"case": "a", "ratio": 1 / 3, "error": None}, {"case": "a", "ratio": 2 / 3, "error": 'x, "y"\nz'}]
    assert append_rows(path, rows) == 2
    append_rows(path, [{"case": "b", "other": 1}])
    assert append_rows(path, rows) == 0
    assert len(read_rows(path)) == 3
    assert read_rows(path)[1]["error"] == 'x, "y"\nz'


def test_a_write_that_breaks_off_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    """Pitfall: a file that is half written and trusted later."""
    path = tmp_path / "case.csv"
    append_rows(path, [{"case": "a"}])
    before = path.read_bytes()

    def break_off(self, rows):
        self.writer.writerow(["half"])
        raise OSError("no space left on device")

    monkeypatch.setattr(csv.DictWriter, "writerows", break_off)
    with pytest.raises(OSError, match="no space left"):
        append_rows(path, [{"case": "b"}])
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["case.csv"]


def test_json_holds_the_same_rows(tmp_path):
    rows = [{"case": "a", "p50_ms": 1.5, "ratio": None, "bit_equal": True}, {"case": "b", "p50_ms": 0.25}]
    write_json(tmp_path / "rows.json", rows)
    assert read_json(tmp_path / "rows.json") == rows
    write_json(tmp_path / "none.json", [])
    assert read_json(tmp_path / "none.json") == []


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"p50_ms": 1}]'])
def test_other_json_is_refused(tmp_path, text):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ValueError, match=r"rows\.json is no"):
        read_json(tmp_path / "rows.json")
