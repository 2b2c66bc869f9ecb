"""`python -m benchmarks`: cases by name, one file each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import cases
from benchmarks.command_line import main, reproducing_command
from benchmarks.results import read_json, read_rows

ROOT = Path(__file__).resolve().parents[2]

TOY = """
from benchmarks.subject import GateError, Phase, Prepared, Subject

SUMMARY = "a toy"


def add_arguments(parser):
    parser.add_argument("--size", type=int, default=3)
    parser.add_argument("--wrong", action="store_true")


def run(arguments, session):
    def check():
        if arguments.wrong:
            raise GateError("out is off")
        return 0.0

    phases = (Phase("forward", lambda: lambda: None, on_host=True),)
    session.measure(Subject("mine", {"size": arguments.size}, lambda: Prepared(check, phases)))
"""


@pytest.fixture(autouse=True)
def toys(tmp_path, monkeypatch):
    """Two cases of this test beside the real ones."""
    folder = tmp_path / "cases"
    folder.mkdir()
    for name in ("toy", "other_toy"):
        (folder / f"{name}.py").write_text(TOY)
        sys.modules.pop(f"benchmarks.cases.{name}", None)
    monkeypatch.setattr(cases, "__path__", [*cases.__path__, str(folder)])


def test_case_with_its_option(tmp_path):
    assert main(["toy", "--size", "7", "--quick", "--results", str(tmp_path)]) == 0
    (row,) = read_rows(tmp_path / "toy.csv")
    assert (row["size"], row["implementation"], row["status"]) == ("7", "mine", "ok")
    assert row["command"] == "python -m benchmarks toy --size 7 --quick"


def test_the_command_of_a_row_leaves_out_where_rows_go_and_where_files_lie(monkeypatch):
    argv = ["--json", "/somewhere/rows.json", "--train", "/somewhere/corpus fr", "--no-save", "--results=/elsewhere"]
    assert reproducing_command("curves", argv) == "python -m benchmarks curves --train 'corpus fr'"
    monkeypatch.setenv("FAT5_HOPPER", "0")
    argv = ["--set", "data.tokenizer=/somewhere/t"]
    assert reproducing_command("curves", argv) == "FAT5_HOPPER=0 python -m benchmarks curves --set data.tokenizer=t"


def test_several_cases_run_with_their_defaults_and_share_a_json_file(tmp_path):
    arguments = ["toy", "other_toy", "--quick", "--results", str(tmp_path), "--json", str(tmp_path / "rows.json")]
    assert main(arguments) == 0
    assert read_rows(tmp_path / "toy.csv")[0]["size"] == read_rows(tmp_path / "other_toy.csv")[0]["size"] == "3"
    assert [row["case"] for row in read_json(tmp_path / "rows.json")] == ["toy", "other_toy"]


def test_failed_gate_makes_the_exit_code_1(tmp_path):
    assert main(["toy", "--wrong", "--quick", "--results", str(tmp_path)]) == 1
    assert read_rows(tmp_path / "toy.csv")[0]["status"] == "FAILED"


def test_nothing_is_saved_if_so_asked(tmp_path):
    assert main(["toy", "--quick", "--no-save", "--results", str(tmp_path)]) == 0
    assert not (tmp_path / "toy.csv").exists()


def test_rows_of_another_machine_are_recorded_once(tmp_path, capsys):
    file = tmp_path / "rows.json"
    main(["toy", "other_toy", "--quick", "--no-save", "--json", str(file)])
    results = tmp_path / "results"
    assert main(["record", str(file), "--results", str(results)]) == 0
    assert main(["record", str(file), "--results", str(results)]) == 0
    assert len(read_rows(results / "toy.csv")) == len(read_rows(results / "other_toy.csv")) == 1
    assert "0 rows added, 1 were there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["atention"], "no case 'atention'.*did you mean 'attention'"),
        (["attnetion"], "no case 'attnetion'.*did you mean 'attention'"),
        (["reprot"], "no case 'reprot'.*did you mean 'report'"),
        (["toy", "--sise", "3"], "unrecognized arguments: --sise"),
        (["toy", "other_toy", "--size", "3"], "unrecognized arguments: --size"),
        (["--quick"], "unrecognized arguments: --quick"),
        ([], "name a case first"),
        (["record", "/nowhere.json"], "there is no file /nowhere.json"),
        (["record", "benchmarks/results/attnetion.csv"], "did you mean 'benchmarks/results/attention.csv'"),
        (["attention", "--implementations", "fat5-tritn"], "no implementation 'fat5-tritn'.*'fat5-triton'"),
    ],
)
def test_mistakes_are_named(arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_help_lists_the_cases_without_loading_torch():
    """Pitfall: a help text that waits for imports."""
    script = (
        "import contextlib, sys\n"
        "from benchmarks.command_line import main\n"
        "with contextlib.suppress(SystemExit):\n    main(['--help'])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in ("attention", "collator", "plot", "record"):
        assert f"  {name} " in done.stdout


def test_a_missing_package_is_named_with_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.command_line.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        main(["toy", "--quick"])
    assert stop.value.code == 2
    assert "PYTHONPATH=src" in capsys.readouterr().err
